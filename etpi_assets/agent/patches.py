"""Unified diffs between two sets of text files."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

_NO_NEWLINE = "\\ No newline at end of file\n"


def unified_diff(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return the changes from `before` to `after` (path -> text) as `git diff` does, paths sorted; "" if equal."""
    parts: list[str] = []
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path), after.get(path)
        if old == new:
            continue
        parts.append(f"diff --git a/{path} b/{path}\n")
        lines = difflib.unified_diff(
            _lines(old),
            _lines(new),
            "/dev/null" if old is None else f"a/{path}",
            "/dev/null" if new is None else f"b/{path}",
        )
        parts.extend(line if line.endswith("\n") else f"{line}\n{_NO_NEWLINE}" for line in lines)
    return "".join(parts)


def _lines(text: str | None) -> list[str]:
    """Split at "\\n" alone, as diff tools do; str.splitlines also splits at form feeds and the like."""
    lines = (text or "").split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
