"""The hash by which a value is known again.

Belongs here: hashing what JSON can say. Does not belong here: what a key or version is made of.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any


def json_hash(value: Any) -> str:
    """SHA-256, in hex, of the value as JSON with its keys in order (any text at all, lone surrogates too)."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
