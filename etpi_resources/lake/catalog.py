"""The catalog `etpi.duckdb`: one DuckDB file over the current versions of the lake, for people and notebooks.

The file has a schema for every asset, with a view for each of its tables (a real table, if it is small), the schema
`lake` with every manifest and check, and in `main` the views of `sql/views`. A build writes a new file and renames it
over the old one, so readers are never blocked and never see a partial catalog. Assets do not read this file: they use
`Lake.query`.
"""

from __future__ import annotations

import graphlib
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import duckdb
import pyarrow as pa

from etpi_resources.lake import taint
from etpi_resources.lake.check_outcome import CheckOutcome, shown
from etpi_resources.lake.formats import MARKER
from etpi_resources.lake.lake import Lake, LakeError, sync
from etpi_resources.lake.manifest import Manifest
from etpi_resources.lake.parquet import storage_schema
from etpi_resources.lake.schemas import TIME
from etpi_resources.process.locks import require_held

COPIED_TABLES = frozenset(
    {
        "specs", "quarantined", "checkpoints", "training_log", "probes", "metrics", "changes", "reports",
        "leaderboard", "teacher_ceiling",
    }
)  # fmt: skip
"""Tables that the catalog copies, so that they can be read without the lake."""

HISTORY_TABLE = ("upweighted_dataset", "dataset_rows")
"""(asset, table) whose view shows every version, because an older checkpoint was trained on an older version."""

_TYPES = {
    pa.string(): "VARCHAR", pa.int32(): "INTEGER", pa.int64(): "BIGINT", pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE", pa.bool_(): "BOOLEAN", pa.timestamp("us", tz="UTC"): "TIMESTAMP WITH TIME ZONE",
}  # fmt: skip


_KEPT = pa.schema([("rollout_id", pa.string()), ("judge", pa.string()), ("reason", pa.string()), ("at", pa.string())])
_VOCABULARY = pa.schema([("tokenizer", pa.string()), ("id", pa.int32()), ("text", pa.string())])


BUILD = "run `etpi run catalog`"
_CLOSE = "Close that program, or have it open the file read-only (`duckdb -readonly {}`)"


class CatalogBusy(LakeError):
    """Another program has the catalog open for writing; the message says which one to close."""


class CatalogAsset(Protocol):
    """An asset as the catalog sees it: its name, its partition set ("all" if it has none), its tables."""

    @property
    def name(self) -> str: ...
    @property
    def set(self) -> str: ...
    @property
    def tables(self) -> tuple[str, ...]: ...


def default_path(lake: Lake | None = None) -> Path:
    """Return $ETPI_CATALOG, or `etpi.duckdb` in the folder $ETPI_DATA or the cluster's, or beside the lake's folder."""
    if named := os.environ.get("ETPI_CATALOG"):
        return Path(named).resolve()
    root, folder = (lake or Lake.open()).root, Lake.named_folder()
    # A named folder can be a mount point, whose parent may not be writable.
    return (root if folder and folder.resolve() == root else root.parent) / "etpi.duckdb"


def sql_folder() -> Path:
    """Return the folder of views, checks and reports: package data, in a checkout a link to `sql/`.

    Raises:
        LakeError: the folder is missing.
    """
    folder = Path(__file__).resolve().parents[1] / "sql"
    if not (folder / "views").is_dir():
        raise LakeError(f"the SQL files are missing: there is no {folder / 'views'}; install etpi again")
    return folder


def catalog_of(folder: Path) -> Path:
    """Return the catalog of a lake, or of a project folder whose lake is in `data`, wherever the program runs.

    It is in the folder or beside the lake: where `default_path` puts it with $ETPI_DATA, and without. If both exist,
    the later one counts. If neither does, the path beside the lake is returned.
    """
    folder = folder.resolve()
    lake = Lake(folder)
    if not lake.refs():
        lake = Lake(folder / "data")
    places = [lake.root / "etpi.duckdb", lake.root.parent / "etpi.duckdb"]
    return max((place for place in places if place.exists()), key=lambda p: p.stat().st_mtime, default=places[1])


