"""The two writes that publishing needs, in a folder, local or shared over a network.

Files of versions and manifests are immutable and named by their content, so they are put if they are absent. A pointer
is small and moves, so it is swapped: written only if it still has the content that the writer read. A version exists
for readers once its pointer names it; everything it leads to was put before.
"""

from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path

from etpi_resources.inside import read_file
from etpi_resources.lake.files import sync, write_atomically
from etpi_resources.lake.manifest import LakeError
from etpi_resources.process.locks import require_held

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
            return read_file(path)
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
