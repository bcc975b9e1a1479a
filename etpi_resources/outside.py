"""Text from outside as a value: JSON of a bounded number of values, without lone surrogates and without a secret.

`json.loads` raises RecursionError for nested values, which is no ValueError: `loads` raises Unreadable, which is one.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from itertools import accumulate
from pathlib import Path
from typing import Any

from etpi_resources.inside import read_file

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")
MOST_DEPTH = 200
"""The most levels of nested values: every program can then write them again."""

_PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+"""
_LONG_KEY = re.compile(rf"(?<![\w\"'.-])(?:{_PART}\.[ \t]*+){{100}}")
"""A TOML parser's time for a dotted key grows with the square of its parts."""

_SURROGATE = re.compile("[\ud800-\udfff]")
_LARGE_NUMBER = re.compile(rb"\d[eE]\+?\d{3}|\d{300}")
"""In each number that may be infinite as a float."""
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_ESCAPED_ASCII = re.compile(rb"\\(?:u00|/)")
"""Escapes with which a text can contain a secret in other bytes."""


class Unreadable(ValueError):
    """Bytes from outside that are too large, hold too many values, or are no JSON; the message says which."""


def loads(text: str | bytes) -> Any:
    """Return the value of a JSON text whose size is bounded already. Raises Unreadable if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"it is no JSON ({type(error).__name__}: {error})"[:300]) from None


def read_toml(text: str) -> dict[str, Any]:
    """Return the table of a TOML text whose size is bounded already. Raises Unreadable if it is no TOML."""
    if _LONG_KEY.search(text):
        raise Unreadable("it has a key of more than 100 parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise Unreadable("its tables or lists are nested too deep") from None
    except ValueError as error:  # also an integer with more digits than Python converts
        raise Unreadable(str(error)) from None


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file, such as a model's config.json. Raises OSError, Unreadable."""
    try:
        value = loads(read_file(file))
    except Unreadable as error:
        raise Unreadable(f"{file}: {error}") from None
    if not isinstance(value, dict):
        raise Unreadable(f"{file} has no JSON object")
    return value


def without_surrogates(text: str) -> str:
    """Return a text with U+FFFD for each half of a surrogate pair, which JSON can contain and no tokenizer takes."""
    return _SURROGATE.sub("\ufffd", text)


def read_json(raw: bytes | bytearray, most_values: int, secret: str = "", shown: str = "") -> Any:
    """Return the value of a JSON text. NaN and infinities are None.

    Args:
        most_values: the most values, keys included; the memory of a small value is fifty times its text.
        secret: a text that every string of the value has `shown` in place of.

    Raises:
        Unreadable: it has more values, or is nested deeper than MOST_DEPTH, or is no JSON.
    """
    if (marks := most_values_in(raw)) > MOST_DEPTH:
        bare = _STRING.sub(b"", raw)
        if marks > most_values < most_values_in(bare):
            raise Unreadable(f"it has more than {most_values:,} values")
        depth = accumulate(1 if bracket in b"[{" else -1 for bracket in _BRACKET.findall(bare))
        if max(depth, default=0) > MOST_DEPTH:
            raise Unreadable(f"its values are nested more than {MOST_DEPTH} deep")
    try:
        finite = _finite if _LARGE_NUMBER.search(raw) else None
        value = json.loads(raw.decode("utf-8-sig", "replace"), parse_constant=lambda _: None, parse_float=finite)
        hides = bool(secret) and (secret.encode() in raw or _ESCAPED_ASCII.search(raw) is not None)
        if hides or _ESCAPED_SURROGATE.search(raw):
            text = without_surrogates(json.dumps(value, ensure_ascii=False))
            value = json.loads(text.replace(inside(secret), inside(shown)) if hides else text)
        return value
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"it is no JSON ({type(error).__name__})") from None


def _finite(number: str) -> float | None:
    return value if math.isfinite(value := float(number)) else None


def most_values_in(raw: bytes | bytearray) -> int:
    """Return a number that the values of a JSON text do not exceed: commas in its texts count too."""
    return sum(map(raw.count, (b",", b":", b"[", b"{")))


def inside(text: str) -> str:
    """Return a text as JSON writes it between quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
