"""Read times, message fields and ids of runs that other programs wrote, or raise Unreadable with the reason.

Covers null-padded structs and times of mixed types.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from etpi_resources.inside import PathOutside, open_file, read_inside
from etpi_resources.rows.bounded import Unreadable

_SMALLER_FROM = 1e11
"""Epoch times from here on have a thousandth of a unit: as seconds they would be after the year 5138."""


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


def list_field(value: Any, *keys: str) -> list[Any]:
    """Return `field` if it is a list; an empty list otherwise."""
    return item if isinstance(item := field(value, *keys), list) else []


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
