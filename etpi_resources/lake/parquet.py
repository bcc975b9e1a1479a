"""Tables to parquet: the same rows give the same bytes, and only what fits the registry is written.

Belongs here: fitting a table to its schema without loss, and the one way a parquet file is written or read. Does not
belong here: where files stand and which version is in force (`lake`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq

from etpi_resources.lake.schemas import TABLES

ROW_GROUP_ROWS = 2048
"""Rows of a row group: few enough that a group of long prompts stays small in memory."""


class SchemaMismatch(ValueError):
    """A table does not fit its schema; the message names table, column, both types and the remedy."""


def storage_schema(name: str) -> pa.Schema:
    """The schema as stored: without column descriptions, so that rewording one does not change any bytes."""
    if name not in TABLES:
        remedy = f"add it there or use one of {sorted(TABLES)}"
        raise SchemaMismatch(f"table {name!r} is not in etpi_resources.lake.schemas.TABLES; {remedy}")
    return pa.schema([pa.field(column, kind) for column, kind, _ in TABLES[name].columns])


def conform(name: str, data: pa.Table) -> pa.Table:
    """`data` in the named table's column order and types, cast only where no value can change.

    Raises:
        SchemaMismatch: a column is missing or unknown, or its values do not fit the type; every mismatch is listed.
    """
    schema = storage_schema(name)
    columns: list[pa.ChunkedArray] = []
    faults = [f"column {c!r} is not in the schema" for c in data.column_names if c not in schema.names]
    if len(set(data.column_names)) < data.num_columns:
        faults.append(f"column names repeat: {data.column_names}")
    for field in schema:
        if data.column_names.count(field.name) != 1:
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
            + f"\nMake the transform yield the columns of etpi_resources.lake.schemas.TABLES[{name!r}] "
            "(schemas.from_rows does), or change the registry."
        )
    return pa.Table.from_arrays(columns, schema=schema)


def _lossless(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a *checked* Arrow cast either keeps every value or raises."""
    kinds = pa.types
    if kinds.is_null(found) or found == wanted:
        return True
    if kinds.is_dictionary(found):
        return _lossless(found.value_type, wanted)
    if kinds.is_string(wanted):
        return kinds.is_large_string(found) or kinds.is_string_view(found)
    if kinds.is_integer(wanted):
        return kinds.is_integer(found)
    if kinds.is_floating(wanted):
        # Arrow's checked cast does not look at the precision that a narrower float loses.
        narrows = kinds.is_floating(found) and found.bit_width > wanted.bit_width
        return kinds.is_integer(found) or (kinds.is_floating(found) and not narrows)
    if kinds.is_timestamp(wanted):
        # A time without a zone is somebody's local time; which, only the transform knows.
        return kinds.is_timestamp(found) and found.tz in ("UTC", "Etc/UTC", "+00:00")
    if kinds.is_list(wanted):
        nested = kinds.is_list(found) or kinds.is_large_list(found) or kinds.is_fixed_size_list(found)
        return nested and _lossless(found.value_type, wanted.value_type)
    return False


class Writer:
    """Writes the named table to `path`, piece by piece; memory stays at about one row group. A context manager.

    The bytes depend on the rows and their order alone, not on how they were chunked.

    Attributes:
        rows: how many were added.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path, self.rows = name, path, 0
        self._waiting = storage_schema(name).empty_table()
        # zstd at a fixed level, dictionaries on, no bloom filters: every option that shapes bytes is stated here.
        self._file = pq.ParquetWriter(
            path, storage_schema(name), compression="zstd", compression_level=3, use_dictionary=True, version="2.6",
            data_page_version="1.0", write_statistics=True, write_batch_size=1024,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._waiting.num_rows and kind is None:
            self._write(self._waiting)
        self._file.close()

    def add(self, piece: pa.Table) -> None:
        """Raises SchemaMismatch as `conform` does."""
        self._waiting = pa.concat_tables([self._waiting, conform(self.name, piece)])
        self.rows += piece.num_rows
        while self._waiting.num_rows >= ROW_GROUP_ROWS:
            self._write(self._waiting.slice(0, ROW_GROUP_ROWS))
            self._waiting = self._waiting.slice(ROW_GROUP_ROWS)

    def _write(self, group: pa.Table) -> None:
        self._file.write_table(group.combine_chunks(), row_group_size=ROW_GROUP_ROWS)


def write(name: str, data: pa.Table | Iterable[pa.RecordBatch], path: Path) -> int:
    """Write the named table as `Writer` does; how many rows it has."""
    with Writer(name, path) as writer:
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
    """The files' rows in order, as the registry types them now: a column a file is too old to have is null.

    Raises:
        SchemaMismatch: `columns` names what the table does not have, or a file's column no longer fits.
        FileNotFoundError: a file is gone.
    """
    wanted = schema_of(name, columns)
    parts = [wanted.empty_table()]
    for path in paths:
        file = pq.ParquetFile(path)
        parts.append(_typed(file.read(columns=_present(file, wanted)), wanted, path))
    return pa.concat_tables(parts)


def stream(name: str, paths: Sequence[Path], columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """`read`, a row group at a time; a stream of no rows yields nothing."""
    wanted = schema_of(name, columns)
    for path in paths:
        with pq.ParquetFile(path) as file:
            present = _present(file, wanted)
            for group in range(file.num_row_groups):
                yield _typed(file.read_row_group(group, columns=present), wanted, path)


def schema_of(name: str, columns: Sequence[str] | None) -> pa.Schema:
    """The stored schema of those columns, of all by default; raises SchemaMismatch where the table has no such."""
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
                f"{path}: column {field.name!r} is {column.type}, the registry says {field.type}; "
                "materialize the asset again"
            )
        arrays.append(column.cast(field.type))
    return pa.Table.from_arrays(arrays, schema=wanted)
