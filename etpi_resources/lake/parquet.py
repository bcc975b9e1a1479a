"""Writing and reading the lake's parquet files: equal rows give equal bytes, and every table must fit its schema.

Every page has a checksum, which reading verifies, so a damaged file raises and never gives wrong rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etpi_resources.lake.manifest import DamagedFile
from etpi_resources.lake.schemas import LATER, TABLES

ROW_GROUP_ROWS = 2048
"""Few enough that a row group of long prompts needs little memory."""


class SchemaMismatch(ValueError):
    """A table that does not fit its schema; the message names table, column, both types and the remedy."""


@cache
def storage_schema(name: str) -> pa.Schema:
    """Return the stored schema: without column descriptions, so that rewording one changes no bytes."""
    if name not in TABLES:
        remedy = f"add it there or use one of {sorted(TABLES)}"
        raise SchemaMismatch(f"table {name!r} is not in etpi_resources/lake/tables.toml; {remedy}")
    return pa.schema([pa.field(column, kind) for column, kind, _ in TABLES[name].columns])


def conform(name: str, data: pa.Table) -> pa.Table:
    """Return `data` in the named table's column order and types, cast only if no value can change.

    Raises:
        SchemaMismatch: a column is missing or unknown, or its values do not fit the type; the message lists all.
    """
    schema = storage_schema(name)
    columns: list[pa.ChunkedArray] = []
    names, known = data.column_names, set(schema.names)  # Arrow makes these lists at every use
    faults = [f"column {c!r} is not in the schema" for c in names if c not in known]
    if len(set(names)) < len(names):
        faults.append(f"column names repeat: {names}")
    for field in schema:
        if names.count(field.name) != 1:
            faults.append(f"column {field.name!r} ({field.type}) is missing")
            continue
        column = data.column(field.name)
        if column.type != field.type:
            try:
                if not _lossless(column.type, field.type):
                    raise pa.ArrowInvalid("this cast could change values")
                column = column.cast(field.type, safe=True)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                faults.append(f"column {field.name!r}: expected {field.type}, found {column.type}: {error}")
                continue
        columns.append(column)
    if faults:
        raise SchemaMismatch(
            "\n  - ".join([f"table {name} does not fit its schema:", *faults])
            + f"\nReturn the columns of etpi_resources.lake.schemas.TABLES[{name!r}] from the transform "
            "(schemas.from_rows does), or change tables.toml."
        )
    return pa.Table.from_arrays(columns, schema=schema)


def _lossless(source: pa.DataType, target: pa.DataType) -> bool:
    """Return whether a checked Arrow cast either preserves every value or raises."""
    kinds = pa.types
    if kinds.is_null(source) or source == target:
        return True
    if kinds.is_dictionary(source):
        return _lossless(source.value_type, target)
    if kinds.is_string(target):
        return kinds.is_large_string(source) or kinds.is_string_view(source)
    if kinds.is_integer(target):
        return kinds.is_integer(source)
    if kinds.is_floating(target):
        # Arrow's checked cast does not detect the precision that a narrower float loses.
        narrows = kinds.is_floating(source) and source.bit_width > target.bit_width
        return kinds.is_integer(source) or (kinds.is_floating(source) and not narrows)
    if kinds.is_timestamp(target):
        # A time without a zone is a local time in a zone that only the transform knows.
        return kinds.is_timestamp(source) and source.tz in ("UTC", "Etc/UTC", "+00:00")
    if kinds.is_list(target):
        nested = kinds.is_list(source) or kinds.is_large_list(source) or kinds.is_fixed_size_list(source)
        return nested and _lossless(source.value_type, target.value_type)
    return False


class Writer:
    """Writes the named table to `path` in pieces, with about one row group in memory. A context manager.

    The bytes depend only on the rows and their order, not on the size of the pieces.

    Attributes:
        rows: number of rows added.

    Args:
        left_out: columns that the file does not have.
    """

    def __init__(self, name: str, path: Path, left_out: Collection[str] = ()) -> None:
        self.name, self.path, self.rows = name, path, 0
        self._waiting = storage_schema(name).empty_table().drop_columns(list(left_out))
        # Set every option that changes bytes, so that new defaults of pyarrow do not.
        self._file = pq.ParquetWriter(
            path, self._waiting.schema, compression="zstd", compression_level=3, use_dictionary=True, version="2.6",
            data_page_version="1.0", write_statistics=True, write_batch_size=1024, write_page_checksum=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._waiting.num_rows and kind is None:
            self._write(self._waiting)
        self._file.close()

    def add(self, piece: pa.Table) -> None:
        """Append rows; raises SchemaMismatch as `conform` does."""
        self._waiting = pa.concat_tables([self._waiting, conform(self.name, piece).select(self._waiting.column_names)])
        self.rows += piece.num_rows
        while self._waiting.num_rows >= ROW_GROUP_ROWS:
            self._write(self._waiting.slice(0, ROW_GROUP_ROWS))
            self._waiting = self._waiting.slice(ROW_GROUP_ROWS)

    def _write(self, group: pa.Table) -> None:
        self._file.write_table(group.combine_chunks(), row_group_size=ROW_GROUP_ROWS)


def _all_null(table: pa.Table, columns: Iterable[str]) -> list[str]:
    return [name for name in columns if name in table.column_names and table[name].null_count == len(table)]


def write(name: str, data: pa.Table | Iterable[pa.RecordBatch], path: Path) -> int:
    """Write the named table with `Writer`, but not its LATER columns that are all null; return its number of rows."""
    left_out = _all_null(data, LATER.get(name, ())) if isinstance(data, pa.Table) else []
    with Writer(name, path, left_out) as writer:
        for piece in [data] if isinstance(data, pa.Table) else (_as_table(name, batch) for batch in data):
            writer.add(piece)
    return writer.rows


def _as_table(name: str, batch: object) -> pa.Table:
    if not isinstance(batch, pa.RecordBatch):
        raise SchemaMismatch(
            f"table {name}: a stream yields pyarrow.RecordBatch, found {type(batch).__name__}; use table.to_batches()"
        )
    return pa.Table.from_batches([batch])


def read(name: str, paths: Sequence[Path], columns: Sequence[str] | None = None) -> pa.Table:
    """Read the files' rows in order, with the types of `schemas`. A column that an older file lacks is null.

    Raises:
        SchemaMismatch: the table has no such column, or a file's column no longer fits.
        DamagedFile: a page does not have its checksum, or the file is no parquet file.
        FileNotFoundError: a file is missing.
    """
    wanted = schema_of(name, columns)
    parts = [pa.Table.from_batches([], wanted)]  # `empty_table` would import pandas
    for path in paths:
        with opened(path) as file:
            parts.append(_typed(file.read(columns=_present(file, wanted)), wanted, path))
    return pa.concat_tables(parts)


def stream(name: str, paths: Sequence[Path], columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yield the rows of `read`, one row group at a time; nothing if there are no rows."""
    wanted = schema_of(name, columns)
    for path in paths:
        with opened(path) as file:
            present = _present(file, wanted)
            for group in range(file.num_row_groups):
                yield _typed(file.read_row_group(group, columns=present), wanted, path)


