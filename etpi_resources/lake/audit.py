"""Verify that a lake is what was written: pointers, manifests, files and checkpoints; set damaged files aside."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from etpi_resources.lake.lake import Lake, folder_hash, manifest_name, sha256_of
from etpi_resources.lake.manifest import LakeError, Manifest, Ref
from etpi_resources.lake.parquet import read

Kind = Literal["pointer", "manifest", "file", "checkpoint", "training"]
DAMAGED = ".damaged"
"""The folder of the lake that damaged files are moved to."""


@dataclass(frozen=True)
class Damage:
    """A damaged or missing part of the lake.

    Attributes:
        path: the file, or a checkpoint's folder.
        fault: what is wrong with it.
        refs: the partitions whose current version needs it; empty if only earlier versions do.
        manifests: the manifests of every version that needs it.
    """

    kind: Kind
    path: Path
    fault: str
    refs: tuple[Ref, ...] = ()
    manifests: tuple[Path, ...] = ()


@dataclass
class Audit:
    """The result of `audit`: parts verified by kind, bytes read, and the damaged parts."""

    counts: Counter[Kind] = field(default_factory=Counter)
    bytes: int = 0
    damages: list[Damage] = field(default_factory=list)


def audit(
    lake: Lake, *, deep: bool = False, since: datetime | None = None, log: Callable[[str], None] = lambda line: None
) -> Audit:
    """Verify every pointer, manifest and file of a lake, and every checkpoint.

    Args:
        deep: also read every file and compare its sha256; otherwise existence and size.
        since: only publications, and checkpoints of publications, from that time on.
        log: receives one line for each asset.
    """
    result, needs = Audit(), dict[Path, _Need]()
    for asset in sorted({ref.asset for ref in lake.refs()}):
        for ref in lake.refs(asset):
            current = _pointers(lake, ref, result)
            for path, manifest in _manifests(lake, ref, since, result):
                used_by = [ref] if current == manifest.version else []
                for part, kind, fault in _parts(lake, manifest, deep, needs, result):
                    need = needs.setdefault(part, _Need(kind, fault))
                    need.refs += used_by
                    need.manifests.append(path)
        log(f"{asset}: {result.counts['file']} files so far")
    for part, need in needs.items():
        if need.fault:
            refs = tuple(dict.fromkeys(need.refs))
            result.damages.append(Damage(need.kind, part, need.fault, refs, tuple(need.manifests)))
    _trainings(lake, result)
    return result


@dataclass
class _Need:
    """A file or checkpoint, what is wrong with it, and what needs it."""

    kind: Kind
    fault: str
    refs: list[Ref] = field(default_factory=list)
    manifests: list[Path] = field(default_factory=list)


def _parts(
    lake: Lake, manifest: Manifest, deep: bool, known: Mapping[Path, _Need], result: Audit
) -> Iterator[tuple[Path, Kind, str]]:
    """Yield the files and checkpoints of a version, each with its fault; a known part is not read again."""
    for name, table in manifest.tables.items():
        sound = []
        for entry in table["files"]:
            path = lake.root / entry["path"]
            fault = known[path].fault if path in known else _file(path, entry, deep, result)
            sound += [] if fault else [path]
            yield path, "file", fault
        for row in read(name, sound, ["checkpoint_id", "path"]).to_pylist() if name == "checkpoints" else []:
            folder = lake.checkpoint_dir(row["checkpoint_id"])
            if row["path"] == f"checkpoints/{folder.name}":  # otherwise a base outside the lake
                yield (
                    folder,
                    "checkpoint",
                    known[folder].fault if folder in known else _checkpoint(folder, deep, result),
                )


def set_aside(lake: Lake, damage: Damage, at: datetime) -> Path | None:
    """Move a damaged part to `.damaged/<time>/`, and the pointers of partitions that need it; return where it is now.

    The partitions then count as missing, so a run makes them again; publishing equal content restores the version.
    """
    moved = _move(lake, damage.path, at)
    for ref in damage.refs:
        for name in ("current", "blocked"):
            _move(lake, lake.root / ref.asset / f"{ref.set}={ref.key}" / name, at)
    return moved


def forget(lake: Lake, damage: Damage, at: datetime) -> None:
    """Move the manifests of versions that cannot be restored to `.damaged/<time>/`."""
    for path in damage.manifests:
        _move(lake, path, at)


def _move(lake: Lake, path: Path, at: datetime) -> Path | None:
    if not path.exists():
        return None
    target = lake.root / DAMAGED / at.strftime("%Y%m%dT%H%M%SZ") / path.relative_to(lake.root)
    target.parent.mkdir(parents=True, exist_ok=True)
    path.replace(target)
    return target


def _pointers(lake: Lake, ref: Ref, result: Audit) -> str | None:
    """Verify the partition's pointers; return the version that `current` names."""
    folder, version = lake.root / ref.asset / f"{ref.set}={ref.key}", None
    for name in ("current", "blocked"):
        path = folder / name
        if not path.exists():
            continue
        result.counts["pointer"] += 1
        try:
            pointer = json.loads(path.read_bytes())
            named = (folder / pointer["manifest"]).is_file() and isinstance(pointer["publication"], int)
            fault = "" if named else f"it names {pointer['manifest']}, which does not exist"
            version = pointer["version"] if name == "current" else version
        except (ValueError, KeyError, TypeError) as error:
            fault = f"it cannot be read: {error}"
        if fault:
            result.damages.append(Damage("pointer", path, fault, (ref,)))
    return version


