"""References of each version of a lake: the versions it was computed from, and the checkpoints that it names.

`removal` removes what nothing kept needs, `usage` counts by it, `backup` copies it.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from etpi_resources.lake import parquet
from etpi_resources.lake.lake import Lake
from etpi_resources.lake.manifest import LakeError, Manifest, NewerFormat, Ref

DATASET = "upweighted_dataset"
"""The asset whose versions the view `lineage` finds by `checkpoints.dataset_version`."""
TRAINED_ROLES = ("sft", "rl")
_HASH = re.compile(r"\b[0-9a-f]{16}\b")


@dataclass(frozen=True)
class Version:
    """One version of a partition."""

    ref: Ref
    name: str

    def __str__(self) -> str:
        return f"{self.ref} version {self.name}"


@dataclass(frozen=True)
class Publication:
    """A manifest and its file."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True)
class StoredTraining:
    """A report in `checkpoints/trained`: its file, its checkpoints' ids, and the folder of its rollouts, if any."""

    path: Path
    checkpoints: frozenset[str]
    rounds: Path | None


class References:
    """Every version of a lake, read once, and what it needs.

    Attributes:
        publications: the manifests of every version.
        pointed: of each partition, the publications that `current` and `blocked` name.
    """

    def __init__(self, lake: Lake) -> None:
        """Read every manifest and pointer.

        Raises:
            LakeError: one of them is damaged, so it is unknown what is needed.
        """
        self.lake = lake
        self.publications: dict[Version, list[Publication]] = defaultdict(list)
        self.pointed: dict[Ref, list[Publication]] = {}
        self._by_name: dict[tuple[str, str], list[Version]] = defaultdict(list)
        pointers = {ref: list(_pointers(lake, ref)) for ref in lake.refs()}
        # Pointers first: every version that they name, and its inputs, is then among the manifests.
        for ref, named in pointers.items():
            by_path = {publication.path: publication for publication in _publications(lake, ref)}
            for publication in by_path.values():
                self.publications[Version(ref, publication.manifest.version)].append(publication)
            if missing := [path for path in named if path not in by_path]:
                raise _damaged(missing[0], "a pointer names it, and it does not exist")
            self.pointed[ref] = [by_path[path] for path in named]
        for version in self.publications:
            self._by_name[f"{version.ref.asset}/{version.ref.key}", version.name].append(version)

    def roots(self, refs: Collection[Ref] | None = None) -> set[Version]:
        """Return the versions that `current` or `blocked` names, of all partitions or of `refs`."""
        return {
            Version(ref, publication.manifest.version)
            for ref, publications in self.pointed.items()
            if refs is None or ref in refs
            for publication in publications
        }

    def needed_by(
        self, roots: Iterable[Version], pointed: Collection[Ref], kept: Collection[Version] = ()
    ) -> dict[Version, Version | None]:
        """Return the roots and every version that they need, each with the version that needs it (None for a root).

        A version needs the inputs of its manifests, the data set versions that its checkpoints were trained on, and
        the versions that trained a checkpoint which it starts from or names in its spec. Tables across experiments are
        rebuilt with every run, so they need nothing.

        Args:
            pointed: partitions of which only the publications that a pointer names count, not earlier ones of the
                same version with other inputs.
            kept: versions that stay anyway: where one of them trained a checkpoint, no other is needed for it.
        """
        needs: dict[Version, Version | None] = dict.fromkeys(roots)
        kept = set(kept)
        waiting = list(needs)
        while waiting:
            version = waiting.pop()
            for other in self._needs(version, pointed, needs, kept):
                if other not in needs:
                    needs[other] = version
                    waiting.append(other)
        return needs

    def _needs(
        self, version: Version, pointed: Collection[Ref], known: Collection[Version], kept: Collection[Version]
    ) -> Iterator[Version]:
        if version.ref.set == "all":
            return
        publications = self.publications[version]
        if version.ref in pointed:
            publications = [p for p in self.pointed[version.ref] if p in publications] or publications
        for publication in publications:
            for name, data_version in publication.manifest.inputs.items():
                yield from self._by_name.get((name, data_version), ())
        for row in self.checkpoint_rows(version):
            if row["dataset_version"]:
                yield from self._dataset(row["dataset_version"], version.ref.key)
        for checkpoint in self.starts_from(version):
            trained = self._trained_by.get(checkpoint, ())
            # One that is kept anyway is enough.
            if version not in trained and not any(other in known or other in kept for other in trained):
                yield from trained

    def _dataset(self, name: str, key: str) -> list[Version]:
        """Return the data set's version: of the partition itself, or if it has none, of every partition."""
        of_key = self._by_name.get((f"{DATASET}/{key}", name))
        return of_key or [v for v in self.publications if v.ref.asset == DATASET and v.name == name]

    # --- checkpoints -------------------------------------------------------------------------------------------------

    @cached_property
    def folders(self) -> frozenset[str]:
        """The ids of the checkpoints that the lake stores."""
        paths = (self.lake.root / "checkpoints").glob("*")
        return frozenset(path.name for path in paths if _HASH.fullmatch(path.name) and path.is_dir())

    @cached_property
    def _rows(self) -> dict[Version, list[dict[str, Any]]]:
        return {version: _checkpoint_rows(self.lake, ps[0].manifest) for version, ps in self.publications.items()}

    def checkpoint_rows(self, version: Version) -> list[dict[str, Any]]:
        """Return the rows of a version's table `checkpoints`: ids, role, parent and data set version."""
        return self._rows[version]

    @cached_property
    def _trained_by(self) -> dict[str, list[Version]]:
        """The versions that trained each checkpoint; a base counts as trained by none."""
        trained: dict[str, list[Version]] = defaultdict(list)
        for version in self.publications:
            for row in self.checkpoint_rows(version):
                if row["role"] in TRAINED_ROLES:
                    trained[row["checkpoint_id"]].append(version)
        return trained

    def starts_from(self, version: Version) -> set[str]:
        """Return the ids of checkpoints that a version did not train itself: bases, parents, models in its spec."""
        rows = self.checkpoint_rows(version)
        trained = {row["checkpoint_id"] for row in rows if row["role"] in TRAINED_ROLES}
        named = {row["checkpoint_id"] for row in rows} | {row["parent_id"] for row in rows if row["parent_id"]}
        for publication in self.publications[version]:
            named |= set(_HASH.findall(json.dumps(dict(publication.manifest.spec)))) & self.folders
        return named - trained

    def checkpoints(self, versions: Iterable[Version]) -> dict[str, list[Version]]:
        """Return the stored checkpoints that the versions name, each with those versions."""
        users: dict[str, list[Version]] = defaultdict(list)
        for version in versions:
            rows = {row["checkpoint_id"] for row in self.checkpoint_rows(version)}
            for checkpoint in sorted((rows | self.starts_from(version)) & self.folders):
                users[checkpoint].append(version)
        return users

    @cached_property
    def trainings(self) -> list[StoredTraining]:
        """The stored trainings; one whose report is damaged raises LakeError."""
        return [_training(self.lake, path) for path in sorted((self.lake.root / "checkpoints/trained").glob("*.json"))]

    # --- files -------------------------------------------------------------------------------------------------------

    def files(self, version: Version) -> dict[Path, Mapping[str, Any]]:
        """Return the table files of a version, each with its entry in the manifest."""
        return {
            self.lake.root / entry["path"]: entry
            for publication in self.publications[version]
            for table in publication.manifest.tables.values()
            for entry in table["files"]
        }

    def created_at(self, version: Version) -> datetime:
        """Return when a version was last published under a new manifest."""
        return max(datetime.fromisoformat(p.manifest.created_at) for p in self.publications[version])

    def codes(self, versions: Iterable[Version]) -> set[str]:
        """Return every code version that the manifests of the versions name."""
        named: set[str] = set()
        for version in versions:
            for publication in self.publications[version]:
                code, accepted = publication.manifest.code, publication.manifest.accepted
                named |= {code[name] for name in ("version", "kept", "kept_root") if name in code}
                named |= {str(entry[name]) for entry in accepted for name in ("from", "to") if name in entry}
        return named


