"""The pages of docs/, for tests that type their commands as a user would, and that compare docs/faults.md with runs.

A block of a machine has a word after its language: "```sh MACHINE". A test that runs the graph with a fault calls
`stopped`, which requires its line in docs/faults.md; `ETPI_WRITE_FAULTS=1 pytest ...` adds missing lines.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```sh (\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """Commands that a reader types on a machine, in one shell."""

    machine: str
    commands: str


def blocks(page: Path) -> list[Block]:
    """Return the blocks marked "```sh MACHINE", in the order of the page."""
    return [Block(machine, commands) for machine, commands in _BLOCK.findall(page.read_text(encoding="utf-8"))]


def shell_blocks(page: str, word: str = "") -> list[str]:
    """Return the blocks of commands of a page that have `word`."""
    return [block for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if word in block]


def run_blocks(blocks: Iterable[str], folder: Path, **variables: str) -> None:
    """Run blocks in a folder. Raises CalledProcessError if one of their commands fails."""
    program = folder.parent / "bin" / "etpi"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m etpi "$@"\n')
    program.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in ("ETPI_DATA", "DAGSTER_HOME")}
    environment |= {"PATH": f"{program.parent}:{os.environ['PATH']}", **variables}
    for block in blocks:
        subprocess.run(["bash", "-euo", "pipefail", "-c", block], check=True, cwd=folder, env=environment)


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
