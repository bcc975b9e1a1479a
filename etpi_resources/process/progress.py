"""Progress of long work, as lines of a log: at first soon, then after ever longer pauses, so that a log stays short."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

FIRST_LOG_SECONDS = 3.0
LONGEST_LOG_SECONDS = 600.0
"""A log gets the first line of a stage after FIRST_LOG_SECONDS; the pause before the next one is as long as the stage
has been running, at most LONGEST_LOG_SECONDS."""

_acting_for: ContextVar[str | None] = ContextVar("acting_for", default=None)


@contextmanager
def acting_for(name: str) -> Iterator[None]:
    """Name the experiment (or other partition) that this thread works for, for messages of waiting processes.

    The outermost name wins: a suite that an experiment needs is built for the experiment.
    """
    token = _acting_for.set(_acting_for.get() or name)
    try:
        yield
    finally:
        _acting_for.reset(token)


def acting_name() -> str | None:
    """Return the name passed to `acting_for`; None outside of it."""
    return _acting_for.get()


class Progress:
    """Counts towards `total` and logs the count now and then. Thread-safe.

    The end of a stage has no line of its own, because the line of its asset follows.
    """

    def __init__(self, label: str, stage: str, total: int, log: Callable[[str], None]) -> None:
        """
        Args:
            label: the asset and its partition.
            stage: what is counted.
        """
        self._label, self._stage, self._total, self._log = label, stage, total, log
        self._start, self._next = time.monotonic(), FIRST_LOG_SECONDS
        self.done = 0
        self._started: tuple[float, int] | None = None
        self._lock = threading.Lock()

    def advance(self, n: int = 1, note: str = "") -> None:
        """Count `n` more units as done; a `note` ends the line, for example the loss."""
        with self._lock:
            self.done += n
            seconds = time.monotonic() - self._start
            if n:
                self._started = self._started or (seconds, self.done)
            if seconds >= self._next and self.done < self._total:
                self._next = seconds + min(seconds, LONGEST_LOG_SECONDS)
                self._log(self.line(note))

    def line(self, note: str = "") -> str:
        """Return stage, count, and rate and time left as a line of a log.

        The first units tell no rate, because they wait for processes, models and compilers to start.
        """
        seconds = time.monotonic() - self._start
        share = f" ({self.done / self._total:.0%})" if self._total else ""
        before, first = self._started or (seconds, self.done)
        rate, left = "", ""
        if self.done > first:
            each = (seconds - before) / (self.done - first)
            rate = f", {each:.1f} s each" if each > 1 else f", {1 / max(each, 1e-9):.1f}/s"
            left = f", {clock((self._total - self.done) * each)} left" if self.done < self._total else ""
        counted = f"{self._label}: {self._stage} {self.done}/{self._total}{share}"
        return f"{counted}{rate}, {clock(seconds)} so far{left}" + (f" ({note})" if note else "")


def clock(seconds: float) -> str:
    """Format seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
