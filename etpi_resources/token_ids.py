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
        if len(part) and (part[-1] != ids[end - 1] or not _equal(part, ids[start:end])):
            return False
        end = start
    return True


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two sequences of one length are equal; those that are one piece of memory are not compared."""
    same_memory = a.dtype == b.dtype and a.__array_interface__["data"] == b.__array_interface__["data"]
    return (same_memory and a.strides == b.strides) or bool((a == b).all())


class GrowingIds:
    """Ids that mostly grow at the end, such as a conversation's: `extend` copies only what it adds.

    The arrays that it returns are views of one buffer, which later calls only write behind them.
    """

    def __init__(self) -> None:
        self._buffer = np.empty(0, dtype=np.int32)
        self._used = 0

    def extend(self, ids: np.ndarray | None, *more: np.ndarray) -> np.ndarray:
        """Return `ids`, an array from this buffer or None for no ids, followed by `more`."""
        start = 0 if ids is None else len(ids)
        end = start + sum(map(len, more))
        if start != self._used or end > len(self._buffer) or (ids is not None and ids.base is not self._buffer):
            # It continues something else than the last array, or there is no room.
            self._buffer = np.empty(max(2 * end, 1024), dtype=np.int32)
            if ids is not None:
                self._buffer[:start] = ids
        for part in more:
            self._buffer[start : start + len(part)] = part
            start += len(part)
        self._used = end
        return self._buffer[:end]
