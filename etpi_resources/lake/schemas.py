"""Every table of the lake, its columns, types and meaning, in one registry (`tables.toml`).

The lake writes only tables that fit, the catalog creates typed views from it, and the Dagster assets take their column
descriptions from it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

TIME = pa.timestamp("us", tz="UTC")
_TYPES = {
    "text": pa.string(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "time": TIME,
    "text[]": pa.list_(pa.string()),
    "int32[]": pa.list_(pa.int32()),
    "float64[]": pa.list_(pa.float64()),
    "float32[]": pa.list_(pa.float32()),
}


@dataclass(frozen=True)
class Table:
    """A stored table: its name, the meaning of a row in one line, and its columns as (name, type, meaning)."""

    name: str
    row: str
    columns: tuple[tuple[str, pa.DataType, str], ...]

    @cached_property
    def schema(self) -> pa.Schema:
        return pa.schema([pa.field(n, t, metadata={"description": d}) for n, t, d in self.columns])


_STATED: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("tables.toml").read_text("utf-8"))

TABLES = {
    name: Table(name, columns.pop("_row"), tuple((c, _TYPES[kind], text) for c, (kind, text, *_) in columns.items()))
    for name, columns in _STATED.items()
}

LATER: Mapping[str, frozenset[str]] = {
    name: frozenset(column for column, (_, _, *later) in columns.items() if later) for name, columns in _STATED.items()
}
"""Columns that tables got after versions were published, by table."""


def empty(name: str) -> pa.Table:
    """Return the named table with no rows."""
    return TABLES[name].schema.empty_table()


def from_rows(name: str, rows: list[dict]) -> pa.Table:
    """Return the rows as the named table; a missing key is null. Raises KeyError for an unknown key."""
    schema = TABLES[name].schema
    known = set(schema.names)
    for row in rows:
        if not row.keys() <= known:
            raise _unknown(name, row.keys() - known)
    # Column by column: Table.from_pylist takes three times as long.
    columns = [pa.array([row.get(field.name) for row in rows], field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def from_tuples(name: str, rows: Sequence[tuple[Any, ...]]) -> pa.Table:
    """Return rows, values in the order of the columns, as the named table."""
    schema = TABLES[name].schema
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def from_columns(name: str, columns: Mapping[str, Any], rows: int) -> pa.Table:
    """Return the named table from columns (Arrow or numpy arrays, or lists); a missing one is null.

    Raises:
        KeyError: the table has no such column.
    """
    schema = TABLES[name].schema
    if unknown := columns.keys() - set(schema.names):
        raise _unknown(name, unknown)
    arrays = [
        pa.nulls(rows, field.type) if field.name not in columns else _array(columns[field.name], field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _unknown(name: str, columns: Collection[str]) -> KeyError:
    return KeyError(f"table {name}: unknown column(s) {sorted(columns)}; it has {TABLES[name].schema.names}")


def _array(values: Any, kind: pa.DataType) -> Any:
    return values.cast(kind) if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values, kind)
