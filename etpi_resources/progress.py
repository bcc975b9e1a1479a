"""Progress of long work, for a person at a terminal and for a log file.

Belongs here: how far, how fast, how long still. Does not belong here: deciding what is worth showing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType
from typing import Self, TextIO

LANE = "ETPI_LANE"
"""Environment variable: which this process is of several that share a terminal, where none can rewrite a line."""
TERMINAL_SECONDS = 0.5
LOG_SECONDS = 15.0


class Progress:
    """Counts towards `total` and prints `label: stage done/total, rate, time left`.

    On a terminal the line is rewritten in place twice a second; anywhere else a line is added every 15 s, so that a log
    stays readable. Thread-safe. The last line is always printed; work that ends within a second and was never shown
    prints nothing.
    """

    def __init__(self, label: str, stage: str, total: int, stream: TextIO | None = None) -> None:
        self.label, self.stage, self.total = label, stage, total
        self.done = 0
        self._stream = stream or sys.stderr
        self._in_place = self._stream.isatty() and LANE not in os.environ
        self._interval = TERMINAL_SECONDS if self._in_place else LOG_SECONDS
        self._start = self._shown_at = time.monotonic()
        self._shown = False
        self._closed = False
        self._lock = threading.Lock()

    def advance(self, n: int = 1) -> None:
        """Count `n` more units as done."""
        with self._lock:
            self.done += n
            now = time.monotonic()
            if self.done >= self.total:
                self._finish()
            elif now - self._shown_at >= self._interval:
                self._shown_at, self._shown = now, True
                self._print(self.line())

    def line(self) -> str:
        """The line as it would be printed now."""
        seconds = time.monotonic() - self._start
        rate = self.done / seconds if seconds > 0 else 0.0
        share = f" ({self.done / self.total:.0%})" if self.total else ""
        left = f", {_clock((self.total - self.done) / rate)} left" if 0 < self.done < self.total and rate else ""
        speed = f"{rate:.1f}/s" if rate >= 1 or not rate else f"{1 / rate:.1f} s each"
        return f"{self.label}: {self.stage} {self.done}/{self.total}{share}, {speed}, {_clock(seconds)} so far{left}"

    def close(self) -> None:
        """Print where it stands; calling it twice is harmless."""
        with self._lock:
            self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _finish(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._shown or time.monotonic() - self._start >= 1.0:
            self._print(self.line(), end="\n")

    def _print(self, text: str, end: str | None = None) -> None:
        head, tail = ("\r\x1b[K", end or "") if self._in_place else ("", "\n")
        try:
            self._stream.write(head + text + tail)
            self._stream.flush()
        except (OSError, ValueError):
            return  # the terminal went away; the work goes on


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
