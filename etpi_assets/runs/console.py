"""What a run prints: log lines, and on a terminal below them a live block with one line for each running process.

Dagster's own log of a run, in its web page, has everything. Dagster uses a logger only where the run config names it,
which `runner` does.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TextIO

import dagster as dg
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from etpi_assets.dagster_private import LOG_RECORD_METADATA_ATTR
from etpi_assets.runs.live_lines import live_lines
from etpi_resources.process.progress import NOT_ON_CONSOLE, Activity, LogDisplay, display, shown_on

REFRESHES_A_SECOND = 4
_DAGSTERS_OWN = ("[pipes]", "Dependencies for step ")
"""How messages begin that Dagster writes without an event; the summary of a failed run says what did not run."""


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


class _DisplayHandler(logging.Handler):
    """Shows records on the display of this process."""

    def emit(self, record: logging.LogRecord) -> None:
        display().line(self.format(record))


class _MessageFormatter(logging.Formatter):
    """Formats the message alone; of a failed step its description, or an unexpected error with its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        meta = getattr(record, LOG_RECORD_METADATA_ATTR, {})
        event = meta.get("dagster_event")
        if event is None or not event.is_step_failure:
            return str(meta.get("orig_message") or record.getMessage())
        error, expected = event.step_failure_data.error, event.step_failure_data.user_failure_data
        if error and error.cls_name == "DagsterExecutionInterruptedError":
            return f"{event.step_key} was interrupted"
        return f"FAILED: {expected.description if expected else f'{event.step_key}: {error}'}"


class _AssetLines(logging.Filter):
    """Passes lines that assets log, and failures; not Dagster's lines on every step and process."""

    def filter(self, record: logging.LogRecord) -> bool:
        if hasattr(record, NOT_ON_CONSOLE):
            return False
        meta = getattr(record, LOG_RECORD_METADATA_ATTR, {})
        event = meta.get("dagster_event")
        if event is None:
            return not str(meta.get("orig_message") or record.getMessage()).startswith(_DAGSTERS_OWN)
        return event.is_step_failure


@dg.logger(
    {"log_level": dg.Field(str, is_required=False, default_value="INFO", description="the threshold")},
    description="One line for each asset.",
)
def console_logger(context: dg.InitLoggerContext) -> logging.Logger:
    """Show the lines that assets log on the display of this process."""
    handler = _DisplayHandler()
    handler.setFormatter(_MessageFormatter())
    handler.addFilter(_AssetLines())
    logger = logging.Logger("etpi", context.logger_config["log_level"])
    logger.addHandler(handler)
    return logger
