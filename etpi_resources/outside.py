"""Text from outside as a value: JSON of a bounded number of values, without lone surrogates and without a secret."""

from __future__ import annotations

import json
import re
from typing import Any

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_ESCAPED_ASCII = re.compile(rb"\\(?:u00|/)")
"""Escapes with which a text can contain a secret in other bytes."""


class Unreadable(ValueError):
    """Bytes from outside that are too large, hold too many values, or are no JSON; the message says which."""


def without_surrogates(text: str) -> str:
    """Return a text with U+FFFD for each half of a surrogate pair, which JSON can contain and no tokenizer takes."""
    return _SURROGATE.sub("\ufffd", text)


def read_json(raw: bytes | bytearray, most_values: int, secret: str = "", shown: str = "") -> Any:
    """Return the value of a JSON text. NaN and infinities are None.

    Args:
        most_values: the most values, keys included; the memory of a small value is fifty times its text.
        secret: a text that every string of the value has `shown` in place of.

    Raises:
        Unreadable: it has more values, or is no JSON.
    """
    if _marks(raw) > most_values and _marks(_STRING.sub(b"", raw)) > most_values:
        raise Unreadable(f"it has more than {most_values:,} values")
    try:
        value = json.loads(raw.decode("utf-8-sig", "replace"), parse_constant=lambda _: None)
        hides = bool(secret) and (secret.encode() in raw or _ESCAPED_ASCII.search(raw) is not None)
        if hides or _ESCAPED_SURROGATE.search(raw):
            text = without_surrogates(json.dumps(value, ensure_ascii=False))
            value = json.loads(text.replace(_inside(secret), _inside(shown)) if hides else text)
        return value
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"it is no JSON ({type(error).__name__})") from None


def _marks(raw: bytes | bytearray) -> int:
    return sum(map(raw.count, (b",", b":", b"[", b"{")))


def _inside(text: str) -> str:
    """Return a text as it stands between the quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
