"""The catalog: one DuckDB file over the lake, for people and notebooks.

Belongs here: building `etpi.duckdb` from the versions in force, and opening it. Does not belong here: what a view says
(`sql/views`), questions (`sql/reports`), or how assets query the lake (`Lake.query`: never through this file).

The file has a schema for every asset, with a view (a real table, where it is small) for each of its tables, the schema
`lake` with every manifest and check, and in `main` the views of `sql/views`. It is built beside and renamed over, so
readers are never blocked and never see half of it.
"""

from __future__ import annotations

import graphlib
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import duckdb
import pyarrow as pa

from etpi_resources.lake import ledger
from etpi_resources.lake.checks import CheckOutcome
from etpi_resources.lake.lake import Lake, LakeError, sync
from etpi_resources.lake.manifest import Manifest
from etpi_resources.lake.parquet import storage_schema

SMALL = frozenset(
    {
        "specs", "quarantined", "checkpoints", "training_log", "probes", "metrics", "reports", "leaderboard",
        "teacher_ceiling",
    }
)  # fmt: skip
"""Tables kept in the file itself: they can be read where the lake is not."""

HISTORY = ("upweighted_dataset", "dataset_rows")
"""The table of which every version is kept in view: a checkpoint's rows are those of the version it was trained on."""

_TYPES = {
    pa.string(): "VARCHAR", pa.int32(): "INTEGER", pa.int64(): "BIGINT", pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE", pa.bool_(): "BOOLEAN", pa.timestamp("us", tz="UTC"): "TIMESTAMP WITH TIME ZONE",
}  # fmt: skip


_VOCABULARY = pa.schema([("tokenizer", pa.string()), ("id", pa.int32()), ("text", pa.string())])


class CatalogBusy(LakeError):
    """Somebody has the catalog open for writing; the message says what to close."""


class Holder(Protocol):
    """An asset as the catalog needs it: its name, the set of its keys ("all" for none), the tables it holds."""

    @property
    def name(self) -> str: ...
    @property
    def set(self) -> str: ...
    @property
    def tables(self) -> tuple[str, ...]: ...


def default_path(lake: Lake | None = None) -> Path:
    """$ETPI_CATALOG, or `etpi.duckdb` in the folder that $ETPI_DATA names, or beside the lake's folder."""
    if named := os.environ.get("ETPI_CATALOG"):
        return Path(named).resolve()
    root, data = (lake or Lake.open()).root, os.environ.get("ETPI_DATA")
    # The parent of a folder that a user names may not be writable: it can be a mount point.
    return (root if data and Path(data).resolve() == root else root.parent) / "etpi.duckdb"


def sql_folder() -> Path:
    """The folder of views, checks and reports: package data, which in a checkout is a link to `sql/`.

    Raises:
        LakeError: it is not there.
    """
    folder = Path(__file__).resolve().parents[1] / "sql"
    if not (folder / "views").is_dir():
        raise LakeError(f"the SQL files are missing: there is no {folder / 'views'}; install etpi again")
    return folder


def connect(path: Path | None = None, read_only: bool = True) -> duckdb.DuckDBPyConnection:
    """Open the catalog, with times in UTC; close it, or use it in a `with`.

    A connection sees the catalog as it was when the process first opened it; close every connection of the process and
    open anew to see a later one. What is written with `read_only=False` is gone with the next build.

    Raises:
        LakeError: there is no catalog yet.
    """
    path = path or default_path()
    if not path.exists():
        raise LakeError(f"there is no catalog at {path}; run `dg launch --assets catalog`")
    connection = duckdb.connect(str(path), read_only=read_only)
    connection.execute("SET TimeZone = 'UTC'")
    return connection


def check_names() -> tuple[str, ...]:
    """The checks that `verify` reports, by file name."""
    return tuple(_texts("checks"))


