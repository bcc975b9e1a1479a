"""Bring a lake from an older format to the one that this etpi writes.

A format number covers the form of manifests, pointers and tables. It is raised only by a change after which older files
would be misread: a renamed or retyped column or manifest field, another meaning or unit of a value, another path. A new
column, table, asset or manifest field needs no new format: it is null, or has its default, where older files lack it.

A migration keeps every data version's name, so no input changes and nothing becomes stale. To add one: raise
`manifest.SCHEMA_VERSION`, append a `Migration` to MIGRATIONS, and test it on the lakes in tests/fixtures/lakes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from etpi_resources.lake import formats, parquet
from etpi_resources.lake.files import sync, write_atomically
from etpi_resources.lake.lake import Lake, manifest_name, sha256_of
from etpi_resources.lake.manifest import SCHEMA_VERSION, LakeError, NewerFormat, Ref
from etpi_resources.lake.provenance import etpi_version
from etpi_resources.lake.references import References
from etpi_resources.process.locks import require_held

Json = dict[str, Any]


def _same(manifest: Json) -> Json:
    return manifest


@dataclass(frozen=True)
class Migration:
    """One step, from format `to` - 1 to `to`.

    Attributes:
        summary: what it changes, for people.
        manifest: old JSON of a manifest -> new JSON; it keeps `ref` and `version`.
        tables: table name -> function of an old file's rows that returns the new rows, which fit `schemas.TABLES`.
    """

    to: int
    summary: str
    manifest: Callable[[Json], Json] = _same
    tables: Mapping[str, Callable[[pa.Table], pa.Table]] = field(default_factory=dict)


MIGRATIONS: tuple[Migration, ...] = ()
"""Every step, in order. Format 1 is the first, so there is none yet."""


@dataclass
class Migrated:
    """Changes that `migrate` made or would make: manifests, files by table, and the steps."""

    steps: Sequence[Migration]
    manifests: int = 0
    files: Counter[str] = field(default_factory=Counter)


def pending(root: Path, migrations: Sequence[Migration] | None = None, to: int = SCHEMA_VERSION) -> list[Migration]:
    """Return the steps that bring a lake to format `to`; empty if it has that format.

    Raises:
        NewerFormat: the lake is newer than `to`.
        LakeError: a step is missing.
    """
    stored = formats.read(root)
    if max(stored.format, stored.migrating or 0) > to:
        raise NewerFormat.of(root, max(stored.format, stored.migrating or 0), stored.etpi)
    steps = {step.to: step for step in (MIGRATIONS if migrations is None else migrations)}
    wanted = range(stored.format + 1, to + 1)
    if missing := [number for number in wanted if number not in steps]:
        raise LakeError(f"{root} has format {stored.format}; etpi has no migration to format {missing[0]}")
    return [steps[number] for number in wanted]


def preview(root: Path, migrations: Sequence[Migration] | None = None, to: int = SCHEMA_VERSION) -> Migrated:
    """Return what `migrate` would change; nothing is written."""
    steps = pending(root, migrations, to)
    result = Migrated(steps)
    for _, _, manifest in _old_manifests(Lake(root, any_format=True), steps):
        result.manifests += 1
        result.files.update(name for name in manifest["tables"] if _rewrites(steps, name))
    return result


def migrate(root: Path, migrations: Sequence[Migration] | None = None, to: int = SCHEMA_VERSION) -> Migrated:
    """Bring a lake to format `to`. Killed at any moment, it continues when called again.

    New files and manifests are written beside the old ones, then the pointers move, then the old ones are removed.
    Meanwhile `lake.json` says that a migration is under way, so that no run reads a mixture.

    Raises:
        LakeBusy: a run or a backup is using the lake.
        NewerFormat, LakeError: as `pending`; or a file is damaged, and then nothing has changed.
    """
    lake = Lake(root, any_format=True)
    with lake.alone():
        steps, stored = pending(root, migrations, to), formats.read(root)
        result = Migrated(steps)
        if not steps:
            if stored.migrating is None and not (lake.root / formats.MARKER).exists():
                formats.mark(lake.root)
            return result
        old = list(_old_manifests(lake, steps))
        _require_sound(lake, steps, [manifest for *_, manifest in old])
        formats.write(lake.root, replace(stored, migrating=to))
        renamed: dict[Path, Path] = {}
        with lake.staging() as staging:
            for _, path, manifest in old:
                renamed[path] = _rewrite(lake, path, manifest, steps, staging, result)
        for ref in lake.refs():
            _move_pointers(lake, ref, renamed)
        # From here on the lake has the new format; old manifests go before the files that only they name.
        for path in renamed:
            path.unlink(missing_ok=True)
        _remove_unnamed_files(lake)
        formats.write(lake.root, formats.Format(to, etpi_version()))
    return result


def _old_manifests(lake: Lake, steps: Sequence[Migration]) -> Iterable[tuple[Ref, Path, Json]]:
    """Yield the manifests of a format before that of the last step."""
    for ref in lake.refs():
        for path in sorted((lake.root / ref.asset / f"{ref.set}={ref.key}").glob("version=*/manifest-*.json")):
            try:
                manifest = json.loads(path.read_bytes())
            except ValueError as error:
                raise LakeError(
                    f"{path} cannot be read ({error}); run `etpi repair` of the etpi that wrote it"
                ) from error
            if steps and manifest.get("schema_version", 1) < steps[-1].to:
                yield ref, path, manifest


def _require_sound(lake: Lake, steps: Sequence[Migration], manifests: Iterable[Json]) -> None:
    """Raise LakeError if a file that is to be rewritten is not what was written."""
    for manifest in manifests:
        for name, table in manifest["tables"].items():
            for entry in table["files"] if _rewrites(steps, name) else ():
                path = lake.root / entry["path"]
                if not path.exists() or sha256_of(path) != entry["sha256"]:
                    raise LakeError(f"{path} is damaged; run `etpi repair` of the etpi that wrote it, then migrate")


def _rewrites(steps: Iterable[Migration], table: str) -> bool:
    return any(table in step.tables for step in steps)


def _rewrite(
    lake: Lake,
    path: Path,
    manifest: Json,
    steps: Sequence[Migration],
    staging: Path,
    result: Migrated,
) -> Path:
    """Write the new files and the new manifest of a version; return the manifest's path."""
    wanted = [step for step in steps if step.to > manifest.get("schema_version", 1)]
    new: Json = json.loads(json.dumps(manifest))
    for name, table in new["tables"].items():
        if _rewrites(wanted, name):
            table["files"] = [_rewrite_file(lake, name, e, wanted, staging) for e in table["files"]]
            result.files[name] += 1
    for step in wanted:
        new = {**step.manifest(new), "schema_version": step.to}
    if (new["ref"], new["version"]) != (manifest["ref"], manifest["version"]):
        raise LakeError(f"the migration changes the version of {path}, which would make everything after it stale")
    target = path.with_name(manifest_name(new))
    write_atomically(target, json.dumps(new, indent=1, ensure_ascii=False) + "\n")
    result.manifests += 1
    return target


