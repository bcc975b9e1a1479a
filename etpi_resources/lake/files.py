"""Write files so that a crash leaves the old content or the new one; turn errors of the disk into one line."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from etpi_resources.lake.manifest import LakeError

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
