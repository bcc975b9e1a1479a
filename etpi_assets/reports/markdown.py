"""Formats measured rates and tables as markdown."""

from __future__ import annotations

from collections.abc import Sequence


def figure(value: float | None, low: float | None, high: float | None, n: int | None) -> str:
    """Format a rate with its 95 % interval, if it has one, and n; an empty text if it was not measured."""
    if value is None:
        return ""
    return f"{value:.2f}" + (f" [{low:.2f}, {high:.2f}]" if low is not None and high is not None else "") + f", n {n}"


def markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]], most: int | None = None) -> str:
    """Format a table; lines beyond `most` characters are left out and counted."""
    text = "| " + " | ".join(head) + " |\n|" + " --- |" * len(head)
    for number, line in enumerate(lines):
        more = "\n| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"
        if most is not None and len(text) + len(more) > most:
            return f"{text}\n\n… and {len(lines) - number} more rows, in the SQL view of the same name.\n"
        text += more
    return text + "\n"