def _manifests(lake: Lake, ref: Ref, since: datetime | None, result: Audit) -> Iterator[tuple[Path, Manifest]]:
    """Yield the readable manifests of a partition with their files, and record the damaged ones."""
    folder = lake.root / ref.asset / f"{ref.set}={ref.key}"
    for path in sorted(folder.glob("version=*/manifest-*.json")):
        try:
            text = json.loads(path.read_bytes())
            manifest = Manifest.from_json(text)
            if since and datetime.fromisoformat(manifest.created_at) < since:
                continue
            same = path.name == manifest_name(text) and manifest.ref == ref
            fault = "" if same else "its content does not have the hash in its name"
        except (ValueError, KeyError, TypeError, LakeError) as error:
            manifest, fault = None, f"it cannot be read: {error}"
        result.counts["manifest"] += 1
        if fault:
            needed = any(f'"{path.parent.name}/{path.name}"' in _text(folder / name) for name in ("current", "blocked"))
            result.damages.append(Damage("manifest", path, fault, (ref,) if needed else ()))
        elif manifest:
            yield path, manifest


def _file(path: Path, entry: Mapping[str, Any], deep: bool, result: Audit) -> str:
    """Return what is wrong with a file, or an empty string."""
    result.counts["file"] += 1
    if not path.exists():
        return "it is missing"
    if (size := path.stat().st_size) != entry["bytes"]:
        return f"it has {size} bytes, {entry['bytes']} were written"
    if deep:
        result.bytes += size
        if sha256_of(path) != entry["sha256"]:
            return "it does not have its recorded sha256"
    return ""


def _checkpoint(folder: Path, deep: bool, result: Audit) -> str:
    """Return what is wrong with a checkpoint, or an empty string."""
    result.counts["checkpoint"] += 1
    if not folder.is_dir():
        return "it is missing"
    if deep:
        result.bytes += sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if folder_hash(folder) != folder.name:
            return "its content does not have the hash in its name"
    return ""


def _trainings(lake: Lake, result: Audit) -> None:
    """Verify that the reports of stored trainings can be read."""
    for path in sorted((lake.root / "checkpoints" / "trained").glob("*.json")):
        result.counts["training"] += 1
        try:
            json.loads(path.read_bytes())["checkpoints"]
        except (ValueError, KeyError, TypeError) as error:
            result.damages.append(Damage("training", path, f"it cannot be read: {error}"))


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
