"""Arrow tables, which assets hand to each other, as polars frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    import polars as pl


def to_frame(table: pa.Table, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """Return a table, or some of its columns, as a frame; most columns are not copied."""
    import polars as pl  # 0.3 s: `etpi status` imports every asset

    frame = pl.from_arrow(table if columns is None else table.select(list(columns)))
    assert isinstance(frame, pl.DataFrame)
    return frame
