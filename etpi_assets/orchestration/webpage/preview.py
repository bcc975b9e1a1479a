"""Rows of a table as markdown, small enough for Dagster's web page to show it open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow.parquet as pq

from etpi_resources.lake.lake import Lake
from etpi_resources.lake.manifest import Manifest

OPEN_CHARACTERS = 999
"""The most characters of markdown that the page shows at once; longer markdown hides behind "[Show Markdown]"."""
_LAYOUTS = ((5, 60), (5, 36), (5, 24), (3, 24), (3, 16), (2, 16))
"""(rows, characters of a cell), the best first."""


def preview(lake: Lake, manifest: Manifest, table: str) -> str:
    """Return the first rows of a version's table as markdown, open on the page if a readable layout fits.

    Long values are cut, because Dagster limits metadata to about 50 KB.
    """
    rows = first_rows(lake, manifest, table, _LAYOUTS[0][0])
    if not rows:
        return "(no rows)"
    shown = _without_nulls(rows)
    texts = (_markdown(shown[:count], width) for count, width in _LAYOUTS)
    return next((text for text in texts if len(text) <= OPEN_CHARACTERS), _markdown(rows, _LAYOUTS[0][1]))


def first_rows(lake: Lake, manifest: Manifest, table: str, count: int) -> list[dict[str, Any]]:
    """Return the first `count` rows of a version's table."""
    rows: list[dict[str, Any]] = []
    for path in lake.files_of(manifest, table):
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=count):
                rows += batch.to_pylist()
                if len(rows) >= count:
                    return rows[:count]
    return rows


def _without_nulls(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows without the columns that are null in all of them."""
    names = [name for name in rows[0] if any(row[name] is not None for row in rows)] or list(rows[0])
    return [{name: row[name] for name in names} for row in rows]


def _markdown(rows: Sequence[Mapping[str, Any]], width: int) -> str:
    names = list(rows[0])
    cells = [[_cell(row[name], width) for name in names] for row in rows]
    return "\n".join([_line(names), "|" + " --- |" * len(names), *(_line(row) for row in cells)])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(value: Any, width: int) -> str:
    if isinstance(value, list):
        head = ", ".join(str(v) for v in value[:8])
        text = f"[{head}, … {len(value)} in all]" if len(value) > 8 else f"[{head}]"
    elif isinstance(value, float):
        text = f"{value:.4g}"
    else:
        text = "" if value is None else str(value)
    text = text if len(text) <= width else text[: width - 1] + "…"
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "⏎").replace("<", "&lt;")
