"""Arrow tables, which assets hand to each other, as polars frames."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl
import pyarrow as pa


def to_frame(table: pa.Table, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """Return a table, or some of its columns, as a frame; most columns are not copied."""
    frame = pl.from_arrow(table if columns is None else table.select(list(columns)))
    assert isinstance(frame, pl.DataFrame)
    return frame
