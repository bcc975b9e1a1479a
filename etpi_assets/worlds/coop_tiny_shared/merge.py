"""Three-way merge of texts and trees.

Two different hunks conflict if they overlap or touch in the original, as in git; equal hunks merge into one. Not
`git merge-file`: its diff finds other hunks around blank lines, so some verdicts would change, and a process for each
file is about a hundred times slower.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import SequenceMatcher

LONGEST = 1_000_000
"""Characters of a text; the time and memory of a merge grow with the number of lines."""

_Hunk = tuple[int, int, tuple[str, ...]]


class MergeConflict(Exception):
    """Both sides changed the same lines of `path`."""

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(f"{path}: {detail}")
        self.path = path


def merge_trees(base: Mapping[str, str], ours: Mapping[str, str], theirs: Mapping[str, str]) -> dict[str, str]:
    """Return the files with both sides' changes. MergeConflict names the first path that conflicts."""
    merged: dict[str, str] = {}
    for path in sorted({*base, *ours, *theirs}):
        original, left, right = base.get(path), ours.get(path), theirs.get(path)
        if left == right or right == original:
            text = left
        elif left == original:
            text = right
        elif original is None:
            raise MergeConflict(path, "both added it, with different texts")
        elif left is None or right is None:
            raise MergeConflict(path, "one changed it, the other removed it")
        else:
            text = merge_texts(original, left, right, path)
        if text is not None:
            merged[path] = text
    return merged


def merge_texts(base: str, ours: str, theirs: str, path: str = "") -> str:
    """Return `base` with both sides' changes, by lines. Raises MergeConflict."""
    if max(len(ours), len(theirs)) > LONGEST:
        raise MergeConflict(path, f"longer than {LONGEST} characters")
    lines = _lines(base)
    hunks = sorted({*_hunks(lines, ours), *_hunks(lines, theirs)})
    merged: list[str] = []
    at = 0
    previous: _Hunk | None = None
    for hunk in hunks:
        start, end, replacement = hunk
        if previous is not None and start <= previous[1]:
            raise MergeConflict(path, f"both changed lines {previous[0] + 1} to {max(end, previous[1])}")
        merged += [*lines[at:start], *replacement]
        at, previous = end, hunk
    return "".join([*merged, *lines[at:]])


def _lines(text: str) -> list[str]:
    """Split into lines at newlines only, and keep them."""
    return [line for line in re.split(r"(?<=\n)", text) if line]


def _hunks(base: list[str], text: str) -> list[_Hunk]:
    """Return the changes as (first line, one past the last, replacement lines)."""
    changed = _lines(text)
    matcher = SequenceMatcher(None, base, changed, autojunk=False)
    return [(i1, i2, tuple(changed[j1:j2])) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal"]