def connect(path: Path | str | None = None, read_only: bool = True) -> duckdb.DuckDBPyConnection:
    """Open a catalog, with times in UTC; close the connection, or use it in a `with`.

    `path` is a catalog, a lake or a project folder (see `catalog_of`). Only without it do the working directory and the
    variables ETPI_DATA and ETPI_CATALOG count (see `default_path`).

    A connection shows the catalog as it was when the process first opened it. To see a later one, close every
    connection of the process and open it again. The next build discards everything written with `read_only=False`.

    Raises:
        LakeError: there is no catalog yet, its file cannot be read, or the lake was moved or copied with it.
        CatalogBusy: a program has it open for writing.
    """
    file = default_path() if path is None else Path(path)
    if file.is_dir():
        file = catalog_of(file)
    if not file.exists():
        raise LakeError(f"there is no catalog at {file.resolve()}; {_remedy(path is None)}")
    refuse_other_file(file)
    try:
        connection = duckdb.connect(str(file), read_only=read_only)
    except duckdb.Error as error:
        if holder := _find_writer(file):
            raise CatalogBusy(f"{file} is open for writing: {holder}. {_CLOSE.format(file.name)}") from error
        reason = str(error).split("\n")[0]
        raise LakeError(f"{file} cannot be opened: {reason}; {_remedy(path is None)}") from error
    connection.execute("SET TimeZone = 'UTC'")
    if comment := _comment(connection):
        root, folder = map(Path, json.loads(comment))
        place = (file.resolve().parent / os.path.relpath(root, folder)).resolve()
        if place != root and (place / MARKER).is_file():
            connection.close()
            raise LakeError(f"{file} reads the lake at {root}, from which {place} was moved or copied; {BUILD}")
    return connection


def _comment(connection: duckdb.DuckDBPyConnection) -> str | None:
    """Return, as JSON, the folders of the lake that the views read and of the catalog when it was built.

    None in catalogs of etpi before 0.3."""
    sql = "SELECT comment FROM duckdb_tables() WHERE schema_name = 'lake' AND table_name = 'manifests'"
    return (connection.execute(sql).fetchone() or (None,))[0]


def refuse_other_file(file: Path, schemas: Collection[str] = ()) -> None:
    """Raise LakeError if the file is neither a DuckDB file nor named as one: it is not to be replaced.

    A file with the name of the schema `lake`, or of one of `schemas`, is refused too: DuckDB names a catalog after its
    file, so `lake.manifests` would be ambiguous in it.
    """
    if file.stem in {"lake", *schemas}:
        raise LakeError(f"{file} has the name of the schema {file.stem!r} in it; name another file in ETPI_CATALOG")
    if file.suffix == ".duckdb" or not file.exists():
        return
    with file.open("rb") as opened:
        if (start := opened.read(12)) and start[8:] != b"DUCK":
            raise LakeError(f"{file} is no catalog; name another file in ETPI_CATALOG, or move this one away")


def _remedy(by_default: bool) -> str:
    """Return what to do about a missing catalog; name the working directory and variables if they chose the place."""
    if not by_default:
        return BUILD
    named = [f"{name}={value}" for name in ("ETPI_CATALOG", "ETPI_DATA") if (value := os.environ.get(name))]
    chosen = f"because of {named[0]}" if named else f"because the working directory is {Path.cwd()}"
    other = "Name another lake (ETPI_DATA, or in Python connect('/path/to/data'))"
    return f"it was looked for there {chosen}. {other}, or {BUILD}"


