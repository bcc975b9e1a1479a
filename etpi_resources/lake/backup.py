"""Copy a lake to another folder and back, at any moment, also while runs publish.

A backup is a lake: the same folders, without locks, scratch other than journals, and rehearsals. The pointers are read
at one moment. Every file that they lead to is immutable, so the copy of it may take as long as it takes; manifests are
written after the files that they name, and pointers last. What a backup already has is not copied again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from etpi_resources.lake import formats
from etpi_resources.lake.files import write_atomically
from etpi_resources.lake.lake import Lake, folder_hash, sha256_of
from etpi_resources.lake.manifest import DamagedFile, LakeError, Manifest, Ref
from etpi_resources.lake.provenance import etpi_version

MARKER = "backup.json"
"""The file that says of which lake a folder is the backup."""
JOURNALS = ("scratch/rollouts", "scratch/evaluations")
ALWAYS = ("checkpoints/rounds", "checkpoints/trained", "code", "reports", "downloads")
"""Folders that are copied as they are; their files are replaced as a whole or only ever grow."""

Log = Callable[[str], None]


@dataclass(frozen=True)
class Backup:
    """The content of `backup.json`: the lake's folder, when its pointers were read, and the etpi that copied it."""

    of: str
    at: str
    etpi: str


@dataclass
class Copied:
    """Counts of a finished copy.

    Attributes:
        files, bytes: that were written.
        present: files that were there already.
        extra: files of the target that the source does not have, relative to the target.
        removed: whether those were removed.
        at: when the pointers were read.
    """

    files: int = 0
    bytes: int = 0
    present: int = 0
    extra: list[Path] = field(default_factory=list)
    removed: bool = False
    at: str = ""


@dataclass
class _Snapshot:
    """Files to copy, by path relative to the root.

    Attributes:
        pointers: the bytes of every pointer, read at one moment.
        manifests: the bytes of every manifest.
        tables: each table file with its recorded sha256 and bytes.
        checkpoints: ids.
        loose: all other files.
    """

    at: str
    pointers: dict[Path, bytes]
    manifests: dict[Path, bytes] = field(default_factory=dict)
    tables: dict[Path, tuple[str, int]] = field(default_factory=dict)
    checkpoints: list[str] = field(default_factory=list)
    loose: list[Path] = field(default_factory=list)


def back_up(
    lake: Lake, folder: Path, *, deep: bool = False, delete: bool = False, force: bool = False, log: Log = print
) -> Copied:
    """Bring a backup up to date, or make it.

    Args:
        deep: read every file that the backup has and compare its sha256, not only its size.
        delete: remove what the lake no longer has.
        force: take a folder that is the backup of another lake, for example because the lake was moved.

    Raises:
        LakeError: the folder is not empty and no backup of this lake, has too little space, or is inside the lake.
        DamagedFile: a file of the lake is not what was written.
        LakeBusy: another backup to the same folder is under way.
    """
    folder = folder.resolve()
    _refuse_folder(lake, folder, force)
    target = Lake(folder)
    with _in_use(lake), target.alone():
        # A power cut may have left files of the right size without content: they are flushed only at the end.
        deep = deep or _unfinished(folder)
        _write_marker(target, Backup(str(lake.root), _UNFINISHED, etpi_version()))
        copied = _Copy(lake, target, deep=deep, journals="replace", log=log).run(delete=delete)
        _write_marker(target, Backup(str(lake.root), copied.at, etpi_version()))
    return copied


