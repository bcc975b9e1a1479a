"""Read files and JSON that other programs wrote, or raise Unreadable with the reason.

Covers compression, truncated files and other encodings. A small file cannot fill memory: what it decompresses to is
bounded, and so is one row.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import orjson

from etpi_resources.inside import open_file
from etpi_resources.outside import most_values_in

MOST_ROW_BYTES = 256 << 20
"""The most bytes of one row, or of a file that is one JSON value. A rollout of a million tokens has five million."""
MOST_VALUES = 1 << 25
"""The most values of such a row. A value takes up to 30 times its text in memory; an id in a list has six bytes."""
_SMALL_BYTES, _MOST_RATIO = 64 << 20, 1000
"""A compressed file may hold 64 MiB, or 1000 times its own size. Long conversations whose rows repeat the history reach
about 300 times."""
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


class Unreadable(Exception):
    """An input that cannot be imported. `reason` is a short stable code, `detail` the finding and what to do."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def read_json(path: Path) -> Any:
    """Parse a JSON file, which may be compressed with gzip or zstd.

    Raises Unreadable: `unreadable` (the file system), `bad_gzip`, `bad_zstd`, `too_large`, or as `parse_json`.
    """
    with read_errors(path), open_bytes(path) as file:
        data = file.read(MOST_ROW_BYTES + 1)
    if len(data) > MOST_ROW_BYTES:
        raise too_large(path.name)
    return parse_json(data, path.name)


def attempt(read: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function reads, or the Unreadable that it raises."""
    try:
        return read(*arguments)
    except Unreadable as refused:
        return refused


def too_large(name: str) -> Unreadable:
    """Return the refusal of a row, or of a file that is one value."""
    return Unreadable(
        "too_large",
        f"{name} has more than {MOST_ROW_BYTES >> 20} MiB or {MOST_VALUES:,} values; split it into rollouts",
    )


def parse_json(data: bytes, name: str) -> Any:
    """Parse JSON; `name` is the source in error messages.

    Raises Unreadable: `too_large`, `empty_file`, `not_utf8`, `truncated_json`, `bad_json` or `lone_surrogate`.
    """
    if len(data) > MOST_VALUES < most_values_in(data):  # commas in texts count too: a text can be JSON itself
        raise too_large(name)
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        # The standard parser accepts NaN, byte order marks and deep nesting, and says where a file is damaged.
        return _slow_json(data, name)


def _slow_json(data: bytes, name: str) -> Any:
    if not data.strip():
        raise Unreadable("empty_file", f"{name} has no content")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable("not_utf8", f"{name}: byte {error.start} is not UTF-8; save it as UTF-8") from error
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        line = "" if ", row " in name else f" line {error.lineno}"  # a row of JSON lines is the only line
        where = f"{name},{line} column {error.colno}: {error.msg}"
        if cut:
            remedy = "fetch the file again; rows of several lines belong into one array of a .json file"
            raise Unreadable("truncated_json", f"{where}; the value ends early: {remedy}") from error
        raise Unreadable("bad_json", where) from error
    except RecursionError as error:
        raise Unreadable("bad_json", f"{name}: nested too deep to be a trajectory") from error
    except ValueError as error:  # an integer with more digits than Python converts
        raise Unreadable("bad_json", f"{name}: {error}") from error
    if _SURROGATE_ESCAPE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            around = ascii(error.object[max(0, error.start - 30) : error.end])
            why = f"half a surrogate pair after {around}: the text was cut inside a character"
            raise Unreadable("lone_surrogate", f"{name}: {why}") from error
    return value


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file as a byte stream, decompressed if its first bytes are those of gzip or zstd.

    `read_errors` turns the errors of reading into Unreadable. Reading a decompressed stream raises Unreadable
    (`decompression_bomb`) once it has given far more bytes than the file has.
    """
    with open_file(path) as file:
        start = file.peek(4)[:4]
        if start.startswith(b"\x1f\x8b"):
            with gzip.GzipFile(fileobj=file) as inner:
                yield io.BufferedReader(_BoundedStream(inner, path), 1 << 18)
        elif start == b"\x28\xb5\x2f\xfd":
            import pyarrow as pa

            yield io.BufferedReader(_BoundedStream(pa.CompressedInputStream(file, "zstd"), path), 1 << 18)
        else:
            yield file


class _BoundedStream(io.RawIOBase):
    """A decompressed stream that ends with an error when it is far longer than its file."""

    def __init__(self, stream: Any, path: Path) -> None:
        super().__init__()
        self._stream, self._path, self._given = stream, path, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        self._given += len(data)
        check_ratio(self._given, self._path)
        buffer[: len(data)] = data
        return len(data)


def check_ratio(decompressed: int, path: Path) -> None:
    """Raise Unreadable (`decompression_bomb`) where a file holds far more bytes than it has."""
    size = path.stat().st_size
    if decompressed > max(_SMALL_BYTES, _MOST_RATIO * size):
        held = f"{path.name}: {size:,} bytes hold more than {decompressed:,}"
        raise Unreadable("decompression_bomb", f"{held}; decompress it by hand if you trust it")


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Raise errors of the file system and of decompression as Unreadable: `unreadable`, `bad_gzip` or `bad_zstd`."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Unreadable("bad_gzip", f"{path.name}: {error}; the file is cut or damaged") from error
    except OSError as error:
        if "zstd" in str(error).lower() or "compress" in str(error).lower():
            raise Unreadable("bad_zstd", f"{path.name}: {error}; the file is cut or damaged") from error
        raise Unreadable("unreadable", f"{path.name}: {error.strerror or error}") from error
