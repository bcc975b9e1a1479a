"""Disk use of a lake: every file and folder is counted once, in allocated blocks, as `du` counts."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from etpi_resources.lake.lake import Lake
from etpi_resources.lake.manifest import LakeError, Ref
from etpi_resources.lake.references import TRAINED_ROLES, References, Version

State = Literal["current", "past", "unnamed"]
"""current: a pointer names the version. past: only its manifest does. unnamed: files that no manifest names."""
_BLOCK = 512
_NAMES = {
    "scratch/rollouts": "journals of collected rollouts",
    "scratch/evaluations": "journals of evaluation rollouts",
    "scratch/parts": "finished parts of versions under way",
    "scratch/train": "trainings under way",
    "scratch/reinforce": "trainings under way",
    "scratch/base": "trainings under way",
    "scratch/servers": "logs of servers",
    "scratch/import": "imported files, unpacked",
    "checkpoints/trained": "reports of stored trainings",
    "checkpoints/rounds": "rollouts of reinforcement learning",
    "reports": "written reports",
    "rehearsals": "rehearsals",
    "downloads": "recorded downloads of graders",
    "code": "definitions of code versions",
    "locks": "locks",
    ".staging": "versions being written",
    ".damaged": "set aside by etpi repair",
    ".removed": "left by an interrupted etpi rm or gc",
}
"""Parts of a lake other than versions and checkpoints."""


@dataclass(frozen=True)
class CheckpointUse:
    """A stored checkpoint: bytes, and the partitions whose versions name it ("sft of NAME", "base of NAME", ...)."""

    checkpoint: str
    bytes: int
    users: tuple[str, ...]


@dataclass
class Usage:
    """Bytes of a lake.

    Attributes:
        versions: of each partition, by the state of its versions.
        checkpoints: each stored checkpoint once.
        other: of all else, by the folder.
        folders: of the folders above them.
    """

    versions: dict[Ref, Counter[State]] = field(default_factory=lambda: defaultdict(Counter))
    checkpoints: list[CheckpointUse] = field(default_factory=list)
    other: Counter[str] = field(default_factory=Counter)
    folders: int = 0

    @property
    def total(self) -> int:
        """All bytes: the figure of `du -s -B1` for the lake's folder."""
        versions = sum(sum(states.values()) for states in self.versions.values())
        return versions + sum(c.bytes for c in self.checkpoints) + sum(self.other.values()) + self.folders

    def by_asset(self, refs: Collection[Ref] | None = None) -> dict[str, Counter[State]]:
        """Return the bytes of versions by asset, of all partitions or of `refs`."""
        sums: dict[str, Counter[State]] = defaultdict(Counter)
        for ref, states in self.versions.items():
            if refs is None or ref in refs:
                sums[ref.asset].update(states)
        return dict(sums)

    def by_key(self) -> dict[tuple[str, str], Counter[State]]:
        """Return the bytes of versions by (set, key)."""
        sums: dict[tuple[str, str], Counter[State]] = defaultdict(Counter)
        for ref, states in self.versions.items():
            sums[ref.set, ref.key].update(states)
        return dict(sums)


def usage(lake: Lake, references: References | None = None) -> Usage:
    """Count every file of a lake.

    Raises:
        LakeError: a manifest or a pointer is damaged.
    """
    references = references or References(lake)
    current = references.roots()
    known = set(references.publications)
    result, checkpoints = Usage(), Counter[str]()
    for parts, size in _walk(lake.root):
        ref, name = _version_of(parts)
        if ref is not None:
            version = Version(ref, name)
            # Pointers and folders of a partition count with its current version.
            state: State = "current" if not name or version in current else "past" if version in known else "unnamed"
            result.versions[ref][state] += size
        elif parts[:1] == ("checkpoints",) and len(parts) > 1 and parts[1] in references.folders:
            checkpoints[parts[1]] += size
        elif (place := _place(parts)) is not None:
            result.other[place] += size
        else:
            result.folders += size
    users = _users(references)
    result.checkpoints = [CheckpointUse(name, size, users.get(name, ())) for name, size in checkpoints.most_common()]
    return result