def restore(folder: Path, to: Lake, *, overwrite: bool = False, log: Log = print) -> Copied:
    """Copy a backup into a lake, which may be new or damaged; every file that is there already is read and compared.

    Journals of the lake that are longer than those of the backup stay.

    Args:
        overwrite: make the backup's versions current where the lake has other ones.

    Raises:
        LakeError: the folder is no backup, its first backup was interrupted before its pointers were written, or the
            lake has other current versions and `overwrite` is false.
        LakeBusy: a run is using the lake.
    """
    source, folder = Lake(folder), folder.resolve()
    if to.root.is_relative_to(folder) or folder.is_relative_to(to.root):
        raise LakeError(f"{folder} and {to.root} lie in one another; restore into another folder")
    if not (folder / MARKER).is_file():
        raise LakeError(f"{folder} is no backup: it has no {MARKER}; `etpi backup FOLDER` makes one")
    if _unfinished(folder):
        if not source.refs():
            raise LakeError(f"{folder}: its first backup was interrupted, so it names no version; nothing was changed")
        log(f"{folder}: its last backup was interrupted; pointers that it did not write are those of the one before")
    with _in_use(source), to.alone():
        copy = _Copy(source, to, deep=True, journals="grow", log=log)
        other = copy.other_pointers()
        if other and not overwrite:
            shown = ", ".join(str(path.parent) for path in other[:3]) + (" ..." if len(other) > 3 else "")
            raise LakeError(
                f"{to.root} has other current versions than the backup in {len(other)} partitions ({shown}). Restore "
                "into a new folder, or make the backup's versions current with --overwrite. Nothing was changed."
            )
        return copy.run(delete=False)


def _refuse_folder(lake: Lake, folder: Path, force: bool) -> None:
    if folder.is_relative_to(lake.root) or lake.root.is_relative_to(folder):
        raise LakeError(f"{folder} and the lake {lake.root} lie in one another; choose a folder on another disk")
    if folder.exists() and not folder.is_dir():
        raise LakeError(f"{folder} is a file; choose a folder")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / MARKER).is_file():
        raise LakeError(f"{folder} is not empty and no backup (it has no {MARKER}); choose an empty folder")
    of = _read_marker(folder).of
    if of != str(lake.root) and not force:
        raise LakeError(
            f"{folder} is a backup of {of}, not of {lake.root}; choose another folder, or give --force if that lake "
            "was moved here"
        )


_UNFINISHED = "unfinished"


def _unfinished(folder: Path) -> bool:
    """Return whether the last backup to a folder was interrupted."""
    return (folder / MARKER).is_file() and _read_marker(folder).at == _UNFINISHED


def _read_marker(folder: Path) -> Backup:
    try:
        return Backup(**json.loads((folder / MARKER).read_bytes()))
    except (ValueError, TypeError) as error:
        content = json.dumps({"of": "FOLDER OF THE LAKE", "at": _UNFINISHED, "etpi": "?"})
        raise LakeError(f"{folder / MARKER} cannot be read ({error}); write into it {content}") from error


def _write_marker(target: Lake, marker: Backup) -> None:
    write_atomically(target.root / MARKER, json.dumps(asdict(marker)) + "\n")


def _in_use(lake: Lake) -> AbstractContextManager[None]:
    """Keep removals out; a folder that cannot be written needs no lock."""
    return lake.in_use() if os.access(lake.root, os.W_OK) else nullcontext()


