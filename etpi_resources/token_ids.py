"""Comparing sequences of token ids."""

from __future__ import annotations

import numpy as np


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the longest common prefix of two sequences of ids."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


def begins_with(ids: np.ndarray, *parts: np.ndarray) -> bool:
    """Return whether `ids` begins with the parts, one after the other; False if they are all empty."""
    end = sum(map(len, parts))
    if not 0 < end <= len(ids):
        return False
    # From the end, and the last id first: sequences of one conversation differ there, so most calls compare one id.
    for part in reversed(parts):
        start = end - len(part)
        if len(part) and (part[-1] != ids[end - 1] or not np.array_equal(part, ids[start:end])):
            return False
        end = start
    return True
