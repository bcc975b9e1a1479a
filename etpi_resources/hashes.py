"""The hash of a JSON value, for keys and versions."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def json_hash(value: Any) -> str:
    """Return the SHA-256, in hex, of the value as JSON with sorted keys; any text works, lone surrogates too."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
