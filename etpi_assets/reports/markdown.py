"""Figures and tables as markdown.

Belongs here: how a measured rate and a table of them are written. Does not belong here: which ones, or where they
stand.
"""

from __future__ import annotations

from collections.abc import Sequence


def figure(value: float | None, low: float | None, high: float | None, n: int | None) -> str:
    """A rate with its 95 % interval, where it has one, and n; nothing where it was not measured."""
    if value is None:
        return ""
    return f"{value:.2f}" + (f" [{low:.2f}, {high:.2f}]" if low is not None and high is not None else "") + f", n {n}"


def markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]], most: int | None = None) -> str:
    """A table, as many of its lines as `most` characters take; the rest is counted."""
    text = "| " + " | ".join(head) + " |\n|" + " --- |" * len(head)
    for number, line in enumerate(lines):
        more = "\n| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"
        if most is not None and len(text) + len(more) > most:
            return f"{text}\n\n… and {len(lines) - number} more, in the view of this name.\n"
        text += more
    return text + "\n"
