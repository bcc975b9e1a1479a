"""Markdown as GitHub renders it: tables, code spans, anchors."""

from __future__ import annotations

import re
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines]


def code(text: str) -> str:
    """Return a code span, or nothing for an empty text."""
    fence = "``" if "`" in text else "`"
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}" if text else ""


def prose(text: str) -> str:
    """Return a text on one line, its `<` escaped outside of code spans."""
    parts = " ".join(text.split()).split("`")
    return "`".join(part.replace("<", "&lt;") if index % 2 == 0 else part for index, part in enumerate(parts))


def sentence(text: str) -> str:
    """Return a text with a capital and a full stop."""
    text = prose(text).rstrip(".")
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def anchor(heading: str) -> str:
    """Return the link target that GitHub gives a heading."""
    return "#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
