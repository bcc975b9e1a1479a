"""docs/faults.md: each published fault, and the check that stopped it in a real run of the graph.

A test that puts a fault where it happens says here what stopped it; the page must hold that line. So the page cannot
say what no run did. A line that a run did not find is written by `ETPI_WRITE_FAULTS=1 pytest ...`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
HEAD = "| fault | stopped at | by | which said |"


def stopped(fault: str, asset: str, failed: Mapping[str, str], check: str, says: str) -> None:
    """Hold that `check` is among the failed ones of `asset`, said so, and that the page has it."""
    assert check in failed, f"{check} did not stop it: {sorted(failed)}"
    assert says in failed[check], failed[check]
    line = f"| {fault} | `{asset}` | `{check}` | {says} |".replace("<", "&lt;")
    if os.environ.get("ETPI_WRITE_FAULTS") and line not in lines():
        named = line.split(" | ")[0]
        kept = [other for other in PAGE.read_text().splitlines() if not other.startswith(f"{named} |")]
        PAGE.write_text("\n".join([*kept, line]) + "\n")
    assert line in lines(), f"docs/faults.md has not the line of this run:\n{line}\nwrite it with ETPI_WRITE_FAULTS=1"


def lines() -> list[str]:
    """The lines of the table."""
    found = PAGE.read_text().splitlines()
    return found[found.index(HEAD) + 2 :]