def verify(path: Path | None = None) -> list[CheckOutcome]:
    """Run each query of `sql/checks` on the catalog; a check passes if its query returns no row.

    No check blocks: each compares assets that may have been materialized at different times.
    """
    outcomes = []
    with connect(path) as connection:
        for name, sql in _texts("checks").items():
            result = connection.sql(sql)
            rows = result.limit(3).fetchall()
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
    assets: Iterable[CatalogAsset],
    path: Path | None = None,
    *,
    vocabularies: Mapping[str, Sequence[str]] | None = None,
    wait_seconds: float = 30.0,
) -> Path:
    """Write the catalog of the lake's current versions and return its path.

    Args:
        assets: the nodes of the asset graph; an asset without data gets typed, empty views.
        path: `default_path` by default.
        vocabularies: the text of each token id, by the tokenizer's name in specs.
        wait_seconds: how long to wait for a program that has the catalog open for writing.

    Raises:
        CatalogBusy: a program still has it open for writing.
        LakeError: a file of a current version is missing, a folder of the lake's path contains "=", "*" or "?", or
            there is another file at `path`.
    """
    path = path or default_path(lake)
    if odd := [part for part in lake.root.parts if re.search("[=*?]", part)]:
        raise LakeError(
            f"the lake is under {odd[0]!r}, which DuckDB would read as a column or pattern; move {lake.root}"
        )
    refuse_other_file(path)
    building = path.with_name(f".{path.name}.building")
    with lake.lock("catalog_file"):
        _remove(building)  # left by a build that died
        try:
            with duckdb.connect(str(building)) as connection:
                # One transaction: a commit per view would write to disk a hundred times.
                connection.execute("SET TimeZone = 'UTC'").begin()
                _fill(connection, lake, assets, vocabularies or {})
                folders = json.dumps([str(lake.root.resolve()), str(path.resolve().parent)]).replace("'", "''")
                connection.execute(f"COMMENT ON TABLE lake.manifests IS '{folders}'")
                connection.commit()
            sync(building)
            _wait_for_writers(path, wait_seconds)
            require_held()
            building.replace(path)
            sync(path.parent)
        finally:
            _remove(building)
    return path


@contextmanager
def in_memory(lake: Lake, assets: Iterable[CatalogAsset]) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a catalog of the lake's current versions without a file, for assets and commands that run before a build."""
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        _fill(connection, lake, assets, {})
        yield connection


def _fill(
    connection: duckdb.DuckDBPyConnection,
    lake: Lake,
    assets: Iterable[CatalogAsset],
    vocabularies: Mapping[str, Sequence[str]],
) -> None:
    for asset in assets:
        _add_asset(connection, lake, asset)
    _add_ledger(connection, lake, vocabularies)
    for name, sql in _by_dependency(_texts("views")).items():
        connection.execute(sql)
        comment = sql.splitlines()[0].removeprefix("-- ").replace("'", "''")
        connection.execute(f"COMMENT ON VIEW \"{name}\" IS '{comment}'")


def _add_asset(connection: duckdb.DuckDBPyConnection, lake: Lake, asset: CatalogAsset) -> None:
    """Create the asset's schema, with a view or a table for each of its tables over the current versions."""
    if not asset.tables:
        return
    connection.execute(f'CREATE SCHEMA "{asset.name}"')
    refs = [ref for ref in lake.refs(asset.name) if ref.set == asset.set]
    current = [manifest for ref in refs if (manifest := lake.current(ref))]
    for table in asset.tables:
        files = [file for manifest in current if table in manifest.tables for file in lake.files_of(manifest, table)]
        kind = "TABLE" if table in COPIED_TABLES else "VIEW"
        select = _select(table, asset.set, files)
        connection.execute(f'CREATE {kind} "{asset.name}"."{table}" AS {select}')
        if (asset.name, table) == HISTORY_TABLE:
            past = _files_of_versions(lake, [m for ref in refs for m in lake.history(ref)], table)
            select = _select(table, "version", past)
            connection.execute(f'CREATE VIEW "{asset.name}"."{table}_history" AS {select}')


def _files_of_versions(lake: Lake, manifests: Iterable[Manifest], table: str) -> list[Path]:
    """Return the files of each version once, though it may have several manifests; skip deleted versions."""
    files: dict[str, list[Path]] = {}
    for manifest in manifests:
        paths = [lake.root / entry["path"] for entry in manifest.tables[table]["files"]]
        if manifest.version not in files and all(path.exists() for path in paths):
            files[manifest.version] = paths
    return [path for paths in files.values() for path in paths]


