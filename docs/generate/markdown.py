"""Markdown as GitHub renders it: tables, code spans, anchors."""

from __future__ import annotations

import re
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table and an empty line."""
    lines = [header, ["---"] * len(header), *rows]
    return [*("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines), ""]


def prose(text: str) -> str:
    """Return a text on one line, its `<` escaped outside of code spans."""
    parts = " ".join(text.split()).split("`")
    return "`".join(part.replace("<", "&lt;") if index % 2 == 0 else part for index, part in enumerate(parts))


def code(text: str) -> str:
    """Return a code span, or nothing for an empty text."""
    fence = "`` " if "`" in text else "`"
    return f"{fence}{text}{fence[::-1]}" if text else ""


def anchor(heading: str) -> str:
    """Return the link target that GitHub gives a heading."""
    return "#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
