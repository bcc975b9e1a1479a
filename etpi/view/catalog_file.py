"""The catalog as the pages read it: the queries of `sql/pages`, on the file that is current when a request begins."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import duckdb

from etpi_resources.lake.catalog import connect, sql_folder

_VARIABLE = re.compile(r"getvariable\('(\w+)'\)")

Row = dict[str, Any]


class Queries:
    """Runs queries of `sql/pages` on one connection to the catalog.

    Args:
        kept: rows of `kept_rows`, which live as long as the file.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection, kept: dict[str, list[Row]]) -> None:
        self._connection, self._kept = connection, kept

    def rows(self, query: str, **variables: Any) -> list[Row]:
        """Return the rows of `sql/pages/<query>.sql`; variables that are not given are NULL.

        Raises KeyError: the query does not use a variable that is given.
        """
        result = self._run(query, "SELECT * FROM ({})", variables)
        columns = [column[0] for column in result.description or ()]
        return [dict(zip(columns, values, strict=True)) for values in result.fetchall()]

    def column(self, query: str, column: str, **variables: Any) -> list[Any]:
        """Return one column of the rows of a query; DuckDB computes no other."""
        return [value for (value,) in self._run(query, f"SELECT {column} FROM ({{}})", variables).fetchall()]

    def _run(self, query: str, select: str, variables: Row) -> duckdb.DuckDBPyConnection:
        text, names = _query(query)
        if unknown := variables.keys() - names:
            raise KeyError(f"sql/pages/{query}.sql uses no variable {sorted(unknown)}; it has {sorted(names)}")
        for name in names:
            # A NULL without a type would be an INTEGER, to which a text beside it would be converted.
            value = "NULL::VARCHAR" if variables.get(name) is None else "$value"
            self._connection.execute(
                f"SET VARIABLE {name} = {value}", {"value": variables[name]} if value == "$value" else None
            )
        return self._connection.execute(select.format(text))

    def kept_rows(self, query: str) -> list[Row]:
        """Return `rows` of a query without variables; computed once for a file, whose rows do not change."""
        if query not in self._kept:
            self._kept[query] = self.rows(query)
        return self._kept[query]

    def row(self, query: str, **variables: Any) -> Row | None:
        """Return the first row of `rows`, None if there is none."""
        return next(iter(self.rows(query, **variables)), None)


class CatalogFile:
    """The catalog's file, opened read-only. A build replaces the file; the next request opens the new one.

    A process sees a replaced file only after it closed every connection to the old one. So a request that finds the
    file replaced waits for the running ones to end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._changed = threading.Condition()
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._inode: int | None = None
        self._kept: dict[str, list[Row]] = {}
        self._running = 0

    @contextmanager
    def queries(self) -> Iterator[Queries]:
        """Yield `Queries` on the current file. Raises LakeError: there is no catalog."""
        with self._changed:
            while self._is_replaced() and self._running:
                self._changed.wait()
            if self._connection is None or self._is_replaced():
                self._open()
            assert self._connection is not None
            cursor = self._connection.cursor()
            cursor.execute("SET TimeZone = 'UTC'")
            self._running += 1
            kept = self._kept
        try:
            yield Queries(cursor, kept)
        finally:
            cursor.close()
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def _is_replaced(self) -> bool:
        return self._connection is not None and _inode(self.path) not in (self._inode, None)

    def _open(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._inode = _inode(self.path)
        self._connection, self._kept = connect(self.path), {}
        # A query opens every file of a view's partitions; files of versions never change.
        self._connection.execute("SET parquet_metadata_cache = true")


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


@cache
def _query(name: str) -> tuple[str, frozenset[str]]:
    text = (sql_folder() / "pages" / f"{name}.sql").read_text()
    text = text.strip().removesuffix(";") + "\n"
    return text, frozenset(_VARIABLE.findall(text))
