"""Tables that need not be in memory.

Belongs here: reading a stored table piece by piece, and the few ways code walks through a table wherever it stands.
Does not belong here: how files are written or typed (`parquet`), or which version is in force (`lake`).

A function that takes `Rows` takes a table in memory and one on the disk alike. It walks through it with `batches` or
`dicts`, as often as it likes, and asks for few narrow columns where it wants all of them at once (`columns_of`).
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
    """A table on the disk: the rows of its files, one after the other, as the registry types them now."""

    name: str
    paths: Sequence[Path]

    def __len__(self) -> int:
        return self._rows

    @cached_property
    def _rows(self) -> int:
        return sum(pq.read_metadata(path).num_rows for path in self.paths)


class Spooled(Stored):
    """A table that `parquet.Writer` has just written for a version to come: publishing moves its one file into it."""


Rows = pa.Table | Stored


def batches(rows: Rows, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows in order, at most a row group at a time; raises as `parquet.read` does."""
    if isinstance(rows, Stored):
        pieces = parquet.stream(rows.name, rows.paths, columns)
    else:
        pieces = iter([rows.select(list(columns))])
    for piece in pieces:
        yield from piece.to_batches(max_chunksize=parquet.ROW_GROUP_ROWS)


def no_rows(rows: Rows, columns: Sequence[str]) -> pa.Table:
    """An empty table of those columns."""
    if isinstance(rows, Stored):
        return parquet.schema_of(rows.name, columns).empty_table()
    return rows.select(list(columns)).slice(0, 0)


def dicts(rows: Rows, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows in order, each as {column: value}."""
    for batch in batches(rows, columns):
        yield from batch.to_pylist()


def columns_of(rows: Rows, columns: Sequence[str]) -> pa.Table:
    """Those columns of all rows, in memory."""
    if isinstance(rows, Stored):
        return parquet.read(rows.name, rows.paths, columns)
    return rows.select(list(columns))


def counts(rows: Rows, column: str) -> Counter[Any]:
    """How often each value of a column occurs."""
    found: Counter[Any] = Counter()
    for batch in batches(rows, [column]):
        found.update(batch.column(0).to_pylist())
    return found