class RowRanges:
    """Reads ranges of a table's rows, as `read` does; opens each file once, and reads only the row groups it needs."""

    def __init__(self, name: str, paths: Sequence[Path], columns: Sequence[str]) -> None:
        self._wanted = schema_of(name, columns)
        self._groups: list[_RowGroup] = []
        first = 0
        for path in paths:
            with _damage_named(path):
                file = pq.ParquetFile(path, page_checksum_verification=True)
            for number in range(file.num_row_groups):
                rows = file.metadata.row_group(number).num_rows
                self._groups.append(_RowGroup(path, file, number, first, first + rows))
                first += rows

    def read(self, start: int, stop: int) -> pa.Table:
        """Return the rows [start, stop), counted over all files."""
        groups = [group for group in self._groups if group.first < stop and group.stop > start]
        return self._joined(
            self._read(group).slice(max(0, start - group.first), stop - max(start, group.first)) for group in groups
        )

    def take(self, numbers: Sequence[int]) -> pa.Table:
        """Return the rows with those numbers, which are in order."""
        at = np.asarray(numbers, dtype=np.int64)
        wanted = ((group, at[(at >= group.first) & (at < group.stop)] - group.first) for group in self._groups)
        return self._joined(self._read(group).take(pa.array(rows)) for group, rows in wanted if len(rows))

    def _joined(self, parts: Iterable[pa.Table]) -> pa.Table:
        return pa.concat_tables([self._wanted.empty_table(), *parts])

    def _read(self, group: _RowGroup) -> pa.Table:
        with _damage_named(group.path):
            rows = group.file.read_row_group(group.number, columns=_present(group.file, self._wanted))
        return _typed(rows, self._wanted, group.path)


@dataclass(frozen=True)
class _RowGroup:
    """A row group with the rows [first, stop) of a table."""

    path: Path
    file: pq.ParquetFile
    number: int
    first: int
    stop: int


@contextmanager
def opened(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a file for reading with its checksums verified; its errors become `DamagedFile`.

    Files without checksums, from before etpi wrote them, are read without.
    """
    with _damage_named(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        yield file


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Turn the errors of a file that cannot be read into `DamagedFile`."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowInvalid) as error:
        raise DamagedFile.of(path, str(error)) from error


def schema_of(name: str, columns: Sequence[str] | None) -> pa.Schema:
    """Return the stored schema of those columns, by default of all; raises SchemaMismatch for an unknown column."""
    schema = storage_schema(name)
    names = list(columns) if columns is not None else schema.names
    if unknown := [c for c in names if c not in schema.names]:
        raise SchemaMismatch(f"table {name} has no column {unknown}; it has {schema.names}")
    return pa.schema([schema.field(c) for c in names])


def _present(file: pq.ParquetFile, wanted: pa.Schema) -> list[str]:
    return [c for c in wanted.names if c in file.schema_arrow.names]


def _typed(table: pa.Table, wanted: pa.Schema, path: Path) -> pa.Table:
    arrays = []
    for field in wanted:
        if field.name not in table.column_names:
            arrays.append(pa.chunked_array([pa.nulls(table.num_rows, field.type)]))
            continue
        column = table.column(field.name)
        if not _lossless(column.type, field.type):
            raise SchemaMismatch(
                f"{path}: column {field.name!r} is {column.type}, but TABLES says {field.type}; "
                "materialize the asset again"
            )
        arrays.append(column.cast(field.type))
    return pa.Table.from_arrays(arrays, schema=wanted)
