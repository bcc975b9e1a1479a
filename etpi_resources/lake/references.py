"""Say what each version of a lake needs: the versions it was computed from, and the checkpoints that it names."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from etpi_resources.lake import parquet
from etpi_resources.lake.contents import Contents, Publication, Version
from etpi_resources.lake.lake import Lake
from etpi_resources.lake.manifest import LakeError, Ref

_DATASET = "upweighted_dataset"
"""The asset whose versions the view `lineage` finds by `checkpoints.dataset_version`."""
_TRAINED_ROLES = ("sft", "rl")
_HASH = re.compile(r"\b[0-9a-f]{16}\b")


class References:
    """Every version of a lake and the versions and files that it needs.

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
        contents = Contents.of(lake)
        if contents.damages:
            raise unknown_needs(contents.damages[0].path, contents.damages[0].fault)
        self.publications: dict[Version, list[Publication]] = defaultdict(list)
        self._by_name: dict[tuple[str, str], list[Version]] = defaultdict(list)
        for publication in contents.publications:
            self.publications[publication.version].append(publication)
        for version in self.publications:
            self._by_name[f"{version.ref.asset}/{version.ref.key}", version.name].append(version)
        by_path = {publication.path: publication for publication in contents.publications}
        self.pointed: dict[Ref, list[Publication]] = {
            ref: [by_path[path] for path in named] for ref, named in contents.pointers.items()
        }

    def roots(self, refs: Collection[Ref]) -> set[Version]:
        """Return the versions of some partitions that `current` or `blocked` names."""
        return {publication.version for ref in refs for publication in self.pointed[ref]}

    def needed_by(self, roots: Iterable[Version]) -> dict[Version, Version | None]:
        """Return the roots and every version that they need, each with the version that needs it (None for a root).

        A version needs the inputs of its manifests (of those that a pointer names, if one does), the data set versions
        that its checkpoints were trained on, and the versions that trained a checkpoint which it starts from or names
        in its spec. Tables across experiments are rebuilt with every run, so they need nothing.
        """
        needs: dict[Version, Version | None] = dict.fromkeys(roots)
        waiting = list(needs)
        while waiting:
            version = waiting.pop()
            for other in self.needs(version, needs):
                if other not in needs:
                    needs[other] = version
                    waiting.append(other)
        return needs

    def needs(self, version: Version, known: Collection[Version]) -> Iterator[Version]:
        """Yield the versions that a version itself needs; of those that trained a checkpoint, none if one is known."""
        if version.ref.set == "all":
            return
        publications = self.publications[version]
        for publication in [p for p in self.pointed[version.ref] if p in publications] or publications:
            for name, data_version in publication.manifest.inputs.items():
                yield from self._by_name.get((name, data_version), ())
        for row in self._rows[version]:
            if row["dataset_version"]:
                yield from self._dataset(row["dataset_version"], version.ref.key)
        for checkpoint in self._starts_from(version):
            trained = self._trained_by.get(checkpoint, ())
            # One version that trained it is enough.
            if version not in trained and not any(other in known for other in trained):
                yield from trained

    def _dataset(self, name: str, key: str) -> list[Version]:
        """Return the data set's version: of the partition itself, or if it has none, of every partition."""
        of_key = self._by_name.get((f"{_DATASET}/{key}", name))
        return of_key or [v for v in self.publications if v.ref.asset == _DATASET and v.name == name]

    @cached_property
    def folders(self) -> frozenset[str]:
        """The ids of the checkpoints that the lake stores."""
        paths = (self.lake.root / "checkpoints").glob("*")
        return frozenset(path.name for path in paths if _HASH.fullmatch(path.name) and path.is_dir())

    @cached_property
    def _rows(self) -> dict[Version, list[dict[str, Any]]]:
        """The rows of each version's table `checkpoints`."""
        columns = ["checkpoint_id", "role", "parent_id", "dataset_version"]
        rows: dict[Version, list[dict[str, Any]]] = defaultdict(list)
        for version, (publication, *_) in self.publications.items():
            if "checkpoints" in publication.manifest.tables:
                files = self.lake.files_of(publication.manifest, "checkpoints")
                rows[version] = parquet.read("checkpoints", files, columns).to_pylist()
        return rows

    @cached_property
    def _trained_by(self) -> dict[str, list[Version]]:
        """The versions that trained each checkpoint; a base counts as trained by none."""
        trained: dict[str, list[Version]] = defaultdict(list)
        for version, rows in self._rows.items():
            for row in rows:
                if row["role"] in _TRAINED_ROLES:
                    trained[row["checkpoint_id"]].append(version)
        return trained

    def _starts_from(self, version: Version) -> set[str]:
        """Return the ids of checkpoints that a version did not train itself: bases, parents, models in its spec."""
        rows = self._rows[version]
        trained = {row["checkpoint_id"] for row in rows if row["role"] in _TRAINED_ROLES}
        named = {row["checkpoint_id"] for row in rows} | {row["parent_id"] for row in rows if row["parent_id"]}
        for publication in self.publications[version]:
            named |= set(_HASH.findall(json.dumps(dict(publication.manifest.spec)))) & self.folders
        return named - trained

    def checkpoints(self, versions: Iterable[Version]) -> set[str]:
        """Return the ids of the checkpoints that the versions name."""
        named: set[str] = set()
        for version in versions:
            named |= {row["checkpoint_id"] for row in self._rows[version]} | self._starts_from(version)
        return named

    def folders_of(self, version: Version) -> list[Path]:
        """Return the folder of a version's manifests, then those of its tables."""
        publications = self.publications[version]
        tables = [table for publication in publications for table in publication.manifest.tables.values()]
        files = {(self.lake.root / entry["path"]).parent for table in tables for entry in table["files"]}
        return [publications[0].path.parent, *sorted(files)]

    def stored_names(self, versions: Iterable[Version]) -> set[str]:
        """Return the names of stored journals that the manifests of the versions name."""
        named: set[str] = set()
        for version in versions:
            for publication in self.publications[version]:
                code = publication.manifest.code
                named |= {code[name] for name in ("kept", "kept_root") if name in code}
        return named


def unknown_needs(path: Path, fault: str) -> LakeError:
    """Return the error for a damaged file without which it is unknown what may be removed."""
    remedy = "Restore it from a backup, or set it aside: `etpi verify --set-aside`"
    return LakeError(f"{path}: {fault}. It is unknown what it needs, so nothing was changed. {remedy}")
