"""Remove partitions (`etpi rm`), and what nothing needs any more (`etpi gc`), from a lake.

A plan lists everything first. Carrying it out renames each part into `.removed/<time>/`, manifests before the files
that they name, and then deletes that folder: a process killed in between leaves a lake that verifies, and the next
removal deletes the rest.
"""

from __future__ import annotations

import difflib
import glob
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from etpi_resources.backend import backend
from etpi_resources.lake.audit import DAMAGED
from etpi_resources.lake.lake import Lake
from etpi_resources.lake.manifest import NAME, LakeError, Ref
from etpi_resources.lake.references import References, StoredTraining, Version, modified
from etpi_resources.lake.usage import size_of
from etpi_resources.process.locks import lake_locks, require_held

REMOVED = ".removed"
"""The folder of the lake whose content is being deleted."""
SPILL_AGE = timedelta(days=1)
"""Files of `scratch/duckdb` that are younger may belong to a query that holds no lock."""

SEEN_EVERYWHERE = timedelta(minutes=10)
"""On a cluster, nothing younger is garbage: a network file system may show a node the listing of a minute ago, with the
files of a version and without the pointer that names it."""

Reason = Literal[
    "partition", "report", "past version", "files of no version", "stored training", "checkpoint", "journal", "scratch",
    "code of no version", "damaged part", "left-over",
]  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Something to remove.

    Attributes:
        path: a file or a folder of the lake.
        reason: why nothing needs it, or what it is.
        what: its name for people.
        bytes: allocated on disk.
    """

    path: Path
    reason: Reason
    what: str
    bytes: int


@dataclass
class Plan:
    """Effects of a planned removal.

    Attributes:
        parts: what goes, in the order in which it goes.
        refused: why it may not be done; empty if it may.
        kept: bytes that nothing needs but that stay, by reason: they are too young, or among the last versions.
    """

    parts: list[Part] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    kept: Counter[str] = field(default_factory=Counter)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def by_reason(self) -> dict[Reason, tuple[int, int]]:
        """Return {reason: (number of parts, bytes)}, in order."""
        reasons: dict[Reason, tuple[int, int]] = {}
        for part in self.parts:
            count, size = reasons.get(part.reason, (0, 0))
            reasons[part.reason] = (count + 1, size + part.bytes)
        return reasons


def carry_out(lake: Lake, plan: Plan) -> None:
    """Remove the parts of a plan that was made under `lake.alone`; the catalog must be built again afterwards.

    Raises:
        LakeError: the plan is refused, or a part is on another filesystem than the lake; nothing was removed.
    """
    if plan.refused:
        raise LakeError("\n".join(plan.refused))
    _refuse_other_filesystems(lake, plan)
    area = lake.root / REMOVED
    folder = area / datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ")
    for part in plan.parts:
        if part.path.is_relative_to(area):
            continue  # deleted with the area
        target = folder / part.path.relative_to(lake.root)
        target.parent.mkdir(parents=True, exist_ok=True)
        require_held()  # else a run may have started
        part.path.replace(target)
        _remove_empty(part.path.parent, lake.root)
    shutil.rmtree(area, ignore_errors=True)


def _refuse_other_filesystems(lake: Lake, plan: Plan) -> None:
    """Raise LakeError if a part cannot be renamed into the lake's `.removed`: it is behind a link to another disk."""
    device = lake.root.stat().st_dev
    if other := next((part.path for part in plan.parts if part.path.lstat().st_dev != device), None):
        raise LakeError(
            f"{other} is on another filesystem than {lake.root}, so it cannot be removed in one step. Nothing was "
            "changed. Put the whole folder of the lake on one filesystem, and set ETPI_DATA"
        )


def _remove_empty(folder: Path, root: Path) -> None:
    """Remove a folder that has become empty, and its empty parents."""
    while folder != root:
        try:
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent


# --- rm --------------------------------------------------------------------------------------------------------------


