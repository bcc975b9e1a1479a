"""Tables on disk, finished parts of a version among them, and functions that read tables in memory and on disk alike.

A function that takes `Rows` iterates with `batches`, as often as it needs to. `columns_of` loads all rows of
a few narrow columns.
"""

from __future__ import annotations

import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from etpi_resources.lake import parquet
from etpi_resources.lake.manifest import DamagedFile


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


class Parts:
    """Finished parts of a version that is being computed: an asset that was killed continues after them.

        <folder>/<input key>/<part>/<table>.parquet

    The input key covers specs, inputs and code, so computing a part again would give the same. One process at a time
    uses them.

    Attributes:
        folder: on the lake's disk, so every node of a cluster sees it.
    """

    def __init__(self, folder: Path, input_key: str) -> None:
        """Take the partition's folder and the key of the version; parts of other keys are removed."""
        self.folder, self._key = folder, input_key[:16]
        for path in folder.glob("*"):
            if path.name != self._key:
                shutil.rmtree(path, ignore_errors=True)

    def get(self, name: str, compute: Callable[[], Mapping[str, pa.Table]]) -> dict[str, pa.Table]:
        """Return the tables of a part: from disk if it was finished before, else computed and stored.

        A part that cannot be read, after a power cut or on a bad disk, is computed again.
        """
        part = self.folder / self._key / name
        try:
            return {path.stem: _read(path) for path in part.iterdir()}
        except FileNotFoundError:
            pass
        except DamagedFile:
            shutil.rmtree(part)
        tables = dict(compute())
        beside = part.with_name(f".{name}.{uuid.uuid4().hex}")
        beside.mkdir(parents=True)
        for table, rows in tables.items():
            # Read at most once, so that it is written fast rather than small.
            pq.write_table(
                rows, beside / f"{table}.parquet", compression="lz4", use_dictionary=False, write_statistics=False,
                write_page_checksum=True,
            )  # fmt: skip
        try:
            beside.rename(part)
        except OSError:
            if not part.is_dir():
                raise
            shutil.rmtree(beside)  # a worker of the run that was killed has just finished it too
        return tables

    def remove(self) -> None:
        """Remove all parts, because the version is published."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _read(path: Path) -> pa.Table:
    with parquet.opened(path) as file:
        return file.read()