class _Copy:
    """A copy of one lake into another.

    Args:
        journals: "replace" a journal that differs, or let it only "grow".
    """

    def __init__(
        self, source: Lake, target: Lake, *, deep: bool, journals: Literal["replace", "grow"], log: Log
    ) -> None:
        self.source, self.target, self.deep, self.journals, self.log = source, target, deep, journals, log
        self.result = Copied()
        self.snapshot = _snapshot(source)

    def other_pointers(self) -> list[Path]:
        """Return the pointers `current` that the target has and that differ."""
        targets = {path: self.target.root / path for path in self.snapshot.pointers if path.name == "current"}
        return [p for p, path in targets.items() if path.exists() and path.read_bytes() != self.snapshot.pointers[p]]

    def run(self, *, delete: bool) -> Copied:
        """Copy what is missing: files, then manifests, then pointers; then list or remove what is extra."""
        snapshot, root = self.snapshot, self.target.root
        self._refuse_full_disk()
        formats.write(root, formats.read(self.source.root))
        with self.target.staging() as self.staging:
            for path, (sha256, size) in snapshot.tables.items():
                self._table(path, sha256, size)
            for checkpoint in snapshot.checkpoints:
                self._checkpoint(checkpoint)
            for path in snapshot.loose:
                self._loose(path)
            os.sync()  # once, not for each file: before the manifests that name them, and before the pointers
            for path, content in snapshot.manifests.items():
                self._small(path, content)
            os.sync()
            for path, content in snapshot.pointers.items():
                self._small(path, content)
        for folder in {path.parent for path in snapshot.pointers}:
            if folder / "blocked" not in snapshot.pointers:
                (root / folder / "blocked").unlink(missing_ok=True)
        self.result.extra = list(self._extra())
        if delete:
            for path in self.result.extra:
                (root / path).unlink()
            self.result.removed = True
        self.result.at = snapshot.at
        return self.result

    def _refuse_full_disk(self) -> None:
        """Raise LakeError if the files that are missing do not fit."""
        root = self.target.root
        missing = sum(size for path, (_, size) in self.snapshot.tables.items() if not (root / path).exists())
        for checkpoint in self.snapshot.checkpoints:
            if not self.target.checkpoint_dir(checkpoint).exists():
                files = self.source.checkpoint_dir(checkpoint).rglob("*")
                missing += sum(path.stat().st_size for path in files if path.is_file())
        free = shutil.disk_usage(root).free
        if missing > free:
            raise LakeError(f"{root} has {free / 1e9:.1f} GB free; {missing / 1e9:.1f} GB are to be copied")

    # --- one part ----------------------------------------------------------------------------------------------------

    def _table(self, path: Path, sha256: str, size: int) -> None:
        target = self.target.root / path
        if target.exists() and target.stat().st_size == size and not (self.deep and sha256_of(target) != sha256):
            self.result.present += 1
            return
        self._file(path, target, sha256)

    def _checkpoint(self, name: str) -> None:
        target, staged = self.target.checkpoint_dir(name), self.staging / name
        source = self.source.checkpoint_dir(name)
        files = sorted(path for path in source.rglob("*") if path.is_file())
        if target.exists():
            if not self.deep or folder_hash(target) == name:
                self.result.present += len(files)
                return
            target.replace(self.staging / f"{name}.damaged")
        for file in files:
            self._file(file.relative_to(self.source.root), staged / file.relative_to(source))
        if folder_hash(staged) != name:
            raise DamagedFile.of(source, "its content does not have the hash in its name")
        target.parent.mkdir(parents=True, exist_ok=True)
        staged.rename(target)

    def _loose(self, path: Path) -> None:
        """Copy a file that a run may replace or append to, if its size or its time differs.

        A fault of a disk changes neither. So a restore compares the content too, and a deep backup, which cannot know
        which of the two is the damaged one, reports the difference and changes nothing.
        """
        target = self.target.root / path
        try:
            now = (self.source.root / path).stat()
            if target.exists():
                then = target.stat()
                same = (then.st_size, int(then.st_mtime)) == (now.st_size, int(now.st_mtime))
                journal = path.as_posix().startswith(JOURNALS)
                if same and self.deep and sha256_of(target) != sha256_of(self.source.root / path):
                    if self.journals == "grow":
                        same = False
                    else:
                        self.log(
                            f"{path}: lake and backup differ, though size and time are the same: one is damaged. "
                            "Delete it in the backup, or restore it into the lake"
                        )
                if same or (journal and self.journals == "grow" and then.st_size >= now.st_size):
                    self.result.present += 1
                    return
            self._file(path, target)
            os.utime(target, (now.st_mtime, now.st_mtime))
        except FileNotFoundError:
            self.log(f"{path} was removed during the copy; it is left out")

    def _small(self, path: Path, content: bytes) -> None:
        target = self.target.root / path
        if target.exists() and target.read_bytes() == content:
            self.result.present += 1
            return
        if path in self.snapshot.pointers:
            write_atomically(target, content.decode())
        else:
            (self.staging / "small").write_bytes(content)
            target.parent.mkdir(parents=True, exist_ok=True)
            (self.staging / "small").replace(target)
        self.result.files += 1
        self.result.bytes += len(content)

    def _file(self, path: Path, target: Path, sha256: str | None = None) -> None:
        """Copy one file of the source, read it back, and compare.

        Raises:
            DamagedFile: the source does not have its recorded sha256, or the copy differs from the source.
        """
        source, staged = self.source.root / path, self.staging / "file"
        digest = hashlib.sha256()
        with source.open("rb") as reading, staged.open("wb") as writing:
            while piece := reading.read(1 << 20):
                digest.update(piece)
                writing.write(piece)
        if sha256 is not None and digest.hexdigest() != sha256:
            raise DamagedFile.of(source, "it does not have its recorded sha256")
        if sha256_of(staged) != digest.hexdigest():
            raise LakeError(
                f"{target} reads back other than it was written; the disk of {self.target.root} has a fault"
            )
        self.result.files += 1
        self.result.bytes += staged.stat().st_size
        target.parent.mkdir(parents=True, exist_ok=True)
        staged.replace(target)

    def _extra(self) -> Iterator[Path]:
        """Yield the target's files that are not in the snapshot: pointers and manifests before what they name."""
        snapshot, root = self.snapshot, self.target.root
        expected = {*snapshot.pointers, *snapshot.manifests, *snapshot.tables, *snapshot.loose}
        weights, extra = set(snapshot.checkpoints), list[Path]()
        for file in root.rglob("*"):
            path = file.relative_to(root)
            first, *rest = path.as_posix().split("/")
            inside = first in _MIRRORED or (len(rest) > 1 and _is_partition(path))
            weight = first == "checkpoints" and bool(rest) and rest[0] in weights
            other_scratch = first == "scratch" and not path.as_posix().startswith(JOURNALS)
            if file.is_file() and inside and not weight and not other_scratch and path not in expected:
                extra.append(path)
        yield from sorted(
            extra, key=lambda path: (path.name not in ("current", "blocked"), path.suffix != ".json", path)
        )


