"""Progress of long work: counters, the events that a display shows, and the plain display for log files.

The display for a terminal is `etpi.run.console`.
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

LOGGED_PROGRESS = "progress: "
"""Prefixes of messages in Dagster's log that a live display shows in another form."""
UPDATE_SECONDS = 0.5
"""The shortest time between two updates of a stage on a display."""
FIRST_LOG_SECONDS = 20.0
LONGEST_LOG_SECONDS = 600.0
"""A log gets the first line of a stage after FIRST_LOG_SECONDS; the pause before the next one is as long as the stage
has been running, at most LONGEST_LOG_SECONDS."""


@dataclass(frozen=True)
class Activity:
    """The current activity of one process.

    Attributes:
        label: the asset and its partition.
        stage: what is counted; "" if nothing is.
        done, total: units counted so far, and in all.
        seconds: how long the activity has been running.
        note: shown at the end of the line, for example the loss.
        run: the experiment that the process works for; "" if for none.
        step, steps: the position of the asset in the experiment's chain, from 1, and the chain's length; 0 outside it.
    """

    label: str
    stage: str = ""
    done: int = 0
    total: int = 0
    seconds: float = 0.0
    note: str = ""
    run: str = ""
    step: int = 0
    steps: int = 0

    def cells(self) -> tuple[str, str, str, str, str, str]:
        """Return experiment, position, asset, share, detail and time as the cells of a table; some may be empty."""
        asset, _, key = self.label.partition(" of ")
        within = bool(self.run) and key in ("", self.run)
        position = f"step {self.step}/{self.steps}" if self.steps else ""
        if not self.stage:
            return self.run, position, asset if within else self.label, "", "", clock(self.seconds)
        rate = self.done / self.seconds if self.seconds > 0 else 0.0
        share = f"{int(100 * self.done / self.total)} %" if self.total else ""
        detail = f"{self.stage} {self.done}/{self.total}" + (f", {self.note}" if self.note else "")
        left = f"{clock((self.total - self.done) / rate)} left" if rate and self.done < self.total else ""
        return self.run, position, asset if within else self.label, share, detail, left or clock(self.seconds)

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
    """Shows lines and activities of processes. Thread-safe."""

    def line(self, text: str) -> None:
        """Show one or more permanent lines."""
        ...

    def show(self, activity: Activity | None, source: str = "") -> None:
        """Show the current activity of a process; None removes it.

        Args:
            source: the name of the process, if the display serves several.
        """
        ...


class LogDisplay:
    """Writes plain lines with the time of day: progress of a stage after 20, 40, 80, ... s, so that a log stays short.

    The end of a stage has no line of its own, because the line of its asset follows.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        """`stream`: by default standard error, looked up for each line."""
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
                pause = min(max(activity.seconds, FIRST_LOG_SECONDS), LONGEST_LOG_SECONDS)
                self._next[source] = activity.seconds + pause
                self._write("  ".join(filter(None, activity.cells())))

    def _write(self, text: str) -> None:
        stream = self._stream or sys.stderr
        try:
            stream.write(f"{time.strftime('%H:%M:%S')} {text}\n")
            stream.flush()
        except (OSError, ValueError):
            return  # the terminal is closed, but the work must go on


_display: Display = LogDisplay()
_acting_for: ContextVar[str | None] = ContextVar("acting_for", default=None)


def display() -> Display:
    """Return the display of this process: plain lines on standard error, unless `shown_on` sets another."""
    return _display


def set_display(new: Display) -> None:
    """Use another display until the process ends."""
    global _display
    _display = new


@contextmanager
def shown_on(new: Display) -> Iterator[Display]:
    """Use another display for the duration of the context."""
    global _display
    before, _display = _display, new
    try:
        yield new
    finally:
        _display = before


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
    """Counts towards `total` and shows the count at most twice a second. Thread-safe; use it as a context manager.

    When it closes, the display shows the label only.
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
        """Count `n` more units as done; a `note` replaces the previous one."""
        with self._lock:
            now = time.monotonic()
            self._activity = replace(self._now(now), done=self._activity.done + n, note=note or self._activity.note)
            if now - self._shown_at >= UPDATE_SECONDS:
                self._shown_at = now
                _display.show(self._activity)

    def line(self) -> str:
        """Return the line that a display would show now."""
        return str(self._now(time.monotonic()))

    def close(self) -> None:
        """Show the asset without this stage."""
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
    """Format seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
