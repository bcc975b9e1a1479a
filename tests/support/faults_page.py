"""Compare docs/faults.md with the tests: each published fault, and the check that stopped it in a run of the graph.

A test that runs the graph with a fault calls `stopped`, which requires its line on the page. So every line of the
page is the result of a run. `ETPI_WRITE_FAULTS=1 pytest ...` adds missing lines.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
HEAD = "| fault | stopped at | by | message |"


def stopped(fault: str, asset: str, failed: Mapping[str, str], check: str, says: str) -> None:
    """Assert that `check` failed, that its message contains `says`, and that the page has this line."""
    assert check in failed, f"{check} did not fail; failed: {sorted(failed)}"
    assert says in failed[check], failed[check]
    line = f"| {fault} | `{asset}` | `{check}` | {says} |".replace("<", "&lt;")
    if os.environ.get("ETPI_WRITE_FAULTS") and line not in lines():
        named = line.split(" | ")[0]
        rest = [other for other in PAGE.read_text().splitlines() if not other.startswith(f"{named} |")]
        PAGE.write_text("\n".join([*rest, line]) + "\n")
    assert line in lines(), f"docs/faults.md lacks the line of this run:\n{line}\nadd it with ETPI_WRITE_FAULTS=1"


def lines() -> list[str]:
    """Return the lines of the page's table."""
    page = PAGE.read_text().splitlines()
    return page[page.index(HEAD) + 2 :]