def verify(path: Path | None = None) -> list[CheckOutcome]:
    """The outcome of each query of `sql/checks` on the catalog: it passes where it finds no row.

    None of them blocks: each looks across assets, of which some may be older than others.
    """
    outcomes = []
    with connect(path) as connection:
        for name, sql in _texts("checks").items():
            found = connection.sql(sql)
            rows = found.limit(3).fetchall()
            message = "none found"
            if rows:
                count = connection.sql(f"SELECT count(*) FROM ({sql.strip().rstrip(';')})").fetchall()[0][0]
                what = sql.splitlines()[0].removeprefix("-- ")
                message = f"{count} found. {what} The first: {rows}. Run sql/checks/{name}.sql for all."
            outcomes.append(CheckOutcome(name, not rows, message, blocking=False))
    return outcomes


# --- building ----------------------------------------------------------------------------------------------------


def build(
    lake: Lake,
    assets: Iterable[Holder],
    path: Path | None = None,
    *,
    vocabularies: Mapping[str, Sequence[str]] | None = None,
    wait_seconds: float = 30.0,
) -> Path:
    """Write the catalog of the lake's versions in force and return its path.

    Args:
        assets: the asset graph's nodes; an asset without data gives typed, empty views.
        path: `default_path` by default.
        vocabularies: the text of each token id, by the name specs call the tokenizer.
        wait_seconds: how long to wait for a program that has the catalog open for writing.

    Raises:
        CatalogBusy: it still has.
        LakeError: a file of a version in force is gone, or the lake lies where its path would be read as columns.
    """
    path = path or default_path(lake)
    if odd := [part for part in lake.root.parts if "=" in part]:
        raise LakeError(f"the lake lies under {odd[0]!r}, which DuckDB would read as a column; move {lake.root}")
    building = path.with_name(f".{path.name}.building")
    with lake.lock("catalog_file"):
        _remove(building)  # of a build that died
        try:
            with duckdb.connect(str(building)) as connection:
                # In one transaction: a hundred commits would cost a hundred writes to disk.
                connection.execute("SET TimeZone = 'UTC'").begin()
                _fill(connection, lake, assets, vocabularies or {})
                connection.commit()
            sync(building)
            _wait_for_writers(path, wait_seconds)
            building.replace(path)
            sync(path.parent)
        finally:
            _remove(building)
    return path


def _fill(
    connection: duckdb.DuckDBPyConnection,
    lake: Lake,
    assets: Iterable[Holder],
    vocabularies: Mapping[str, Sequence[str]],
) -> None:
    for asset in assets:
        _add_asset(connection, lake, asset)
    _add_ledger(connection, lake, vocabularies)
    for name, sql in _in_order(_texts("views")).items():
        connection.execute(sql)
        comment = sql.splitlines()[0].removeprefix("-- ").replace("'", "''")
        connection.execute(f"COMMENT ON VIEW \"{name}\" IS '{comment}'")


def _add_asset(connection: duckdb.DuckDBPyConnection, lake: Lake, asset: Holder) -> None:
    """A schema for the asset, with its tables over the versions in force."""
    if not asset.tables:
        return
    connection.execute(f'CREATE SCHEMA "{asset.name}"')
    refs = [ref for ref in lake.refs(asset.name) if ref.set == asset.set]
    current = [manifest for ref in refs if (manifest := lake.current(ref))]
    for table in asset.tables:
        files = [file for manifest in current if table in manifest.tables for file in lake.files_of(manifest, table)]
        kind = "TABLE" if table in SMALL else "VIEW"
        select = _select(table, asset.set, files)
        connection.execute(f'CREATE {kind} "{asset.name}"."{table}" AS {select}')
        if (asset.name, table) == HISTORY:
            past = _one_a_version(lake, [m for ref in refs for m in lake.history(ref)], table)
            select = _select(table, "version", past)
            connection.execute(f'CREATE VIEW "{asset.name}"."{table}_history" AS {select}')