def meaning(place: str) -> str:
    """Return what a folder of `Usage.other` has in words; empty where its name says it."""
    return _NAMES.get(place, "")


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of a folder with all that is in it, in allocated blocks."""
    return sum(size for _, size in _walk(path)) if path.is_dir() and not path.is_symlink() else _blocks(path.lstat())


def _walk(root: Path) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield every file and folder below a folder and itself, as (parts of the relative path, bytes), once each.

    What disappears meanwhile is left out.
    """
    seen: set[tuple[int, int]] = set()
    waiting: list[tuple[str, ...]] = [()]
    while waiting:
        parts = waiting.pop()
        folder = root.joinpath(*parts)
        try:
            yield parts, _blocks(folder.lstat())
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append((*parts, entry.name))
                        continue
                    status = entry.stat(follow_symlinks=False)
                    if status.st_nlink > 1:
                        if (status.st_dev, status.st_ino) in seen:
                            continue
                        seen.add((status.st_dev, status.st_ino))
                    yield (*parts, entry.name), _blocks(status)
        except FileNotFoundError:
            continue


def _blocks(status: os.stat_result) -> int:
    return status.st_blocks * _BLOCK


def _version_of(parts: tuple[str, ...]) -> tuple[Ref | None, str]:
    """Return the partition that a path belongs to, and the version; ("", if it belongs to the partition)."""
    if len(parts) < 2 or parts[0].startswith("."):
        return None, ""
    partition = next((i for i in (1, 2) if len(parts) > i and "=" in parts[i]), None)
    if partition is None:
        return None, ""
    try:
        ref = Ref(parts[0], *parts[partition].split("=", 1))
    except LakeError:
        return None, ""
    inside = parts[partition + 1 :]
    return ref, inside[0].removeprefix("version=") if inside and inside[0].startswith("version=") else ""


def _place(parts: tuple[str, ...]) -> str | None:
    """Return the folder that a path counts with, in `Usage.other`; None for a folder above partitions."""
    if not parts:
        return None
    if parts[0] in ("scratch", "checkpoints"):
        return "/".join(parts[:2]) if len(parts) > 1 else None
    first = parts[0]
    return first if first in _NAMES or first.startswith(".") or "." in first or len(parts) > 2 else None


def _users(references: References) -> Mapping[str, tuple[str, ...]]:
    """Return who uses each checkpoint, one entry for each key; "(past)" if only its earlier versions do."""
    current = references.roots()
    users: dict[str, dict[str, str]] = defaultdict(dict)
    for checkpoint, versions in references.checkpoints(references.publications).items():
        entries = sorted((v not in current, *_use(references, v, checkpoint), v.ref.key) for v in versions)
        for past, _, use, key in entries:
            users[checkpoint].setdefault(key, f"{use} of {key}" + " (past)" * past)
    return {checkpoint: tuple(names.values()) for checkpoint, names in users.items()}


def _use(references: References, version: Version, checkpoint: str) -> tuple[int, str]:
    """Return what a version uses a checkpoint as, with its rank: what it trained, its base, or a model it names."""
    rows = [row for row in references.checkpoint_rows(version) if row["checkpoint_id"] == checkpoint]
    if trained := [row["role"] for row in rows if row["role"] in TRAINED_ROLES]:
        return 0, trained[0]
    return (1, "base") if rows else (2, "model")


def refs_of(references: References, keys: Iterable[str]) -> set[Ref]:
    """Return every partition with one of the keys.

    Raises:
        LakeError: the lake has no partition with a key; the message lists the keys.
    """
    known = defaultdict[str, set[Ref]](set)
    for ref in references.pointed:
        known[ref.key].add(ref)
    refs: set[Ref] = set()
    for key in keys:
        if key not in known:
            raise LakeError(f"the lake has nothing of {key!r}; it has {', '.join(sorted(known)) or 'no partitions'}")
        refs |= known[key]
    return refs
