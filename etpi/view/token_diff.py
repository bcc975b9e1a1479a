"""Difference of two lists of token ids, as kept, removed and added runs. Fast on long prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np

from etpi_resources.token_ids import common_prefix

Kind = Literal["kept", "removed", "added"]
CELLS = 1_000_000
"""The most pairs of ids that are compared one by one; longer parts are compared in pieces first."""
PIECE = 16


@dataclass(frozen=True)
class Run:
    """Ids in a row with one fate; `start` is their position in the old list (the new one where they were added)."""

    kind: Kind
    start: int
    ids: Sequence[int]


def diff(old: Sequence[int], new: Sequence[int], breaks: frozenset[int] = frozenset()) -> list[Run]:
    """Return the runs that turn `old` into `new`.

    Args:
        breaks: ids that end a line; parts that are too long are compared line by line.
    """
    old_array, new_array = np.asarray(old, np.int64), np.asarray(new, np.int64)
    before = common_prefix(old_array, new_array)
    after = common_prefix(old_array[before:][::-1], new_array[before:][::-1])
    middle_old, middle_new = old[before : len(old) - after], new[before : len(new) - after]
    runs = [Run("kept", 0, old[:before])]
    singly = len(middle_old) * len(middle_new) <= CELLS
    old_units, new_units = (
        [(number,) for number in ids] if singly else _lines(ids, breaks) for ids in (middle_old, middle_new)
    )
    old_ends, new_ends = (list(accumulate(map(len, units), initial=before)) for units in (old_units, new_units))
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, old_units, new_units, autojunk=False).get_opcodes():
        a1, a2, b1, b2 = old_ends[i1], old_ends[i2], new_ends[j1], new_ends[j2]
        if tag == "equal":
            runs.append(Run("kept", a1, old[a1:a2]))
        else:
            runs += [Run("removed", a1, old[a1:a2]), Run("added", b1, new[b1:b2])]
    runs.append(Run("kept", len(old) - after, old[len(old) - after :]))
    return _joined([run for run in runs if len(run.ids)])


def _lines(ids: Sequence[int], breaks: frozenset[int]) -> list[tuple[int, ...]]:
    """Split ids after each that ends a line; without such ids, into pieces."""
    if not breaks:
        return [tuple(ids[i : i + PIECE]) for i in range(0, len(ids), PIECE)]
    ends = [place + 1 for place, number in enumerate(ids) if number in breaks]
    return [tuple(ids[a:b]) for a, b in pairwise([0, *ends, len(ids)]) if a < b]


def _joined(runs: list[Run]) -> list[Run]:
    joined: list[Run] = []
    for run in runs:
        if joined and joined[-1].kind == run.kind and joined[-1].start + len(joined[-1].ids) == run.start:
            joined[-1] = Run(run.kind, joined[-1].start, [*joined[-1].ids, *run.ids])
        else:
            joined.append(run)
    return joined
