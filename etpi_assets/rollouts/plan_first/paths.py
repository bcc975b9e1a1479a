"""The two files that a templated plan names.

Belongs here: choosing them, from the task's own texts or from one fixed list. Does not belong here: what is said of
them (`script`).

Paths are read by the pattern that the behaviours are scored with (`scoring.path_pattern`), so that a plan made of them
is one that scoring recognises.
"""

from __future__ import annotations

import posixpath
import random
import re
from collections.abc import Sequence

FIXED: tuple[tuple[str, str], ...] = (
    ("src/cli.py", "src/config.py"),
    ("flask/json/__init__.py", "flask/app.py"),
    ("jinja2/sandbox.py", "tests/test_sandbox.py"),
    ("server/routes.py", "server/models.py"),
    ("lib/parser.py", "lib/printer.py"),
)
"""Pairs of files that have nothing to do with any task."""


def task_paths(texts: Sequence[str], pattern: str) -> list[list[str]]:
    """For each text the relative paths it names: normalised, each once, in order. Raises re.error for a bad pattern."""
    found = []
    for text in texts:
        named = (posixpath.normpath(re.sub("/+", "/", match[0])) for match in re.finditer(pattern, text))
        found.append([path for path in dict.fromkeys(named) if not path.startswith(("/", ".."))])
    return found


def falls_back(texts: Sequence[str], pattern: str) -> bool:
    """Whether the texts name fewer than two files between them, so that no plan can be made of their own."""
    return len({path for named in task_paths(texts, pattern) for path in named}) < 2


def choose(texts: Sequence[str], pattern: str, how: str, rng: random.Random) -> tuple[str, str]:
    """(the first agent's file, the second's), two different ones.

    Args:
        texts: what each agent is told of the task, the first agent's first.
        how: "task" takes each agent's file from its own text where that names one that the other's choice leaves, and
            a pair of the fixed list where the texts name fewer than two; "fixed" always takes one of the list.
    """
    if how == "fixed" or falls_back(texts, pattern):
        return rng.choice(FIXED)
    named = task_paths(texts, pattern)
    anything = list(dict.fromkeys(path for paths in named for path in paths))
    first = rng.choice(named[0] or anything)
    left = [path for path in named[-1] if path != first] or [path for path in anything if path != first]
    return first, rng.choice(left)
