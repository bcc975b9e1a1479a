"""Tables on disk, and functions that read tables in memory and on disk alike.

A function that takes `Rows` iterates with `batches`, as often as it needs to. `columns_of` loads all rows of
a few narrow columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from etpi_resources.lake import parquet


@dataclass(frozen=True)
class Stored:
    """A table on disk: the rows of its files in order, with the types of `schemas`."""

    name: str
    paths: Sequence[Path]

    def __len__(self) -> int:
        return self._rows

    @cached_property
    def _rows(self) -> int:
        return sum(pq.read_metadata(path).num_rows for path in self.paths)


class Spooled(Stored):
    """A table that `parquet.Writer` has written for the next version; publishing moves its one file."""


Rows = pa.Table | Stored


def batches(rows: Rows, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield the rows in order, at most a row group at a time; raises as `parquet.read` does."""
    if isinstance(rows, Stored):
        pieces = parquet.stream(rows.name, rows.paths, columns)
    else:
        pieces = iter([rows.select(list(columns))])
    for piece in pieces:
        yield from piece.to_batches(max_chunksize=parquet.ROW_GROUP_ROWS)


def no_rows(rows: Rows, columns: Sequence[str]) -> pa.Table:
    """Return an empty table with those columns."""
    if isinstance(rows, Stored):
        return parquet.schema_of(rows.name, columns).empty_table()
    return rows.select(list(columns)).slice(0, 0)


def columns_of(rows: Rows, columns: Sequence[str]) -> pa.Table:
    """Load those columns of all rows."""
    if isinstance(rows, Stored):
        return parquet.read(rows.name, rows.paths, columns)
    return rows.select(list(columns))


def counts(rows: Rows, column: str) -> Counter[Any]:
    """Count each value of a column."""
    totals: Counter[Any] = Counter()
    for batch in batches(rows, [column]):
        totals.update(batch.column(0).to_pylist())
    return totals
