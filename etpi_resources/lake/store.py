"""The two writes that publishing needs, in a folder, local or shared over a network.

Files of versions and manifests are immutable and named by their content, so they are put if they are absent. A pointer
is small and moves, so it is swapped: written only if it still has the content that the writer read. A version exists
for readers once its pointer names it; everything it leads to was put before.
"""

from __future__ import annotations

import errno
import json
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from etpi_resources.inside import read_file
from etpi_resources.lake.files import sync, write_atomically
from etpi_resources.lake.manifest import LakeError
from etpi_resources.process.locks import lake_locks, require_held

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


PENDING = "moving.json"


def move(
    root: Path, pointers: Mapping[str, tuple[bytes | None, bytes | None]], replaced: Mapping[str, str] | None = None
) -> None:
    """Replace pointers and files, under the lock on publishing.

    Args:
        pointers: path in the lake -> (expected content, new content); None: there is none.
        replaced: path in the lake -> the path in the lake of the file that replaces it, if that still exists.

    Raises:
        LakeError: a run has moved a pointer; nothing was replaced.
    """
    if moved := [path for path, (expected, _) in pointers.items() if read_pointer(root / path) != expected]:
        raise LakeError(f"{moved[0]} was published meanwhile; nothing was replaced. Run the same command again")
    texts = {path: [content and content.decode() for content in contents] for path, contents in pointers.items()}
    write_atomically(root / PENDING, json.dumps({"pointers": texts, "replaced": dict(replaced or {})}))
    _carry_out(root)


def finish_moves(root: Path) -> None:
    """Carry out the moves that a killed process named."""
    if (root / PENDING).exists() and os.access(root, os.W_OK):
        with lake_locks(root).hold(root / "locks" / "publish.lock"):
            if (root / PENDING).exists():  # else the process lives, and has just finished them
                _carry_out(root)


def _carry_out(root: Path) -> None:
    value = json.loads((root / PENDING).read_bytes())
    for path, (expected, new) in value["pointers"].items():
        if read_pointer(root / path) != (expected and expected.encode()):
            continue  # moved before the kill
        if new is None:
            (root / path).unlink(missing_ok=True)
        else:
            swap(root / path, new.encode(), expected=expected and expected.encode())
    for path, source in value["replaced"].items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            (root / source).replace(root / path)
    (root / PENDING).unlink()
