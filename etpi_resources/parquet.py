"""Tables to parquet: the same rows give the same bytes, and only what fits the registry is written.

Belongs here: fitting a table to its schema without loss, and the one way a parquet file is written or read. Does not
belong here: where files stand and which version is in force (`lake`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from etpi_resources.schemas import TABLES

ROW_GROUP_ROWS = 2048
"""Rows of a row group: few enough that a group of long prompts stays small in memory."""


class SchemaMismatch(ValueError):
    """A table does not fit its schema; the message names table, column, both types and the remedy."""


def storage_schema(name: str) -> pa.Schema:
    """The schema as stored: without column descriptions, so that rewording one does not change any bytes."""
    if name not in TABLES:
        remedy = f"add it there or use one of {sorted(TABLES)}"
        raise SchemaMismatch(f"table {name!r} is not in etpi_resources.schemas.TABLES; {remedy}")
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
            + f"\nMake the transform yield the columns of etpi_resources.schemas.TABLES[{name!r}] "
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


def write(name: str, data: pa.Table | Iterable[pa.RecordBatch], path: Path) -> int:
    """Write the named table to `path` and return its rows; memory stays at about one row group for a stream.

    The bytes depend on the rows and their order alone, not on how they were chunked.
    """
    rows = 0
    # zstd at a fixed level, dictionaries on, no bloom filters: every option that shapes bytes is stated here.
    with pq.ParquetWriter(
        path, storage_schema(name), compression="zstd", compression_level=3, use_dictionary=True, version="2.6",
        data_page_version="1.0", write_statistics=True, write_batch_size=1024,
    ) as writer:  # fmt: skip
        for group in _row_groups(name, data):
            writer.write_table(group, row_group_size=ROW_GROUP_ROWS)
            rows += group.num_rows
    return rows


def _row_groups(name: str, data: pa.Table | Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The rows in tables of exactly ROW_GROUP_ROWS (the last may be shorter), each in one chunk."""
    pieces = [data] if isinstance(data, pa.Table) else (_as_table(name, batch) for batch in data)
    waiting = storage_schema(name).empty_table()
    for piece in pieces:
        waiting = pa.concat_tables([waiting, conform(name, piece)])
        while waiting.num_rows >= ROW_GROUP_ROWS:
            yield waiting.slice(0, ROW_GROUP_ROWS).combine_chunks()
            waiting = waiting.slice(ROW_GROUP_ROWS)
    if waiting.num_rows:
        yield waiting.combine_chunks()


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
    schema = storage_schema(name)
    names = list(columns) if columns is not None else schema.names
    if unknown := [c for c in names if c not in schema.names]:
        raise SchemaMismatch(f"table {name} has no column {unknown}; it has {schema.names}")
    wanted = pa.schema([schema.field(c) for c in names])
    parts = [wanted.empty_table()]
    for path in paths:
        file = pq.ParquetFile(path)
        present = [c for c in names if c in file.schema_arrow.names]
        table = file.read(columns=present)
        arrays = []
        for field in wanted:
            if field.name not in present:
                arrays.append(pa.chunked_array([pa.nulls(table.num_rows, field.type)]))
                continue
            column = table.column(field.name)
            if not _lossless(column.type, field.type):
                raise SchemaMismatch(
                    f"{path}: column {field.name!r} is {column.type}, the registry says {field.type}; "
                    "materialize the asset again"
                )
            arrays.append(column.cast(field.type))
        parts.append(pa.Table.from_arrays(arrays, schema=wanted))
    return pa.concat_tables(parts)
