"""Remove partitions (`etpi rm`) and unneeded files (`etpi gc`) from a lake.

Carrying out a plan renames each part into a staging folder, manifests before the files that they name: a process that
is killed in between leaves a lake that verifies, and the next one that stages empties the folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from etpi_resources.backend import backend
from etpi_resources.lake.audit import DAMAGED
from etpi_resources.lake.contents import Version
from etpi_resources.lake.lake import Lake
from etpi_resources.lake.manifest import NAME, LakeError
from etpi_resources.lake.references import References, unknown_needs
from etpi_resources.process.locks import require_held

_SPILL_AGE = timedelta(days=1)
"""Files of `scratch/duckdb` that are younger may belong to a query that holds no lock."""
_SEEN_EVERYWHERE = timedelta(minutes=10)
"""On a cluster, nothing younger is garbage: a network file system may show a node the listing of a minute ago, with the
files of a version and without the pointer that names it."""
_BESIDE = {"experiment": ("reports/",), "rollout_set": ("scratch/rollouts/", "scratch/import/"), "suite": ()}
"""Folders that have a subfolder for each key, besides the folders of versions."""


@dataclass(frozen=True)
class Removal:
    """Something to remove: its path, why nothing needs it, and its name for people."""

    path: Path
    reason: str
    what: str

    @property
    def bytes(self) -> int:
        """The allocated blocks of the file, or of the folder with all that is in it."""
        return sum(inner.lstat().st_blocks * 512 for inner in [self.path, *self.path.rglob("*")])


def carry_out(lake: Lake, parts: Collection[Removal]) -> None:
    """Remove the parts of a plan that was made under `lake.exclusive_lock`; the catalog must be built again afterwards.

    Raises:
        LakeError: a part is on another filesystem than the lake; nothing was removed.
    """
    device = lake.root.stat().st_dev
    if other := next((part.path for part in parts if part.path.lstat().st_dev != device), None):
        raise LakeError(
            f"{other} is on another filesystem than {lake.root}, so it cannot be removed in one step. Nothing was "
            "changed. Put the whole folder of the lake on one filesystem, and set ETPI_DATA"
        )
    with lake.staging() as staging:
        for number, part in enumerate(parts):
            require_held()  # else a run may have started
            part.path.replace(staging / str(number))
            for folder in part.path.parents:
                if folder == lake.root or any(folder.iterdir()):
                    break
                folder.rmdir()


def plan_partitions(lake: Lake, keys: Iterable[tuple[str, str]]) -> list[Removal]:
    """Plan to remove every partition of some keys, with their reports and journals.

    Args:
        keys: (set, key) pairs: suites, rollout sets, experiments.

    Raises:
        LakeError: the lake has nothing of a key, a current version of another key needs one of them, or a manifest is
            damaged.
    """
    keys, references, parts = list(dict.fromkeys(keys)), References(lake), list[Removal]()
    for set, key in keys:
        known = sorted({ref.key for ref in references.pointed if ref.set == set})
        if key not in known:
            raise LakeError(f"the lake has nothing of {set} {key}; it has {', '.join(known) or f'no {set}'}")
        # Manifests and pointers before the files that they name.
        for pattern in (*_BESIDE[set], f"*/{set}=", f"*/*/{set}="):
            for path in sorted(lake.root.glob(f"{pattern}{key}")):
                if NAME.fullmatch(path.relative_to(lake.root).parts[0]):
                    parts.append(Removal(path, "partition", f"{set} {key}"))
    removed = {ref for ref in references.pointed if (ref.set, ref.key) in keys}
    kept = references.pointed.keys() - removed
    users = {version for version in references.needed_by(references.roots(kept)) if version.ref not in removed}
    needs = {(user, other) for user in users for other in references.needs(user, users) if other.ref in removed}
    if uses := sorted(f"{user} needs {other}" for user, other in needs):
        raise LakeError("\n".join(["nothing was removed: remove both, or keep both", *uses]))
    return parts


def plan_garbage(lake: Lake, older_than: timedelta, now: datetime | None = None) -> list[Removal]:
    """Plan to remove everything older that neither a current version nor the lineage of its checkpoints needs.

    Raises:
        LakeError: a manifest, a pointer or a report is damaged.
    """
    young_since = (now or datetime.now(UTC)) - (max(older_than, _SEEN_EVERYWHERE) if backend() else older_than)

    def young(path: Path) -> bool:
        return _modified(path) > young_since

    references = References(lake)
    roots = references.roots(references.pointed)
    roots |= {p.version for ps in references.publications.values() for p in ps if p.created_at > young_since}
    stays = references.needed_by(roots).keys()
    parts = [*_past_versions(lake, references, stays), *_files_of_no_version(lake, references, young)]
    return [*parts, *_trainings(lake, references, stays, young), *_scratch(lake, references, stays, young)]


def _past_versions(lake: Lake, references: References, stays: Collection[Version]) -> Iterator[Removal]:
    for version in sorted(references.publications.keys() - stays, key=str):
        manifests, *tables = references.folders_of(version)
        for path in [manifests, *(path for path in tables if path.is_dir())]:
            yield Removal(path, "past version", str(version))


def _files_of_no_version(lake: Lake, references: References, young: Callable[[Path], bool]) -> Iterator[Removal]:
    """Yield table folders that no manifest names, which an interrupted removal or publication left."""
    named = {path for version in references.publications for path in references.folders_of(version)}
    for path in sorted(lake.root.glob("*/*/*=*/version=*")):
        in_asset = NAME.fullmatch(path.relative_to(lake.root).parts[0])
        if in_asset and path not in named and not (backend() and young(path)):
            yield _named(lake, path, "files of no version")


def _trainings(
    lake: Lake, references: References, stays: Collection[Version], young: Callable[[Path], bool]
) -> Iterator[Removal]:
    """Yield stored trainings of which no checkpoint stays, with their rollouts, then the other checkpoints."""
    folder, stored = lake.root / "checkpoints", references.folders
    kept = references.checkpoints(stays) | {name for name in stored if young(lake.checkpoint_dir(name))}
    gone: set[str] = set()
    for path in sorted(folder.glob("trained/*.json")):
        try:
            names = {row["checkpoint_id"] for row in json.loads(path.read_bytes())["checkpoints"]}
        except (ValueError, KeyError, TypeError) as error:
            raise unknown_needs(path, str(error)) from error
        if names & kept or young(path):
            kept |= names
        else:
            gone.add(path.stem)
            yield _named(lake, path, "stored training")
    for path in sorted(folder.glob("rounds/*")):
        if path.name in gone or not ((folder / "trained" / f"{path.name}.json").exists() or young(path)):
            yield _named(lake, path, "stored training")
    for name in sorted(stored - kept):
        yield _named(lake, folder / name, "checkpoint")


def _scratch(
    lake: Lake, references: References, stays: Collection[Version], young: Callable[[Path], bool]
) -> Iterator[Removal]:
    """Yield old scratch, and etpi 0.2's descriptions of code. The journal of a version that stays is kept."""
    files, names = lake.root.glob, references.stored_names(stays)
    sets = {ref.key for ref in references.pointed if ref.set == "rollout_set"}
    journals = [*files("scratch/rollouts/*/*"), *files("scratch/evaluations/*")]
    paths = {*journals, *files("scratch/*/*"), *files("code/*.json"), *files(f"{DAMAGED}/*")}
    paths -= {*files("scratch/rollouts/*")}
    paths -= {path for path in journals if path.name in names and path.parent.name in {*sets, "evaluations"}}
    paths -= {path for path in files("scratch/duckdb/*") if datetime.now(UTC) - _modified(path) < _SPILL_AGE}
    for path in sorted(paths):
        if not young(path):
            yield _named(lake, path, path.relative_to(lake.root).parts[0])


def _named(lake: Lake, path: Path, reason: str) -> Removal:
    return Removal(path, reason, path.relative_to(lake.root).as_posix())


def _modified(path: Path) -> datetime:
    """Return the last change of a file, or of anything in a folder."""
    times = [inner.lstat().st_mtime for inner in [path, *path.rglob("*")]]
    return datetime.fromtimestamp(max(times), UTC)
