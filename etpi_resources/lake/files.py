"""Write files so that a crash leaves the old content or the new one; turn errors of the disk into one line.

Publishing needs two writes, in a folder that may be shared over a network. Files of versions and manifests are
immutable and named by their content, so they are put if they are absent. A pointer is small and moves, so it is
swapped: written only if it still has the content that the writer read. A version exists for readers once its pointer
names it; everything it leads to was put before.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from etpi_resources.lake.manifest import LakeError
from etpi_resources.process.locks import require_held

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EIO)
"""Of the disk only where the error names a file."""


@contextmanager
def disk_errors() -> Iterator[None]:
    """Raise what a disk refuses (full, read-only, not permitted) as LakeError: what was begun can be repeated."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL and not (error.errno in _REFUSED and error.filename):
            raise
        place = f"{error.filename}: " if error.filename else ""
        raise LakeError(f"{place}{error.strerror or error}. Run the same command again when that is mended") from error


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: str | bytes, check: Callable[[], None] = lambda: None) -> None:
    """Replace a file's content; a crash leaves the old content or the new one.

    Args:
        check: called right before the content is replaced, so that it may still raise.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    beside.write_bytes(content.encode() if isinstance(content, str) else content)
    try:
        sync(beside)
        check()
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    sync(path.parent)


_NO_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO)
"""Errors of link(2) on file systems without hard links: vfat and exFAT, CIFS, some FUSE file systems; EIO: rclone."""


def put_if_absent(target: Path, source: Path | bytes) -> bool:
    """Store a file, whole and on disk, unless it exists; return whether it was stored.

    link(2) fails if the file exists, on every file system and for every process that tries at the same time.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f".{target.name}.{uuid.uuid4().hex}") if isinstance(source, bytes) else source
    try:
        if isinstance(source, bytes):
            staged.write_bytes(source)
        sync(staged)
        try:
            os.link(staged, target)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            raise LakeError(
                f"the file system of {target.parent} has no hard links, which publishing needs; nothing was published. "
                "Put the lake on one that has them, such as ext4, XFS, NFS, Lustre or CephFS (docs/lake.md names some "
                "that have none)"
            ) from error
    finally:
        if isinstance(source, bytes):
            staged.unlink(missing_ok=True)
    sync(target.parent)
    return True


def read_pointer(path: Path) -> bytes | None:
    """Read a pointer; None if there is none."""
    while True:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.ESTALE:  # another node replaced the file between opening and reading it
                raise


def swap(path: Path, content: bytes, expected: bytes | None) -> None:
    """Replace a pointer, or create it where None is expected.

    A folder has no conditional replace: the caller holds the lock on publishing, which is asked for right before.

    Raises:
        LakeError: another process has moved it; nothing was written.
        LockLost: this process has lost a lock.
    """

    def require_unmoved() -> None:
        if read_pointer(path) != expected:
            raise LakeError(f"{path} was moved by another process meanwhile; nothing was published. Run it again")
        require_held()

    write_atomically(path, content, check=require_unmoved)
