"""Writes the attack table of docs/verdicts.md: `python tests/attacks/write_page.py BEFORE.jsonl NOW.jsonl`.

A line of a log is [attack's key, reward, verdict], as ETPI_ATTACK_LOG names a file for the suite to write.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "verdicts.md"
HEAD = "| family | attack | before | now |"


def table(before: Path, now: Path) -> list[str]:
    """The lines of the table. A reward of None is an infrastructure error, which metrics drop."""
    logs = [{key: reward for key, reward, _ in map(json.loads, log.read_text().splitlines())} for log in (before, now)]
    lines = [HEAD, "|---|---|---|---|"]
    for key in sorted(logs[1]):
        family, name = key.split("/", 1)
        said = [_cell(log[key]) if key in log else "not tried" for log in logs]
        lines.append(f"| {family} | {name.replace('_', ' ')} | {said[0]} | {said[1]} |")
    return lines


def _cell(reward: float | None) -> str:
    return "dropped" if reward is None else f"{reward:g}"


if __name__ == "__main__":
    head, _, _ = PAGE.read_text().partition(HEAD)
    PAGE.write_text(head + "\n".join(table(*map(Path, sys.argv[1:3]))) + "\n")
