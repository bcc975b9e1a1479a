"""What a run prints: log lines, and on a terminal below them a live block with one line for each running process."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from etpi.run.live_lines import live_lines
from etpi_resources.process.progress import Activity, LogDisplay, shown_on

REFRESHES_A_SECOND = 4


@contextmanager
def showing() -> Iterator[None]:
    """Show this process's progress on stderr: as a live block on a terminal, else as plain lines."""
    with ExitStack() as stack:
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            terminal = stack.enter_context(os.fdopen(os.dup(sys.stderr.fileno()), "w"))
            live = stack.enter_context(TerminalDisplay(terminal))
            for stream in (sys.stderr, sys.stdout):
                if stream.isatty():
                    stack.enter_context(_captured(stream, live.line))
            stack.enter_context(shown_on(live))
        else:
            stack.enter_context(shown_on(LogDisplay()))
        yield


class TerminalDisplay:
    """Prints lines above a block that is redrawn in place, with one line for each running process."""

    def __init__(self, terminal: TextIO) -> None:
        self._rows: dict[str, tuple[Activity, float]] = {}
        self._lock = threading.Lock()
        self._console = Console(file=terminal, highlight=False)
        self._live = Live(
            get_renderable=self._block,
            console=self._console,
            refresh_per_second=REFRESHES_A_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def line(self, text: str) -> None:
        """Print above the block."""
        self._console.print(Text(f"{time.strftime('%H:%M:%S')} {text}"), soft_wrap=True)

    def show(self, activity: Activity | None, source: str = "") -> None:
        """Replace the line of a process; None removes it."""
        now = time.monotonic()
        with self._lock:
            if activity is None:
                self._rows.pop(source, None)
                return
            self._rows[source] = activity, now - activity.seconds

    def _block(self) -> Group:
        now = time.monotonic()
        with self._lock:
            rows = [replace(row, seconds=now - began) for _, (row, began) in sorted(self._rows.items())]
        lines = live_lines(rows, self._console.width - 2)
        return Group(*(Text(f"  {line}", no_wrap=True, overflow="ellipsis", style="cyan") for line in lines))

    def __enter__(self) -> TerminalDisplay:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()


@contextmanager
def _captured(stream: TextIO, line: Callable[[str], None]) -> Iterator[None]:
    """Pass every line that this process or a child writes to the stream's descriptor to `line`.

    Written straight to the terminal, it would land inside the live block.
    """
    descriptor = stream.fileno()
    stream.flush()
    original = os.dup(descriptor)
    reading, writing = os.pipe()
    os.dup2(writing, descriptor)
    os.close(writing)

    def forward() -> None:
        with os.fdopen(reading, errors="replace") as lines:
            for text in lines:
                line(text.rstrip("\n"))

    reader = threading.Thread(target=forward, daemon=True)
    reader.start()
    try:
        yield
    finally:
        stream.flush()
        os.dup2(original, descriptor)
        os.close(original)
        # A child that ends a moment later may still hold the other end of the pipe.
        reader.join(timeout=1.0)
