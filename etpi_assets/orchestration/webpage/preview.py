"""The first rows of a table, as Dagster's web page shows tables."""

from __future__ import annotations

from typing import Any

import dagster as dg
from pyarrow.dataset import dataset

from etpi_resources.lake.lake import Lake
from etpi_resources.lake.manifest import Manifest

_MOST_ROWS, _MOST_CHARACTERS = 5, 60


def preview(lake: Lake, manifest: Manifest, table: str) -> dg.TableMetadataValue | str:
    """Return the first rows of a version's table, with long values cut, because Dagster limits metadata to 50 KB."""
    rows = dataset(lake.files_of(manifest, table), format="parquet").head(_MOST_ROWS).to_pylist()
    records = [dg.TableRecord({name: _cell(value) for name, value in row.items()}) for row in rows]
    return dg.MetadataValue.table(records) if records else "(no rows)"


def _cell(value: Any) -> str | int | None:
    if value is None or isinstance(value, int):
        return value
    text = f"{value:.4g}" if isinstance(value, float) else str(value[:8] if isinstance(value, list) else value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"
