"""Columns of text for a terminal: alignment, widths, and how figures are written, for every table of the command."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import Any

WIDTH = 100
"""Characters in a line where there is no terminal."""
GAP = "  "


def width() -> int:
    """Return the characters in a line of standard output: the terminal's, else WIDTH."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Return rows of cells as lines with columns of equal width; columns whose number is in `right` end flush."""
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        lines.append(
            GAP.join(cell.rjust(n) if i in right else cell.ljust(n) for i, (cell, n) in enumerate(cells)).rstrip()
        )
    return "\n".join(lines)


def shortened(text: str, limit: int) -> str:
    """Return the text in at most `limit` characters, with an ellipsis in place of what is cut."""
    return text if len(text) <= limit else f"{text[: max(0, limit - 1)]}…"[: max(0, limit)]


def figure(value: float | None, low: float | None = None, high: float | None = None, *, signed: bool = False) -> str:
    """Return a share, or with `signed` a difference of shares, with its interval if there is one; "-" for None."""
    if value is None:
        return "-"
    interval = "" if low is None or high is None else f" [{_decimals(low, signed)}, {_decimals(high, signed)}]"
    return _decimals(value, signed) + interval


def _decimals(value: float, signed: bool) -> str:
    value = round(value, 2) + 0.0  # -0.0 would print a sign
    return f"{value:+.2f}" if signed and value else f"{value:.2f}"


def cell(value: Any) -> str:
    """Return a value of a query's result in one line: floats in six figures, null as an empty cell."""
    if value is None:
        return ""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(text.split())