def modified(path: Path) -> datetime:
    """Return the last change of a file, or of anything in a folder."""
    times = [path.lstat().st_mtime, *(inner.lstat().st_mtime for inner in path.rglob("*"))]
    return datetime.fromtimestamp(max(times), UTC)


def _pointers(lake: Lake, ref: Ref) -> Iterator[Path]:
    """Yield the files of the manifests that the pointers of a partition name."""
    folder = lake.root / ref.asset / f"{ref.set}={ref.key}"
    for name in ("current", "blocked"):
        try:
            yield folder / json.loads((folder / name).read_bytes())["manifest"]
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged(folder / name, str(error)) from error


def _publications(lake: Lake, ref: Ref) -> Iterator[Publication]:
    for path in sorted((lake.root / ref.asset / f"{ref.set}={ref.key}").glob("version=*/manifest-*.json")):
        try:
            yield Publication(path, Manifest.from_json(json.loads(path.read_bytes())))
        except NewerFormat:
            raise
        except (ValueError, KeyError, TypeError, LakeError) as error:
            raise _damaged(path, str(error)) from error


def _checkpoint_rows(lake: Lake, manifest: Manifest) -> list[dict[str, Any]]:
    if "checkpoints" not in manifest.tables:
        return []
    columns = ["checkpoint_id", "role", "parent_id", "dataset_version"]
    return parquet.read("checkpoints", lake.files_of(manifest, "checkpoints"), columns).to_pylist()


def _training(lake: Lake, path: Path) -> StoredTraining:
    try:
        report = json.loads(path.read_bytes())
        checkpoints = frozenset(row["checkpoint_id"] for row in report["checkpoints"])
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, str(error)) from error
    return StoredTraining(path, checkpoints, lake.root / report["rounds"] if "rounds" in report else None)


def _damaged(path: Path, fault: str) -> LakeError:
    return LakeError(f"{path}: {fault}. It is unknown what it needs, so nothing was changed. Run `etpi repair` first.")
