"""Verify a lake's pointers, manifests, files and checkpoints; set damaged parts aside."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from etpi_resources.lake.contents import POINTERS, Contents, Damage, Publication
from etpi_resources.lake.exchange.remote import Remote
from etpi_resources.lake.lake import Lake, folder_hash, sha256_of
from etpi_resources.lake.parquet import read

DAMAGED = ".damaged"
"""The folder of the lake that damaged parts are moved to."""


@dataclass
class Audit:
    """The result of `audit`: the number of verified parts by kind, and the damaged parts."""

    counts: Counter[str]
    damages: list[Damage]


def audit(lake: Lake, *, deep: bool = False, since: datetime | None = None) -> Audit:
    """Verify every pointer, manifest and file of a lake, and every checkpoint.

    Args:
        deep: also read every file and compare its sha256; otherwise existence and size.
        since: files and checkpoints only of publications from that time on.
    """
    contents = Contents.of(lake)
    parts: dict[Path, Damage] = {}
    for publication in contents.publications:
        if since is not None and publication.created_at < since:
            continue
        for part in _parts(lake, publication, deep, parts):
            part.manifests.append(publication.path)
            if contents.is_pointed(publication) and publication.manifest.ref not in part.refs:
                part.refs.append(publication.manifest.ref)
    damages = [*contents.damages, *_missing_inputs(lake, contents)]
    for path in sorted((lake.root / "checkpoints" / "trained").glob("*.json")):
        parts[path] = Damage("training", path, _training_fault(path))
    counts = contents.counts + Counter(part.kind for part in parts.values())
    left = {lake.checkpoint_dir(name) for name in Remote.of(lake).left}
    absent = [path for path, part in parts.items() if path in left and not path.exists()]
    counts += Counter({"remote checkpoint": len(absent), "checkpoint": -len(absent)})
    return Audit(counts, [*damages, *(part for path, part in parts.items() if part.fault and path not in absent)])


def _missing_inputs(lake: Lake, contents: Contents) -> list[Damage]:
    """Return the inputs of current versions that the lake no longer has: folders that were deleted."""
    known = {(p.manifest.ref.asset, p.manifest.ref.key, p.manifest.version) for p in contents.publications}
    missing: dict[tuple[str, ...], Damage] = {}
    for publication in contents.publications:
        manifest = publication.manifest
        current = publication.path in contents.pointers[manifest.ref] and not manifest.failures
        if manifest.ref.set == "all" or not current:
            continue  # inputs of blocked versions may be gone
        for name, version in manifest.inputs.items():
            asset, _, key = name.partition("/")
            if asset != "path" and (asset, key, version) not in known:
                path = lake.root / asset
                fault = f"version {version} of {key} is missing"
                part = missing.setdefault((asset, key, version), Damage("version", path, fault))
                part.refs.append(manifest.ref)
                part.manifests.append(publication.path)
    return list(missing.values())


def _parts(lake: Lake, publication: Publication, deep: bool, known: dict[Path, Damage]) -> list[Damage]:
    """Return the files and checkpoints of a version, each with its fault; a known part is not read again."""
    parts: list[Damage] = []
    for name, table in publication.manifest.tables.items():
        files: list[Damage] = []
        for entry in table["files"]:
            path = lake.root / entry["path"]
            if path not in known:
                known[path] = Damage("file", path, _file_fault(path, entry, deep))
            files.append(known[path])
        parts += files
        sound = [file.path for file in files if not file.fault]
        for row in read(name, sound, ["checkpoint_id", "path"]).to_pylist() if name == "checkpoints" else ():
            folder = lake.checkpoint_dir(row["checkpoint_id"])
            if row["path"] == f"checkpoints/{folder.name}":  # otherwise a base outside the lake
                if folder not in known:
                    known[folder] = Damage("checkpoint", folder, _checkpoint_fault(folder, deep))
                parts.append(known[folder])
    return parts


def set_aside(lake: Lake, damages: Iterable[Damage]) -> Path:
    """Move damaged parts, and the pointers and manifests that need them, to a folder of `.damaged`; return the folder.

    The partitions then have no current version, so a run computes them again. Versions whose inputs are gone (kind
    "version") are sound and stay: they are current again once the input is computed. Call under `lake.exclusive_lock`.
    """
    target = lake.root / DAMAGED / datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ")
    for damage in (damage for damage in damages if damage.kind != "version"):
        pointers = [lake.partition_folder(ref) / name for ref in damage.refs for name in POINTERS]
        # Pointers first: a process killed in between leaves no pointer to a manifest that is gone.
        for path in [*pointers, *damage.manifests, damage.path]:
            if path.exists():
                moved = target / path.relative_to(lake.root)
                moved.parent.mkdir(parents=True, exist_ok=True)
                path.replace(moved)
    return target


def _file_fault(path: Path, entry: Mapping[str, Any], deep: bool) -> str:
    """Return what is wrong with a table file, or an empty string."""
    if not path.exists():
        return "it is missing"
    if (size := path.stat().st_size) != entry["bytes"]:
        return f"it has {size} bytes, {entry['bytes']} were written"
    if deep and sha256_of(path) != entry["sha256"]:
        return "it does not have its recorded sha256"
    return ""


def _checkpoint_fault(folder: Path, deep: bool) -> str:
    """Return what is wrong with a checkpoint, or an empty string."""
    if not folder.is_dir():
        return "it is missing"
    if deep and folder_hash(folder) != folder.name:
        return "its content does not have the hash in its name"
    return ""


def _training_fault(path: Path) -> str:
    """Return what is wrong with the report of a stored training, or an empty string."""
    try:
        json.loads(path.read_bytes())["checkpoints"]
    except (ValueError, KeyError, TypeError) as error:
        return f"it cannot be read: {error}"
    return ""
