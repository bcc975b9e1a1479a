"""Files whose paths users and strangers write: only regular files are opened, and of a folder only those inside it."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from io import BufferedReader
from pathlib import Path, PurePosixPath

from etpi_resources.errors import ExpectedError

MOST_BYTES = 256 << 20
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket"}
_NO_NAME = re.compile("[\\0\ud800-\udc7f\udd00-\udfff]")
"""Characters that no file's name has, halves of surrogate pairs among them."""


class PathOutside(ExpectedError, OSError):
    """A path leads out of its folder, or to something that is no regular file; or the file is too large."""


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


def require_file(path: Path, opened: int | None = None) -> None:
    """Require that a path, or the file that was opened, is a regular file: opening a FIFO waits for a writer.

    Libraries that open a path themselves are given it after this.

    Raises:
        PathOutside: it is anything else. OSError: there is nothing.
    """
    kind = stat.S_IFMT(os.stat(path if opened is None else opened).st_mode)
    if kind != stat.S_IFREG:
        raise PathOutside(f"{path} is {_KINDS.get(kind, 'a device')}, not a file; put a file there, or name another")


def open_file(path: Path) -> BufferedReader:
    """Open a file to read its bytes. Raises as `require_file`; OSError as `open`."""
    require_file(path)
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb")
    try:
        require_file(path, file.fileno())  # it may have been replaced meanwhile
    except PathOutside:
        file.close()
        raise
    return file


def read_file(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the bytes of a file. Raises as `open_file`; PathOutside if it has more than `most`."""
    with open_file(path) as file:
        return _content(file, path, most)


def read_text(path: Path) -> str:
    """Return the text of a file. Raises as `read_file`; ValueError if it is not UTF-8."""
    try:
        return read_file(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8; save it as UTF-8") from None


def files_in(folder: Path) -> list[Path]:
    """Return every file below a folder, sorted. Raises PathOutside for a FIFO, a socket or a device."""
    files = sorted(path for path in folder.rglob("*") if path.exists() and not path.is_dir())
    for path in files:
        require_file(path)
    return files


def read_inside(folder: Path, path: str, most: int = MOST_BYTES) -> bytes:
    """Return the bytes of a file of a folder. A link that leads to another file of the folder is followed.

    Args:
        most: the number of bytes that it may have.

    Raises:
        PathOutside: as `below` and `read_file`; the path leads out of the folder through a link.
        OSError: it cannot be read.
    """
    root, named = Path(os.path.realpath(folder)), folder / below(path)
    if not leads_inside(named, folder):
        raise PathOutside(f"{named} leads out of {folder}; copy the file there")
    with open_file(named) as file:
        # The file that was opened, whatever was renamed meanwhile.
        if not Path(os.readlink(f"/proc/self/fd/{file.fileno()}")).is_relative_to(root):
            raise PathOutside(f"{named} leads out of {folder}; copy the file there")
        return _content(file, named, most)


def _content(file: BufferedReader, path: Path, most: int) -> bytes:
    if (size := os.fstat(file.fileno()).st_size) > most:
        raise PathOutside(f"{path} has {size:,} bytes; at most {most:,} are read")
    if len(data := file.read(most + 1)) > most:  # files of /proc state no size
        raise PathOutside(f"{path} has more than {most:,} bytes")
    return data


def is_file_inside(folder: Path, path: str) -> bool:
    """Return whether `read_inside` would find a file, of any size."""
    with suppress(OSError, ValueError):
        named = folder / below(path)
        return named.is_file() and leads_inside(named, folder)
    return False