def plan_partitions(lake: Lake, doomed: Iterable[tuple[str, str]]) -> Plan:
    """Plan to remove every partition of some keys, with their reports, journals, and the checkpoints of no other.

    Args:
        doomed: (set, key) pairs: suites, rollout sets, experiments.

    Raises:
        LakeError: the lake has nothing of a key, or a manifest is damaged.
    """
    keys = list(dict.fromkeys(doomed))
    references, plan = References(lake), Plan()
    refs = {ref for ref in references.pointed if (ref.set, ref.key) in keys}
    folders = {pair: list(_folders(lake, *pair)) for pair in keys}
    if unknown := [pair for pair, paths in folders.items() if not paths]:
        raise _unknown(lake, references, *unknown[0])
    kept = set(references.pointed) - refs
    plan.refused = _dependants(references, kept, refs)
    # Manifests and pointers before the files that they name.
    for pair, paths in folders.items():
        plan.parts += [_part(lake, path, "partition", _of(pair)) for path in paths]
    gone = [version for version in references.publications if version.ref in refs]
    rest = [version for version in references.publications if version.ref in kept]
    plan.parts += _checkpoints(lake, references, references.checkpoints(gone), references.checkpoints(rest))
    for pair in keys:
        plan.parts += _belongings(lake, *pair)
    return plan


def _of(pair: tuple[str, str]) -> str:
    return f"{pair[0].replace('_', ' ')} {pair[1]}"


def _folders(lake: Lake, set: str, key: str) -> Iterator[Path]:
    """Yield the folders of a key's partitions: those with pointers and manifests, then those with tables."""
    name = glob.escape(f"{set}={key}")  # the key is what a user typed
    for depth in ("*", "*/*"):
        for path in sorted(lake.root.glob(f"{depth}/{name}")):
            if NAME.fullmatch(path.relative_to(lake.root).parts[0]):
                yield path


def _unknown(lake: Lake, references: References, set: str, key: str) -> LakeError:
    if any((lake.root / REMOVED).glob("*/*/" + glob.escape(f"{set}={key}"))):
        return LakeError(
            f"a removal of the {_of((set, key))} was interrupted after its versions; `etpi gc --older-than 0` shows "
            "what it left, and --yes removes it"
        )
    known = sorted({ref.key for ref in references.pointed if ref.set == set})
    near = difflib.get_close_matches(key, known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'none'}"
    return LakeError(f"the lake has nothing of the {_of((set, key))}; {hint}")


def _dependants(references: References, kept: Collection[Ref], refs: Collection[Ref]) -> list[str]:
    """Return a line for each kept suite, rollout set or experiment whose versions in force need a version of `refs`."""
    lines, roots = [], references.roots(kept)
    for pair in sorted({(ref.set, ref.key) for ref in kept}):
        in_force = {version for version in roots if (version.ref.set, version.ref.key) == pair}
        needs = references.needed_by(in_force, kept, roots)
        needed = sorted((version for version in needs if version.ref in refs), key=str)
        if needed and (user := needs[needed[0]]):
            what = f"{needed[0].ref}, for {user.ref}"
            more = f" and {len(needed) - 1} more versions" if len(needed) > 1 else ""
            lines.append(f"{_of(pair)} needs {what}{more}; remove {_of(pair)} too, or keep both")
    return lines


def _belongings(lake: Lake, set: str, key: str) -> Iterator[Part]:
    """Yield what is outside of versions: written reports, journals, unpacked imports, finished parts."""
    if set == "experiment" and (reports := lake.root / "reports" / key).is_dir():
        yield _part(lake, reports, "report", f"reports/{key}")
    scratch = lake.root / "scratch"
    if set == "rollout_set":
        kinds: tuple[tuple[str, Reason], ...] = (("rollouts", "journal"), ("import", "scratch"))
        for name, reason in kinds:
            if (folder := scratch / name / key).exists():
                yield _part(lake, folder, reason, f"scratch/{name}/{key}")
    assets = {path.parent.name for path in lake.root.glob(f"*/{set}={key}")}
    for folder in sorted(scratch.glob(f"parts/*-{key}")):
        if folder.name.removesuffix(f"-{key}") in assets:
            yield _part(lake, folder, "scratch", f"scratch/parts/{folder.name}")


