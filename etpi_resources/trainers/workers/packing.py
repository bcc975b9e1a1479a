"""Pack sequences of different lengths into rows of few lengths, with little padding. Only numbers, without torch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

LENGTH_MULTIPLE = 64
MAX_LENGTHS = 8


def padded_lengths(lengths: Sequence[int], multiple: int = LENGTH_MULTIPLE, most: int = MAX_LENGTHS) -> list[int]:
    """At most `most` lengths, multiples of `multiple`, such that padding each sequence up to the next of them adds the
    fewest tokens (exact, by dynamic programming over the distinct rounded lengths)."""
    rounded, counts = np.unique(-(-np.asarray(lengths) // multiple) * multiple, return_counts=True)
    below = np.concatenate([[0], np.cumsum(counts)])
    n = len(rounded)
    best = np.full((most + 1, n + 1), np.inf)
    best[:, 0] = 0
    start = np.zeros((most + 1, n + 1), dtype=int)
    for k in range(1, most + 1):
        for end in range(1, n + 1):
            # The last group is the rounded lengths from some start to `end`, all padded to the longest of them.
            costs = best[k - 1, :end] + rounded[end - 1] * (below[end] - below[:end])
            start[k, end] = int(np.argmin(costs))
            best[k, end] = costs[start[k, end]]
    chosen, end, k = [], n, most
    while end:
        chosen.append(int(rounded[end - 1]))
        end, k = int(start[k, end]), k - 1
    return sorted(chosen)


def pack(lengths: Sequence[int], row_tokens: int, rng: np.random.Generator) -> list[tuple[tuple[int, ...], int]]:
    """Rows of (which sequences, padded length) that hold each sequence once, whole.

    A row has `row_tokens` tokens, rounded down to a multiple of 64; a row for a longer sequence has that sequence's
    length, padded to one of at most eight. Longest first, each sequence goes into the row that it fills most (best fit
    decreasing); among equal lengths the order is random. With `row_tokens` 0 every sequence gets a row of its own.
    """
    total = -(-sum(lengths) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    usual = min(row_tokens // LENGTH_MULTIPLE * LENGTH_MULTIPLE, total)
    long = [n for n in lengths if n > usual]
    longer = padded_lengths(long) if long else []
    rows: list[list[int]] = []
    sizes: list[int] = []
    open_rows: list[tuple[int, int]] = []  # (free tokens, row), in order
    shuffled = rng.permutation(len(lengths))
    for index in shuffled[np.argsort(-np.asarray(lengths)[shuffled], kind="stable")].tolist():
        length = lengths[index]
        at = bisect_left(open_rows, (length, -1))
        if at < len(open_rows):
            free, row = open_rows.pop(at)
        else:
            free, row = next(size for size in (usual, *longer) if length <= size), len(rows)
            rows.append([])
            sizes.append(free)
        rows[row].append(index)
        if free > length and row_tokens:
            insort(open_rows, (free - length, row))
    return [(tuple(members), size) for members, size in zip(rows, sizes, strict=True)]
