"""Difference of two lists of token ids, as kept, removed and added runs. Fast on long prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
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
    runs += _middle(middle_old, middle_new, before, before, breaks)
    runs.append(Run("kept", len(old) - after, old[len(old) - after :]))
    return _joined([run for run in runs if len(run.ids)])


def _middle(old: Sequence[int], new: Sequence[int], at: int, new_at: int, breaks: frozenset[int]) -> list[Run]:
    if len(old) * len(new) <= CELLS:
        return _runs(old, new, [[i] for i in old], [[i] for i in new], at, new_at)
    return _runs(old, new, _lines(old, breaks), _lines(new, breaks), at, new_at)


def _runs(
    old: Sequence[int],
    new: Sequence[int],
    old_units: list[list[int]],
    new_units: list[list[int]],
    at: int,
    new_at: int,
) -> list[Run]:
    matcher = SequenceMatcher(None, [*map(tuple, old_units)], [*map(tuple, new_units)], autojunk=False)
    old_ends, new_ends = _ends(old_units), _ends(new_units)
    runs: list[Run] = []
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        a1, a2, b1, b2 = old_ends[i1], old_ends[i2], new_ends[j1], new_ends[j2]
        if tag == "equal":
            runs.append(Run("kept", at + a1, old[a1:a2]))
            continue
        runs.append(Run("removed", at + a1, old[a1:a2]))
        runs.append(Run("added", new_at + b1, new[b1:b2]))
    return runs


def _ends(units: list[list[int]]) -> list[int]:
    ends = [0]
    for unit in units:
        ends.append(ends[-1] + len(unit))
    return ends


def _lines(ids: Sequence[int], breaks: frozenset[int]) -> list[list[int]]:
    """Split ids after each that ends a line; without such ids, into pieces."""
    if not breaks:
        return [list(ids[i : i + PIECE]) for i in range(0, len(ids), PIECE)]
    lines: list[list[int]] = [[]]
    for number in ids:
        lines[-1].append(number)
        if number in breaks:
            lines.append([])
    return [line for line in lines if line]


def _joined(runs: list[Run]) -> list[Run]:
    joined: list[Run] = []
    for run in runs:
        if joined and joined[-1].kind == run.kind and joined[-1].start + len(joined[-1].ids) == run.start:
            joined[-1] = Run(run.kind, joined[-1].start, [*joined[-1].ids, *run.ids])
        else:
            joined.append(run)
    return joined
