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

from etpi_resources.lake.files import sync
from etpi_resources.lake.manifest import LakeError
from etpi_resources.process.locks import require_held

_NO_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of link(2) on file systems without hard links: vfat and exFAT, CIFS, some FUSE file systems."""


class NoHardLinks(LakeError):
    """The lake's file system has no hard links, so no file can be put without the risk of replacing another's."""

    def __init__(self, root: Path) -> None:
        super().__init__(
            f"the file system of {root} has no hard links, which publishing needs; nothing was published. Put the lake "
            "on one that has them, such as ext4, XFS, NFS, Lustre or CephFS (docs/lake.md names some that have none)"
        )


class PointerMoved(LakeError):
    """Another process has moved the pointer since it was read; nothing was written."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} was moved by another process meanwhile; nothing was published. Run it again")


class FolderStore:
    """Keeps the files of a lake under paths relative to its folder.

    `link` puts a file: it fails where the path exists, on every file system and whoever else does the same. A folder
    has no conditional replace, so `swap` relies on the lock on publishing, which the caller holds, and asks for it
    right before it renames.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def put_if_absent(self, path: str, source: Path | bytes) -> bool:
        """Store a file, whole and on disk, unless the path exists; return whether it was stored."""
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        staged = _written_beside(target, source) if isinstance(source, bytes) else source
        try:
            sync(staged)
            os.link(staged, target)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in _NO_LINK:
                raise NoHardLinks(self._root) from error
            raise
        finally:
            if isinstance(source, bytes):
                staged.unlink()
        sync(target.parent)
        return True

    def pointer(self, path: str) -> bytes | None:
        """Read a pointer; None if there is none."""
        while True:
            try:
                return (self._root / path).read_bytes()
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno != errno.ESTALE:  # another node replaced the file between opening and reading it
                    raise

    def swap(self, path: str, content: bytes, expected: bytes | None) -> None:
        """Replace a pointer, or create it where None is expected.

        Raises:
            PointerMoved: it is not what was expected.
            LockLost: this process has lost a lock.
        """
        target = self._root / path
        staged = _written_beside(target, content)
        try:
            sync(staged)
            if self.pointer(path) != expected:
                raise PointerMoved(path)
            require_held()
            staged.replace(target)
        finally:
            staged.unlink(missing_ok=True)
        sync(target.parent)


def _written_beside(target: Path, content: bytes) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    staged.write_bytes(content)
    return staged