_MIRRORED = {"checkpoints", "scratch", *(folder.split("/")[0] for folder in ALWAYS)}


def _is_partition(path: Path) -> bool:
    return not path.parts[0].startswith(".") and any("=" in part for part in path.parts[1:3])


def _snapshot(lake: Lake) -> _Snapshot:
    """Read the pointers at one moment, then list everything that they can lead to."""
    writable = os.access(lake.root, os.W_OK)
    with lake.lock("publish") if writable else nullcontext():
        refs = lake.refs()
        pointers = {path: (lake.root / path).read_bytes() for ref in refs for path in _pointer_files(lake, ref)}
        result = _Snapshot(datetime.now(UTC).isoformat(timespec="seconds"), pointers)
    for ref in refs:
        for file in sorted((lake.root / ref.asset / f"{ref.set}={ref.key}").glob("version=*/manifest-*.json")):
            path = file.relative_to(lake.root)
            result.manifests[path] = file.read_bytes()
            manifest = _manifest(file, result.manifests[path])
            for table in manifest.tables.values():
                for entry in table["files"]:
                    result.tables[Path(entry["path"])] = (entry["sha256"], entry["bytes"])
    _require_named(lake, result)
    # Reports of trainings before checkpoints, which exist before a report or a manifest names them.
    for folder in (*ALWAYS, *JOURNALS):
        files = sorted(_files_below(lake.root / folder))
        result.loose += [path.relative_to(lake.root) for path in files if not path.name.startswith(".")]
    result.loose = [path for path in result.loose if path.suffix != ".new"]
    folders = (lake.root / "checkpoints").glob("*")
    result.checkpoints = sorted(p.name for p in folders if p.is_dir() and p.name not in ("trained", "rounds"))
    return result


def _files_below(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """Yield the files below a folder, also behind links to folders on another disk, but not round a circle of links."""
    real = folder.resolve()
    paths: list[Path] = []
    if not folder.is_dir() or real in above:
        return
    with suppress(FileNotFoundError):  # a run removed the folder
        paths = list(folder.iterdir())
    for path in paths:
        if path.is_dir():
            yield from _files_below(path, above | {real})
        elif path.is_file():
            yield path


def _pointer_files(lake: Lake, ref: Ref) -> Iterator[Path]:
    for name in ("current", "blocked"):
        path = Path(ref.asset) / f"{ref.set}={ref.key}" / name
        if (lake.root / path).exists():
            yield path


def _manifest(file: Path, content: bytes) -> Manifest:
    try:
        return Manifest.from_json(json.loads(content))
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFile.of(file, f"it cannot be read: {error}") from error


def _require_named(lake: Lake, snapshot: _Snapshot) -> None:
    """Raise DamagedFile if a pointer names a manifest that does not exist."""
    for path, content in snapshot.pointers.items():
        try:
            named: Mapping[str, str] = json.loads(content)
            missing = path.parent / named["manifest"] not in snapshot.manifests
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedFile.of(lake.root / path, f"it cannot be read: {error}") from error
        if missing:
            raise DamagedFile.of(lake.root / path, f"it names {named['manifest']}, which does not exist")
