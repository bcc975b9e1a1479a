"""Sequences of token ids: reading them from Arrow columns, and comparing them."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa


def arrays(lists: pa.ListArray) -> list[np.ndarray | None]:
    """Return each list of a column without nulls inside as an array, None for a null list; nothing is copied.

    A scalar's `values` give the same at ten times the cost.
    """
    values = lists.values.to_numpy()
    bounds = lists.offsets.to_numpy().tolist()
    each = [values[start:end] for start, end in itertools.pairwise(bounds)]
    if not lists.null_count:
        return [*each]
    return [ids if valid else None for ids, valid in zip(each, lists.is_valid().to_pylist(), strict=True)]


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the longest common prefix of two sequences of ids."""
    n = min(len(a), len(b))
    if not n:
        return 0
    differ = a[:n] != b[:n]
    first = int(differ.argmax())
    return first if differ[first] else n


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