def _checkpoints(
    lake: Lake, references: References, unneeded: Collection[str], needed: Collection[str]
) -> Iterator[Part]:
    """Yield the trainings and checkpoints of which nothing else needs one: reports before the weights they name."""
    trainings = [t for t in references.trainings if t.checkpoints & set(unneeded) and not t.checkpoints & set(needed)]
    yield from (part for training in trainings for part in _training(lake, training))
    held = {c for t in references.trainings if t not in trainings for c in t.checkpoints}
    ids = set(unneeded) | {checkpoint for training in trainings for checkpoint in training.checkpoints}
    for checkpoint in sorted((ids - set(needed) - held) & references.folders):
        yield _part(lake, lake.checkpoint_dir(checkpoint), "checkpoint", checkpoint)


def _training(lake: Lake, training: StoredTraining) -> Iterator[Part]:
    yield _part(lake, training.path, "stored training", training.path.stem)
    if training.rounds is not None and training.rounds.is_dir():
        yield _part(lake, training.rounds, "stored training", f"rollouts of {training.path.stem}")


def _part(lake: Lake, path: Path, reason: Reason, what: str) -> Part:
    return Part(path, reason, what, size_of(path))


# --- gc --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Keep:
    """Versions that `plan_garbage` keeps beyond the needed ones.

    Attributes:
        last: so many past versions of each partition, the newest ones, with what they need.
        older_than: everything that is younger.
    """

    last: int = 0
    older_than: timedelta = timedelta(days=14)


def plan_garbage(lake: Lake, keep: Keep = Keep(), now: datetime | None = None) -> Plan:
    """Plan to remove everything that neither a version in force nor the lineage of its checkpoints needs.

    Raises:
        LakeError: a manifest or a pointer is damaged.
    """
    return _Garbage(lake, keep, now or datetime.now(UTC)).plan()


