"""Read every pointer and manifest of a lake once, and name those that are damaged."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from etpi_resources.inside import PathOutside, read_file
from etpi_resources.lake.lake import Lake, manifest_name
from etpi_resources.lake.manifest import LakeError, Manifest, Ref

POINTERS = ("current", "blocked")


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

    @property
    def version(self) -> Version:
        return Version(self.manifest.ref, self.manifest.version)

    @property
    def created_at(self) -> datetime:
        return datetime.fromisoformat(self.manifest.created_at)


@dataclass
class Damage:
    """A damaged or missing part of the lake.

    Attributes:
        kind: pointer, manifest, version, file, checkpoint or training.
        path: the file, or a checkpoint's folder.
        fault: what is wrong with it.
        refs: the partitions with a pointer to a version that needs it; empty if only earlier versions do.
        manifests: the manifests of every version that needs it.
    """

    kind: str
    path: Path
    fault: str
    refs: list[Ref] = field(default_factory=list)
    manifests: list[Path] = field(default_factory=list)


@dataclass
class Contents:
    """Every pointer and manifest of a lake.

    Attributes:
        pointers: of each partition, the manifests' files that `current` and `blocked` name.
        publications: every sound manifest.
        counts: pointers and manifests, damaged ones too.
    """

    pointers: dict[Ref, list[Path]] = field(default_factory=dict)
    publications: list[Publication] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, lake: Lake) -> Contents:
        """Read the pointers, then the manifests: what a pointer names was published before it, with its inputs."""
        contents, refs = cls(), lake.refs()
        for ref in refs:
            folder = lake.partition_folder(ref)
            files = [folder / name for name in POINTERS if (folder / name).exists()]
            contents.counts["pointer"] += len(files)
            contents.pointers[ref] = [target for path in files if (target := contents._target(ref, path))]
        for ref in refs:
            for path in sorted(lake.partition_folder(ref).glob("version=*/manifest-*.json")):
                contents.counts["manifest"] += 1
                contents._read_manifest(ref, path)
        return contents

    def is_pointed(self, publication: Publication) -> bool:
        """Return whether a pointer names the publication's version, by this manifest or by another one of it."""
        return any(path.parent == publication.path.parent for path in self.pointers[publication.manifest.ref])

    def _target(self, ref: Ref, pointer: Path) -> Path | None:
        """Return the file of the manifest that a pointer names; None, with a damage, if it names none."""
        try:
            content = json.loads(read_file(pointer))
            target, _ = pointer.parent / content["manifest"], content["publication"]
        except (PathOutside, ValueError, KeyError, TypeError) as error:
            fault = f"it cannot be read: {error}"
        else:
            if target.is_file():
                return target
            fault = f"it names {content['manifest']}, which does not exist"
        self.damages.append(Damage("pointer", pointer, fault, [ref]))
        return None

    def _read_manifest(self, ref: Ref, path: Path) -> None:
        try:
            text: Mapping[str, Any] = json.loads(read_file(path))
            manifest = Manifest.from_json(text)
        except (PathOutside, ValueError, KeyError, TypeError, LakeError) as error:
            fault = f"it cannot be read: {error}"
        else:
            if path.name == manifest_name(text) and manifest.ref == ref:
                self.publications.append(Publication(path, manifest))
                return
            fault = "its content does not have the hash in its name"
        refs = [ref] if path in self.pointers[ref] else []
        self.damages.append(Damage("manifest", path, fault, refs, [path]))
