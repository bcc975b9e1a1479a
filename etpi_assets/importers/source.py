"""Read files, times and message fields that other programs wrote, or raise Unreadable with the reason.

Covers compression, truncated files, other encodings, null-padded structs and times of mixed types. A small file cannot
fill memory: what it decompresses to is bounded, and so is one row.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import orjson

from etpi_resources.inside import PathOutside, open_file, read_inside
from etpi_resources.outside import most_values_in

MOST_ROW_BYTES = 256 << 20
"""The most bytes of one row, or of a file that is one JSON value. A rollout of a million tokens has five million."""

MOST_VALUES = 1 << 25
"""The most values of such a row. A value takes up to 30 times its text in memory; an id in a list has six bytes."""

_SMALL_BYTES, _MOST_RATIO = 64 << 20, 1000
"""A compressed file may hold 64 MiB, or 1000 times its own size. Long conversations whose rows repeat the history reach
about 300 times."""

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_SMALLER_FROM = 1e11
"""Epoch times from here on have a thousandth of a unit: as seconds they would be after the year 5138."""


class Unreadable(Exception):
    """An input that cannot be imported. `reason` is a short stable code, `detail` the finding and what to do."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def read_json(path: Path) -> Any:
    """Parse a JSON file, which may be compressed with gzip or zstd.

    Raises Unreadable: `unreadable` (the file system), `empty`, `bad_gzip`, `bad_zstd`, `too_large`, or as `parse_json`.
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

    Raises Unreadable: `too_large`, `empty`, `not_utf8`, `truncated_json`, `bad_json` or `lone_surrogate`.
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
        raise Unreadable("empty", f"{name} has no content")
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


def text_inside(folder: Path, name: str) -> str | None:
    """Return the text of a file of a run's folder, by a name that the run states; None if there is none.

    Raises Unreadable: `link_outside` if the name leads out of the folder, `unreadable`.
    """
    try:
        return read_inside(folder, name).decode("utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PathOutside as error:
        raise Unreadable("link_outside", str(error)) from error
    except OSError as error:
        raise Unreadable("unreadable", str(error)) from error


def content_hash(source: str, paths: Sequence[Path]) -> str:
    """Return the id of an imported rollout: 32 hex digits of the hash of its path and the bytes of its files."""
    parts = []
    for path in paths:
        with open_file(path) as file:
            digest = hashlib.file_digest(file, "sha256").digest()
        parts.append(b"\0" + path.name.encode("utf-8", "surrogateescape") + b"\0" + digest)
    return _digest(source, parts)


def content_hash_of(source: str, parts: Sequence[bytes]) -> str:
    """Return the id of a rollout that is stored in rows, as `content_hash` does for files."""
    return _digest(source, [b"\0" + hashlib.sha256(part).digest() for part in parts])


def _digest(source: str, parts: Sequence[bytes]) -> str:
    return hashlib.sha256(source.encode("utf-8", "surrogateescape") + b"".join(parts)).hexdigest()[:32]


def bytes_of(value: Any) -> bytes:
    """Serialise a row's value deterministically."""
    try:
        return orjson.dumps(value, default=repr, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except TypeError:  # integers beyond 64 bits
        return json.dumps(value, default=repr, sort_keys=True).encode()


def to_utc(value: Any) -> datetime | None:
    """Parse a time to UTC; None for anything that is not a time.

    Accepts epoch seconds, milliseconds, microseconds or nanoseconds as numbers or digits, and ISO 8601; without an
    offset it is taken as UTC.
    """
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, datetime):  # from parquet; without a zone taken as UTC
        return value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)
    if isinstance(value, str):
        text = value.strip()
        if text[4:5] == "-" and (moment := _iso_time(text)) is not None:
            return moment
        try:
            value = float(text)
        except ValueError:
            return _iso_time(text)
    if not isinstance(value, int | float):
        return None
    try:  # `suppress` would take longer than the rest
        for _ in range(3):  # milliseconds, microseconds, nanoseconds
            if abs(value) < _SMALLER_FROM:
                break
            value /= 1000
        return datetime.fromtimestamp(value, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _iso_time(text: str) -> datetime | None:
    try:
        return to_utc(datetime.fromisoformat(text))
    except (ValueError, OverflowError):
        return None


def as_mapping(value: Any, what: str) -> Mapping[str, Any]:
    """Return `value` if it is an object. Raises Unreadable (`unknown_form`)."""
    return value if isinstance(value, dict) else _other_kind(value, what, "an object")


def as_list(value: Any, what: str) -> list[Any]:
    """Return `value` if it is an array. Raises Unreadable (`unknown_form`)."""
    return value if isinstance(value, list) else _other_kind(value, what, "an array")


def _other_kind(value: Any, what: str, wanted: str) -> Any:
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "missing"}
    raise Unreadable("unknown_form", f"{what} is {kinds.get(type(value), 'a number')}, expected {wanted}")


def field(value: Any, *keys: str) -> Any:
    """Return value[k0][k1]…, None if a key is missing or a value on the way is not an object."""
    for key in keys:
        if not isinstance(value, dict):  # JSON and Arrow give dicts; a check for Mapping would double the cost
            return None
        value = value.get(key)
    return value


def text_field(value: Any, *keys: str) -> str | None:
    """Return `field` if it is a non-empty string or an integer, as text; None otherwise."""
    item = field(value, *keys)
    if isinstance(item, str):
        return item or None
    return str(item) if isinstance(item, int) and not isinstance(item, bool) else None


def int32_field(value: Any, *keys: str) -> int | None:
    """Return `field` if it is an integer that a column of 32 bits can store; None otherwise."""
    item = field(value, *keys)
    return item if type(item) is int and -(2**31) <= item < 2**31 else None


def number_field(value: Any, *keys: str) -> float | None:
    """Return `field` if it is a finite number; None otherwise."""
    item = field(value, *keys)
    if isinstance(item, bool) or not isinstance(item, int | float):
        return None
    return float(item) if abs(item) < 1e18 else None


_CONVERSATIONS = frozenset(
    ("role", "from", "speaker", "messages", "conversation", "conversations", "history", "trajectory", "steps", "turns")
    + ("events", "nodes", "traces", "samples", "simulations", "prompt", "completion", "input_ids")
)
"""Keys of a message, or of what holds messages."""


def holds_conversation(value: Any) -> bool:
    """Return whether a message, or a key that formats have for messages, is anywhere in a value: it may be a run."""
    inside = [value]  # a list, because foreign JSON may be nested as deep as Python can call
    while inside:
        inner = inside.pop()
        if isinstance(inner, dict):
            if not _CONVERSATIONS.isdisjoint(inner):
                return True
            inside += inner.values()
        elif isinstance(inner, list):
            inside += inner
    return False


def no_run(value: Any, what: str) -> Unreadable:
    """Return the refusal of a file that is no run (`not_a_rollout`: not lost) or may be one (`unknown_form`)."""
    return Unreadable("unknown_form" if holds_conversation(value) else "not_a_rollout", what)


def without_padding(value: Any) -> Any:
    """Remove the null keys that columnar storage adds to structs, in lists of structs too."""
    if type(value) is dict:  # leaves are not visited, and lists only if they hold structs
        return {k: without_padding(v) if type(v) in _NESTED else v for k, v in value.items() if v is not None}
    if type(value) is list and type(next((v for v in value if v is not None), None)) in _NESTED:
        return [without_padding(inner) for inner in value]
    return value


_NESTED = (dict, list)
