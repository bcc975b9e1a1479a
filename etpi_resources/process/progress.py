"""Progress of long work: what a process is doing, how far it is, and where that is shown.

Belongs here: the events that a display is given, counting, and the plain display for log files. Does not belong here:
the display for a terminal (`etpi_assets.runs.console`), or deciding what is worth showing.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self, TextIO

WORKER_VARIABLE = "ETPI_LANE"
"""Environment variable: the number of this process among those that run experiments side by side."""
NOT_ON_CONSOLE = "etpi_not_on_console"
"""Attribute of a log record that Dagster's log gets and the display does not: it shows the same in another form."""
UPDATE_SECONDS = 0.5
"""A display gets at most one update of a stage in so many seconds."""
FIRST_LOG_SECONDS = 5.0
LOG_SECONDS = 20.0
"""A log gets a line of a stage that runs so long, and then one every so often."""


@dataclass(frozen=True)
class Activity:
    """What one process is doing now.

    Attributes:
        label: the asset and its partition.
        stage: what is counted; "" where nothing is.
        done, total: how far the stage is.
        seconds: how long the activity has been running.
        note: shown at the end of the line (the loss, say).
    """

    label: str
    stage: str = ""
    done: int = 0
    total: int = 0
    seconds: float = 0.0
    note: str = ""

    def __str__(self) -> str:
        if not self.stage:
            return f"{self.label}: {clock(self.seconds)} so far"
        rate = self.done / self.seconds if self.seconds > 0 else 0.0
        share = f" ({self.done / self.total:.0%})" if self.total else ""
        left = f", {clock((self.total - self.done) / rate)} left" if 0 < self.done < self.total and rate else ""
        speed = f"{rate:.1f}/s" if rate >= 1 or not rate else f"{1 / rate:.1f} s each"
        note = f" ({self.note})" if self.note else ""
        counted = f"{self.label}: {self.stage} {self.done}/{self.total}{share}"
        return f"{counted}, {speed}, {clock(self.seconds)} so far{left}{note}"


class Display(Protocol):
    """Shows what processes say. Every method may be called from any thread."""

    def line(self, text: str) -> None:
        """Show a line (or several) that stays."""
        ...

    def show(self, activity: Activity | None, source: str = "") -> None:
        """Show what a process is doing; None: nothing any more.

        Args:
            source: names the process where one display serves several.
        """
        ...


class LogDisplay:
    """Plain lines with the time of day: a stage after 5 s and then every 20 s, so that a log stays readable.

    Nothing says that a stage is complete: the line of its asset follows.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        """`stream`: standard error, as it is when a line is written, by default."""
        self._stream = stream
        self._current: dict[str, Activity] = {}
        self._next: dict[str, float] = {}
        self._lock = threading.Lock()

    def line(self, text: str) -> None:
        with self._lock:
            self._write(text)

    def show(self, activity: Activity | None, source: str = "") -> None:
        with self._lock:
            before = self._current.pop(source, None)
            if activity is None:
                return
            self._current[source] = activity
            if before is None or (before.label, before.stage) != (activity.label, activity.stage):
                self._next[source] = FIRST_LOG_SECONDS
            if activity.stage and self._next[source] <= activity.seconds and activity.done < activity.total:
                self._next[source] = activity.seconds + LOG_SECONDS
                self._write(str(activity))

    def _write(self, text: str) -> None:
        stream = self._stream or sys.stderr
        try:
            stream.write(f"{time.strftime('%H:%M:%S')} {text}\n")
            stream.flush()
        except (OSError, ValueError):
            return  # the terminal went away; the work goes on


_display: Display = LogDisplay()
_acting_for: ContextVar[str | None] = ContextVar("acting_for", default=None)


def display() -> Display:
    """The display of this process: plain lines on standard error unless `shown_on` says otherwise."""
    return _display


@contextmanager
def shown_on(other: Display) -> Iterator[Display]:
    """Show everything on another display."""
    global _display
    before, _display = _display, other
    try:
        yield other
    finally:
        _display = before


@contextmanager
def acting_for(name: str) -> Iterator[None]:
    """Work on behalf of an experiment (or another partition), which messages about waiting name.

    The outermost name counts: a suite that is made because an experiment needs it is made for the experiment.
    """
    token = _acting_for.set(_acting_for.get() or name)
    try:
        yield
    finally:
        _acting_for.reset(token)


def acting_name() -> str | None:
    """The name given to `acting_for`; None outside of it."""
    return _acting_for.get()


class Progress:
    """Counts towards `total` and shows it, at most twice a second. Thread-safe; use it as a context manager.

    When it is closed, the display shows the label alone again.
    """

    def __init__(self, label: str, stage: str, total: int) -> None:
        self._activity = Activity(label, stage, 0, total)
        self._start = time.monotonic()
        self._shown_at = float("-inf")
        self._lock = threading.Lock()

    @property
    def done(self) -> int:
        """Units counted so far."""
        return self._activity.done

    def advance(self, n: int = 1, note: str = "") -> None:
        """Count `n` more units as done; a `note` replaces the one before."""
        with self._lock:
            now = time.monotonic()
            self._activity = replace(self._now(now), done=self._activity.done + n, note=note or self._activity.note)
            if now - self._shown_at >= UPDATE_SECONDS:
                self._shown_at = now
                _display.show(self._activity)

    def line(self) -> str:
        """The line as it would be shown now."""
        return str(self._now(time.monotonic()))

    def close(self) -> None:
        """Show that the asset goes on without this stage."""
        _display.show(Activity(self._activity.label))

    def _now(self, now: float) -> Activity:
        return replace(self._activity, seconds=now - self._start)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
