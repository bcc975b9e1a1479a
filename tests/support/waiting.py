"""Wait for another process, thread or server."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def until(
    get: Callable[[], Value],
    seconds: float = 60.0,
    problem: object = "",
    every: float = 0.05,
    ignored: type[Exception] | tuple[type[Exception], ...] = (),
) -> Value:
    """Return the first true value of `get`.

    Args:
        problem: text of the AssertionError that is raised after `seconds`, or a function that returns it.
        every: seconds between two calls.
        ignored: errors of `get` after which it is called again; the last one is raised after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            if value := get():
                return value
        except ignored:
            if time.monotonic() > deadline:
                raise
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:.0f} s in vain: {problem() if callable(problem) else problem}")
        time.sleep(every)
