"""Unified diffs between two sets of text files."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping

_NO_NEWLINE = "\\ No newline at end of file\n"
_MOST_CHARACTERS, _MOST_PAIRS = 1 << 20, 2_000_000
"""Characters, and pairs of equal lines, of files that difflib compares: its cost may grow with their square."""


def unified_diff(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return the changes from `before` to `after` (path -> text) as `git diff` does, paths sorted; "" if equal.

    Between the first and the last line that changed, a large file is replaced as a whole.
    """
    parts: list[str] = []
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path), after.get(path)
        if old == new:
            continue
        parts.append(f"diff --git a/{path} b/{path}\n")
        names = ("/dev/null" if old is None else f"a/{path}", "/dev/null" if new is None else f"b/{path}")
        if _is_large(old or "", new or ""):
            parts.append(_replaced(old or "", new or "", *names))
            continue
        lines = difflib.unified_diff(_lines(old), _lines(new), *names)
        parts.extend(line if line.endswith("\n") else f"{line}\n{_NO_NEWLINE}" for line in lines)
    return "".join(parts)


def _is_large(old: str, new: str) -> bool:
    if len(old) + len(new) > _MOST_CHARACTERS:
        return True
    old_lines, new_lines = Counter(_lines(old)), Counter(_lines(new))
    total = new_lines.total()
    # difflib itself ignores lines that are more than a hundredth of a long file.
    popular = total // 100 + 1 if total >= 200 else total
    pairs = (count * new_lines[line] for line, count in old_lines.items() if new_lines[line] <= popular)
    return sum(pairs) > _MOST_PAIRS


def _replaced(old: str, new: str, old_name: str, new_name: str) -> str:
    """Return a diff of one hunk. It works on whole texts, because the lines of a large one take memory."""
    start = old.rfind("\n", 0, _common(old, new)) + 1
    same = _common(old[start:][::-1], new[start:][::-1])
    line_end = old.find("\n", len(old) - same) if same else -1
    rest = old[line_end + 1 :] if line_end >= 0 else ""  # the equal lines at the end
    old_part, new_part = old[start : len(old) - len(rest)], new[start : len(new) - len(rest)]
    above, below = start, 0
    for _ in range(3):  # lines of context
        above = old.rfind("\n", 0, max(0, above - 1)) + 1
        below = rest.find("\n", below) + 1 or len(rest)
    head, tail, first = old[above:start], rest[:below], old.count("\n", 0, above)
    spans = [_span(first, _count(head + part + tail)) for part in (old_part, new_part)]
    return f"--- {old_name}\n+++ {new_name}\n@@ -{spans[0]} +{spans[1]} @@\n" + "".join(
        _marked(mark, text) for mark, text in ((" ", head), ("-", old_part), ("+", new_part), (" ", tail))
    )


def _common(old: str, new: str) -> int:
    """Return the number of equal characters at the start."""
    low, high = 0, min(len(old), len(new))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if old[low:middle] == new[low:middle] else (low, middle - 1)
    return low


def _marked(mark: str, text: str) -> str:
    if not text:
        return ""
    end = "\n" if text.endswith("\n") else f"\n{_NO_NEWLINE}"
    return mark + text.removesuffix("\n").replace("\n", f"\n{mark}") + end


def _count(text: str) -> int:
    return text.count("\n") + (text[-1:] not in ("", "\n"))


def _span(start: int, count: int) -> str:
    return f"{start + 1 if count else start},{count}"


def _lines(text: str | None) -> list[str]:
    """Split at "\\n" alone, as diff tools do; str.splitlines also splits at form feeds and the like."""
    lines = (text or "").split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
