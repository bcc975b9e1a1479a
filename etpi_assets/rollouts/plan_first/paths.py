"""The two files that a templated plan names: from the task's own texts, or from a fixed list.

Paths are matched by the pattern that scoring uses (`scoring.path_pattern`), so that scoring recognises the plan.
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
"""Pairs of files that no task has."""


def task_paths(texts: Sequence[str], pattern: str) -> list[list[str]]:
    """Return the relative paths in each text: normalised, distinct, in order. Raises re.error for a bad pattern."""
    paths = []
    for text in texts:
        matches = (posixpath.normpath(re.sub("/+", "/", match[0])) for match in re.finditer(pattern, text))
        paths.append([path for path in dict.fromkeys(matches) if not path.startswith(("/", ".."))])
    return paths


def falls_back(texts: Sequence[str], pattern: str) -> bool:
    """Return whether the texts name fewer than two files in all, too few for a plan."""
    return len({path for paths in task_paths(texts, pattern) for path in paths}) < 2


def choose(texts: Sequence[str], pattern: str, how: str, rng: random.Random) -> tuple[str, str]:
    """Choose two different files: (the first agent's, the second's).

    Args:
        texts: the instruction of each agent, in order.
        how: "task" prefers a file from the agent's own text, and takes a pair of the fixed list if the texts name fewer
            than two files; "fixed" always takes a pair of the list.
    """
    if how == "fixed" or falls_back(texts, pattern):
        return rng.choice(FIXED)
    by_agent = task_paths(texts, pattern)
    every = list(dict.fromkeys(path for paths in by_agent for path in paths))
    first = rng.choice(by_agent[0] or every)
    rest = [path for path in by_agent[-1] if path != first] or [path for path in every if path != first]
    return first, rng.choice(rest)