def _one_a_version(lake: Lake, manifests: Iterable[Manifest], table: str) -> list[Path]:
    """The files of each version once (a version is its content, whoever published it); what was pruned is left out."""
    files: dict[str, list[Path]] = {}
    for manifest in manifests:
        paths = [lake.root / entry["path"] for entry in manifest.tables[table]["files"]]
        if manifest.version not in files and all(path.exists() for path in paths):
            files[manifest.version] = paths
    return [path for paths in files.values() for path in paths]


def _select(table: str, key_column: str, files: list[Path]) -> str:
    """The files' rows with the registry's columns and types, and the key that stands in their path as a column."""
    types = {field.name: _type(field.type) for field in storage_schema(table)}
    if key_column != "all":
        types[key_column] = "VARCHAR"
    empty = ", ".join(f'NULL::{kind} AS "{name}"' for name, kind in types.items())
    rows = f"SELECT {empty} WHERE false"
    if files:
        listed = ", ".join("'" + str(file).replace("'", "''") + "'" for file in files)
        options = "union_by_name = true, hive_partitioning = true, hive_types_autocast = false"
        rows += f" UNION ALL BY NAME SELECT * FROM read_parquet([{listed}], {options})"
    columns = ", ".join(f'"{name}"' for name in types)
    return f"SELECT {columns} FROM ({rows})"


def _type(kind: pa.DataType) -> str:
    return f"{_TYPES[kind.value_type]}[]" if pa.types.is_list(kind) else _TYPES[kind]


def _add_ledger(connection: duckdb.DuckDBPyConnection, lake: Lake, vocabularies: Mapping[str, Sequence[str]]) -> None:
    """The schema `lake`: every publication, every check's outcome, and what token ids stand for."""
    words = [
        {"tokenizer": name, "id": number, "text": text}
        for name, texts in vocabularies.items()
        for number, text in enumerate(texts)
    ]
    tables = ledger.read(lake) | {"vocabulary": pa.Table.from_pylist(words, schema=_VOCABULARY)}
    connection.execute("CREATE SCHEMA lake")
    for name, rows in tables.items():
        connection.register("new_rows", rows)
        connection.execute(f'CREATE TABLE lake."{name}" AS SELECT * FROM new_rows')
        connection.unregister("new_rows")


def _texts(kind: str) -> dict[str, str]:
    return {path.stem: path.read_text() for path in sorted((sql_folder() / kind).glob("*.sql"))}


def _in_order(views: Mapping[str, str]) -> dict[str, str]:
    """The views, each after those it selects from."""
    needs = {
        name: {
            other for other in re.findall(r"\b(?:FROM|JOIN)\s+(\w+)\b(?!\.)", sql) if other in views and other != name
        }
        for name, sql in views.items()
    }
    return {name: views[name] for name in graphlib.TopologicalSorter(needs).static_order()}


def _wait_for_writers(path: Path, seconds: float) -> None:
    """Return once nobody has the file open for writing; renaming over it would part a writer from its log."""
    deadline = time.monotonic() + seconds
    while reason := _written_by(path):
        if time.monotonic() > deadline:
            raise CatalogBusy(
                f"{path} is open for writing: {reason}. Close that program, or have it open the file read-only "
                f"(`duckdb -readonly {path.name}`), then run `dg launch --assets catalog`."
            )
        time.sleep(0.2)


def _written_by(path: Path) -> str | None:
    """Who has the file open for writing, as DuckDB says it; None where nobody has."""
    if not path.exists():
        return None
    try:
        # A reader's lock excludes a writer's, and DuckDB names the process that holds one.
        duckdb.connect(str(path), read_only=True).close()
    except duckdb.ConnectionException:
        return "this process has it open with other settings"
    except duckdb.Error as error:
        # Any other fault (a damaged file, another DuckDB's format) is mended by the new file.
        if "lock" in str(error):
            return str(error).split("\n")[0]
    log = path.with_name(path.name + ".wal")
    if log.exists():
        return f"{log.name} stands beside it (if no program has the catalog open, one died; remove that file)"
    return None


def _remove(building: Path) -> None:
    building.unlink(missing_ok=True)
    building.with_name(building.name + ".wal").unlink(missing_ok=True)
