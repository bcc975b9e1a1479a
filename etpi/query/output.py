"""Results of queries as text: a table for a person, CSV, JSON or markdown for programs and pages."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etpi.query import QueryError
from etpi.run.columns import aligned, cell, shortened
from etpi_assets.reports.markdown import markdown_table

Rows = Sequence[Sequence[Any]]
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that move a terminal's cursor, set its title or turn the direction of text; transcripts may have them."""
_WIDEST_CELL = 48
"""Characters of a value in a table on a terminal."""


def table(names: Sequence[str], rows: Rows, width: int | None) -> str:
    """Return rows in aligned columns, or, where these are wider than `width`, a block of lines for each row.

    Args:
        width: of the terminal, in characters; None to cut nothing.
    """
    text = [[_visible(cell(value)) for value in row] for row in rows]
    names = [_visible(name) for name in names]
    limit = None if width is None else _WIDEST_CELL
    short = [[value if limit is None else shortened(value, limit) for value in row] for row in text]
    numbers = [i for i in range(len(names)) if rows and all(_is_number(row[i]) for row in rows)]
    head, _, body = aligned([list(names), *short], numbers).partition("\n")
    lines = [head, "-" * max(len(line) for line in (head, *body.split("\n"))), *(body.split("\n") if rows else [])]
    count = f"({len(rows)} row{'' if len(rows) == 1 else 's'})"
    if width is None or not rows or max(map(len, lines)) <= width:
        return "\n".join([*lines, count])
    blocks = [_block(i, names, row, width) for i, row in enumerate(text, 1)]
    return "\n".join([*blocks, count])


def _visible(text: str) -> str:
    """Return a text with control characters as their escapes."""
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


def _in_json(text: str) -> str:
    """Return JSON with the control characters that JSON allows in strings as its escapes."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _block(number: int, names: Sequence[str], row: Sequence[str], width: int) -> str:
    longest = max(map(len, names))
    lines = [f"-- row {number} --"]
    lines += [shortened(f"{name:>{longest}}  {value}", width) for name, value in zip(names, row, strict=True)]
    return "\n".join(lines)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def as_csv(names: Sequence[str], rows: Rows) -> str:
    """Return CSV with a header; null is an empty field, a list or struct is JSON, a control character its escape."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(map(_visible, names))
    writer.writerows([_flat(value) for value in row] for row in rows)
    return stream.getvalue().rstrip("\n")


def as_json(names: Sequence[str], rows: Rows) -> str:
    """Return an array with an object for each row, one a line.

    Raises:
        QueryError: two columns have one name, of which an object would keep the last.
    """
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise QueryError(f"several columns are named {', '.join(twice)}; give each a name of its own with AS")
    objects = (json.dumps(dict(zip(names, map(_plain, row), strict=True)), ensure_ascii=False) for row in rows)
    return "[" + ",\n".join(map(_in_json, objects)) + "]"


def as_markdown(names: Sequence[str], rows: Rows) -> str:
    return markdown_table([*map(_visible, names)], [[cell(_flat(value)) for value in row] for row in rows]).rstrip("\n")


def _flat(value: Any) -> Any:
    """Return a value as one field: lists and structs as JSON, control characters as their escapes."""
    plain = _plain(value)
    text = json.dumps(plain, ensure_ascii=False) if isinstance(plain, list | dict) else plain
    return _visible(text) if isinstance(text, str) else text


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: times as ISO 8601, infinity and NaN as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


FORMATS: Mapping[str, Callable[[Sequence[str], Rows], str]] = {
    "csv": as_csv, "json": as_json, "markdown": as_markdown,
}  # fmt: skip
"""Format -> its writer; `table` needs a width as well."""