def _select(table: str, key_column: str, files: list[Path]) -> str:
    """Return SQL for the files' rows: the columns and types of `schemas`, and the partition key from the path."""
    types = {field.name: _type(field.type) for field in storage_schema(table)}
    if key_column != "all":
        types[key_column] = "VARCHAR"
    empty = ", ".join(f'NULL::{kind} AS "{name}"' for name, kind in types.items())
    rows = f"SELECT {empty} WHERE false"
    if files:
        listed = ", ".join("'" + str(file).replace("'", "''") + "'" for file in files)
        options, read = "hive_partitioning = true, hive_types_autocast = false", "*"
        if "version" in storage_schema(table).names:
            # The path's version would replace the table's column.
            key = f"regexp_extract(filename, '/{key_column}=([^/]+)/version=', 1) AS \"{key_column}\""
            options, read = "hive_partitioning = false, filename = true", f"* EXCLUDE (filename), {key}"
        rows += f" UNION ALL BY NAME SELECT {read} FROM read_parquet([{listed}], union_by_name = true, {options})"
    columns = ", ".join(f'"{name}"' for name in types)
    return f"SELECT {columns} FROM ({rows})"


def _type(kind: pa.DataType) -> str:
    return f"{_TYPES[kind.value_type]}[]" if pa.types.is_list(kind) else _TYPES[kind]


def _add_ledger(connection: duckdb.DuckDBPyConnection, lake: Lake, vocabularies: Mapping[str, Sequence[str]]) -> None:
    """Create the schema `lake`: every publication, every check outcome, and the text of each token id."""
    words = [
        {"tokenizer": name, "id": number, "text": text}
        for name, texts in vocabularies.items()
        for number, text in enumerate(texts)
    ]
    tables = read(lake) | {
        "vocabulary": pa.Table.from_pylist(words, schema=_VOCABULARY),
        "kept_flips": pa.Table.from_pylist(taint.kept_flips(lake), schema=_KEPT),
    }
    connection.execute("CREATE SCHEMA lake")
    for name, rows in tables.items():
        connection.register("new_rows", rows)
        connection.execute(f'CREATE TABLE lake."{name}" AS SELECT * FROM new_rows')
        connection.unregister("new_rows")


def _texts(kind: str) -> dict[str, str]:
    return {path.stem: path.read_text() for path in sorted((sql_folder() / kind).glob("*.sql"))}


def _by_dependency(views: Mapping[str, str]) -> dict[str, str]:
    """Return the views, each after those it selects from."""
    needs = {
        name: {
            other for other in re.findall(r"\b(?:FROM|JOIN)\s+(\w+)\b(?!\.)", sql) if other in views and other != name
        }
        for name, sql in views.items()
    }
    return {name: views[name] for name in graphlib.TopologicalSorter(needs).static_order()}


def _wait_for_writers(path: Path, seconds: float) -> None:
    """Wait until no program has the file open for writing: a rename would separate a writer from its log.

    Raises:
        CatalogBusy: a program still has it open after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while reason := _find_writer(path):
        if time.monotonic() > deadline:
            raise CatalogBusy(
                f"{path} is open for writing: {reason}. {_CLOSE.format(path.name)}, then run `etpi run catalog`."
            )
        time.sleep(0.2)


def _find_writer(path: Path) -> str | None:
    """Return which program has the file open for writing, in DuckDB's words; None if there is none."""
    if not path.exists():
        return None
    try:
        # Opening for reading fails while another process writes, and DuckDB's error names that process.
        duckdb.connect(str(path), read_only=True).close()
    except duckdb.ConnectionException:
        return "this process has it open with other settings"
    except duckdb.Error as error:
        # The new file replaces a file with any other fault (damaged, or another DuckDB's format).
        if "lock" in str(error):
            return str(error).split("\n")[0]
    log = path.with_name(path.name + ".wal")
    if log.exists():
        return f"its log {log.name} exists (if no program has the catalog open, one died; remove that file)"
    return None