class _Garbage:
    def __init__(self, lake: Lake, keep: Keep, now: datetime) -> None:
        if backend():
            keep = replace(keep, older_than=max(keep.older_than, SEEN_EVERYWHERE))
        self.lake, self.keep, self.now = lake, keep, now
        self.references = References(lake)
        roots = self.references.roots()
        pointed = self.references.pointed
        self.needed = set(self.references.needed_by(roots, pointed))
        self.spared = set(self.references.needed_by([*roots, *self._spared()], pointed)) - self.needed
        self.result = Plan()

    def plan(self) -> Plan:
        self._versions()
        self._files_of_no_version()
        self._trainings()
        self._scratch()
        self._code()
        self._left_overs()
        return self.result

    def _young(self, at: datetime) -> bool:
        return self.now - at < self.keep.older_than

    def _spared(self) -> Iterator[Version]:
        """Yield the versions that stay although nothing needs them: young ones, and the last of each partition."""
        past: dict[Ref, list[Version]] = {}
        for version in self.references.publications:
            if version not in self.needed:
                past.setdefault(version.ref, []).append(version)
        for versions in past.values():
            versions.sort(key=self.references.created_at, reverse=True)
            yield from versions[: self.keep.last]
            yield from (v for v in versions[self.keep.last :] if self._young(self.references.created_at(v)))

    def _add(self, path: Path, reason: Reason, what: str, at: datetime | None = None) -> None:
        """Add a part, unless its time `at` is too young."""
        if at is not None and self._young(at):
            self.result.kept[f"{reason}, too young"] += size_of(path)
        else:
            self.result.parts.append(_part(self.lake, path, reason, what))

    def _versions(self) -> None:
        gone = [v for v in self.references.publications if v not in self.needed and v not in self.spared]
        gone.sort(key=lambda version: (str(version.ref), version.name))
        for version in gone:
            self._add(self.references.publications[version][0].path.parent, "past version", str(version))
        for version in gone:
            for path in sorted({path.parent for path in self.references.files(version)}):
                if path.is_dir():
                    self._add(path, "past version", f"{path.parent.parent.name} of {version}")
        for version in self.spared:
            paths = {path.parent for path in self.references.files(version) if path.parent.is_dir()}
            paths.add(self.references.publications[version][0].path.parent)
            self.result.kept["past version, young or among the last"] += sum(size_of(path) for path in paths)

    def _files_of_no_version(self) -> None:
        """Add table folders that no manifest names: of a removal, a repair or a publication that was interrupted."""
        named = {path.parent for version in self.references.publications for path in self.references.files(version)}
        for path in sorted(self.lake.root.glob("*/*/*=*/version=*")):
            if NAME.fullmatch(path.parents[2].name) and path not in named:
                at = modified(path) if backend() else None
                self._add(path, "files of no version", path.relative_to(self.lake.root).as_posix(), at)

    def _trainings(self) -> None:
        references = self.references
        kept = references.checkpoints(self.needed | self.spared)
        young = {c for t in references.trainings if self._young(modified(t.path)) for c in t.checkpoints}
        young |= {c for c in references.folders if self._young(modified(self.lake.checkpoint_dir(c)))}
        loose = (references.folders | {c for t in references.trainings for c in t.checkpoints}) - set(kept)
        for checkpoint in loose & young & references.folders:
            self.result.kept["checkpoint, too young"] += size_of(self.lake.checkpoint_dir(checkpoint))
        self.result.parts += _checkpoints(self.lake, references, loose - young, {*kept, *young})
        rounds = {training.rounds for training in references.trainings}
        for path in sorted((self.lake.root / "checkpoints" / "rounds").glob("*")):
            if path not in rounds:
                self._add(path, "stored training", f"rollouts of the unfinished {path.name}", modified(path))

    def _scratch(self) -> None:
        """Add old scratch; a journal of rollouts that a kept version was made of stays, for `etpi repair`."""
        scratch = self.lake.root / "scratch"
        codes = self.references.codes(self.needed | self.spared)
        sets = {ref.key for ref in self.references.pointed if ref.set == "rollout_set"}
        for path in sorted([*scratch.glob("rollouts/*/*"), *scratch.glob("evaluations/*")]):
            evaluation = path.parent.name == "evaluations"
            if path.name not in codes or not (evaluation or path.parent.name in sets):
                self._add(path, "journal", path.relative_to(self.lake.root).as_posix(), modified(path))
        for path in sorted(scratch.glob("duckdb/*")):
            if self.now - modified(path) >= SPILL_AGE:
                self._add(path, "scratch", path.relative_to(self.lake.root).as_posix())
        for path in sorted(scratch.glob("*/*")):
            if path.parent.name not in ("rollouts", "evaluations", "duckdb"):
                self._add(path, "scratch", path.relative_to(self.lake.root).as_posix(), modified(path))

    def _code(self) -> None:
        codes = self.references.codes(self.needed | self.spared)
        for path in sorted((self.lake.root / "code").glob("*.json")):
            if path.stem not in codes:
                self._add(path, "code of no version", path.stem, modified(path))

    def _left_overs(self) -> None:
        for path in sorted((self.lake.root / DAMAGED).glob("*")):
            self._add(path, "damaged part", f"set aside at {path.name}", modified(path))
        for path in sorted((self.lake.root / REMOVED).glob("*")):
            self._add(path, "left-over", path.name)
        for path in sorted((self.lake.root / ".staging").glob("*")):
            if path.is_dir() and not lake_locks(self.lake.root).is_held(path.with_name(f"{path.name}.lock")):
                self._add(path, "left-over", f".staging/{path.name}")