def _rewrite_file(lake: Lake, name: str, entry: Json, steps: Sequence[Migration], staging: Path) -> Json:
    """Write a file's rows in the new format beside it, and return its entry for the manifest."""
    old = lake.root / entry["path"]
    rows = pq.ParquetFile(old).read()
    for step in steps:
        rows = step.tables[name](rows) if name in step.tables else rows
    target = old.with_name(f"part-0.format-{steps[-1].to}.parquet")
    staged = staging / "part"
    parquet.write(name, rows, staged)
    sync(staged)
    described = {"path": target.relative_to(lake.root).as_posix(), "sha256": sha256_of(staged)}
    described |= {"bytes": staged.stat().st_size}
    staged.replace(target)
    sync(target.parent)
    return described


def _move_pointers(lake: Lake, ref: Ref, renamed: Mapping[Path, Path]) -> None:
    folder = lake.root / ref.asset / f"{ref.set}={ref.key}"
    for name in ("current", "blocked"):
        if not (folder / name).exists():
            continue
        pointer = json.loads((folder / name).read_bytes())
        if (target := renamed.get(folder / pointer["manifest"])) is not None:
            pointer["manifest"] = target.relative_to(folder).as_posix()
            write_atomically(folder / name, json.dumps(pointer) + "\n", check=require_held)


def _remove_unnamed_files(lake: Lake) -> None:
    """Remove table files that no manifest names: those that were rewritten."""
    references = References(lake)
    named = {path for version in references.publications for path in references.files(version)}
    require_held()
    for path in lake.root.glob("*/*/*=*/version=*/*.parquet"):
        if path not in named:
            path.unlink()