def _remove(building: Path) -> None:
    building.unlink(missing_ok=True)
    building.with_name(building.name + ".wal").unlink(missing_ok=True)


_PUBLICATION = {"asset": pa.string(), "set": pa.string(), "key": pa.string(), "version": pa.string()}
_PUBLICATION |= {"state": pa.string(), "created_at": TIME}

_MANIFEST: Mapping[str, tuple[pa.DataType, Callable[[Manifest], Any]]] = {
    "total_rows": (pa.int64(), lambda m: sum(m.rows.values())),
    "rows": (pa.string(), lambda m: json.dumps(m.rows)),
    "inputs": (pa.string(), lambda m: json.dumps(dict(m.inputs))),
    "input_key": (pa.string(), lambda m: m.input_key),
    "spec_hash": (pa.string(), lambda m: m.spec_hash),
    "code_version": (pa.string(), lambda m: json.dumps(m.code["versions"]) if "versions" in m.code else None),
    "cause": (pa.string(), lambda m: m.cause or None),
    "seconds": (pa.float64(), lambda m: m.seconds),
    "seeds": (pa.list_(pa.int64()), lambda m: list(m.seeds)),
    "notes": (pa.string(), lambda m: json.dumps(dict(m.notes), ensure_ascii=False)),
    "git_revision": (pa.string(), lambda m: m.git_revision),
    "fingerprint": (pa.string(), lambda m: json.dumps(dict(m.fingerprint))),
    "schema_version": (pa.int32(), lambda m: m.schema_version),
}
"""The columns of one publication, besides those of _PUBLICATION. `state` is current, blocked (newer than current, a
blocking check failed) or past. `rows` (by table), `inputs` ("asset/key" -> version), `notes`, `fingerprint` and
`code_version` (component -> number) are JSON. `cause` is why it was computed: first, spec, inputs or code. `seconds` is
the wall time of the computation."""

_CHECK: Mapping[str, tuple[pa.DataType, Callable[[Mapping[str, Any]], Any]]] = {
    "check_name": (pa.string(), lambda check: check["name"]),
    "passed": (pa.bool_(), lambda check: check["passed"]),
    "blocking": (pa.bool_(), lambda check: check["blocking"]),
    "message": (pa.string(), shown),
    "figures": (pa.string(), lambda check: json.dumps(check["figures"], ensure_ascii=False)),
    "applicable": (pa.bool_(), lambda check: check.get("applicable", True)),
}
"""The columns of one check of a publication; `figures` is JSON. A check that is not applicable counts as passed."""


def read(lake: Lake) -> dict[str, pa.Table]:
    """Return the tables "manifests" and "checks", sorted by asset, set, key and time."""
    manifests: list[dict[str, Any]] = []
    checks: list[dict[str, Any]] = []
    for ref in lake.refs():
        current, blocked = lake.current(ref), lake.blocked(ref)
        for manifest in lake.history(ref):
            state = "current" if manifest == current else "blocked" if manifest == blocked else "past"
            created_at = datetime.fromisoformat(manifest.created_at)
            publication = dict(
                zip(_PUBLICATION, (ref.asset, ref.set, ref.key, manifest.version, state, created_at), strict=True)
            )
            manifests.append(publication | {name: read(manifest) for name, (_, read) in _MANIFEST.items()})
            for check in manifest.checks:
                checks.append(publication | {name: read(check) for name, (_, read) in _CHECK.items()})
    return {"manifests": _table(manifests, _MANIFEST), "checks": _table(checks, _CHECK)}


def _table(rows: list[dict[str, Any]], columns: Mapping[str, tuple[pa.DataType, Any]]) -> pa.Table:
    types = _PUBLICATION | {name: kind for name, (kind, _) in columns.items()}
    return pa.Table.from_pylist(rows, schema=pa.schema(types))
