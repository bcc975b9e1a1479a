"""Paths that strangers wrote, joined to a folder: they lead to files of that folder and nowhere else."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from io import BufferedReader
from pathlib import Path, PurePosixPath

MOST_BYTES = 256 << 20
_NO_NAME = re.compile("[\\0\ud800-\udc7f\udd00-\udfff]")
"""Characters that no file's name has, halves of surrogate pairs among them."""


class PathOutside(OSError):
    """A path leads out of its folder, or to something that is no file; or the file is too large."""


def below(path: str) -> str:
    """Return a relative path without `..`. Raises PathOutside for any other."""
    pure = PurePosixPath(path)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or _NO_NAME.search(path):
        raise PathOutside(f"{path[:200]!r}: a file is named by a path relative to its folder, without `..`")
    return path


def leads_inside(path: Path, folder: Path) -> bool:
    """Return whether a path is in a folder when all links are followed."""
    inside = os.path.realpath(folder)  # Path.resolve raises in a loop
    return os.path.commonpath([inside, os.path.realpath(path)]) == inside


def open_file(path: Path) -> BufferedReader:
    """Open a file to read its bytes. Raises PathOutside for all else; OSError as `open`."""
    # Not blocking, because opening a FIFO waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise PathOutside(f"{path} is no file")
    return os.fdopen(descriptor, "rb")


def read_inside(folder: Path, path: str, most: int = MOST_BYTES) -> bytes:
    """Return the bytes of a file of a folder. A link that leads to another file of the folder is followed.

    Args:
        most: the number of bytes that it may have.

    Raises:
        PathOutside: as `below`; the path leads out of the folder through a link; it leads to a device, a FIFO, a socket
            or a folder; the file is larger. OSError: it cannot be read.
    """
    root, named = Path(os.path.realpath(folder)), folder / below(path)
    if not leads_inside(named, folder):
        raise PathOutside(f"{named} leads out of {folder}; copy the file there")
    with open_file(named) as file:
        # The file that was opened, whatever was renamed meanwhile.
        if not Path(os.readlink(f"/proc/self/fd/{file.fileno()}")).is_relative_to(root):
            raise PathOutside(f"{named} leads out of {folder}; copy the file there")
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise PathOutside(f"{named} has {size:,} bytes; at most {most:,} are read")
        data = file.read(most + 1)  # files of /proc state no size
    if len(data) > most:
        raise PathOutside(f"{named} has more than {most:,} bytes")
    return data


def is_file_inside(folder: Path, path: str) -> bool:
    """Return whether `read_inside` would find a file, of any size."""
    with suppress(OSError, ValueError):
        named = folder / below(path)
        return named.is_file() and leads_inside(named, folder)
    return False
