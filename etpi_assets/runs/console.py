"""What a run shows to the person who started it: lines that stay, and on a terminal a block of what is running.

Belongs here: the form of log lines, and the display for a terminal. Does not belong here: what is logged; Dagster's web
page has everything. Dagster uses a logger only where the run's configuration names it, which `runner` does.
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
from etpi_resources.process.progress import NOT_ON_CONSOLE, Activity, LogDisplay, display, shown_on

REFRESHES_A_SECOND = 4


@contextmanager
def showing() -> Iterator[None]:
    """Show what this process does on standard error until the end of the block: as a live block on a terminal, as plain
    lines anywhere else."""
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
    """Lines above a block that is rewritten in place: a line for each process that is doing something."""

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
        """Replace the line of a process, or take it away."""
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
        return Group(*(Text(f"  {row}", no_wrap=True, overflow="ellipsis", style="cyan") for row in rows))

    def __enter__(self) -> TerminalDisplay:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()


@contextmanager
def _captured(stream: TextIO, line: Callable[[str], None]) -> Iterator[None]:
    """Hand every line written to a stream's descriptor, by this process or its children, to `line`: written straight to
    the terminal, it would land in the block."""
    descriptor = stream.fileno()
    stream.flush()
    kept = os.dup(descriptor)
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
        os.dup2(kept, descriptor)
        os.close(kept)
        # A process that outlives this one for a moment may still hold the other end of the pipe.
        reader.join(timeout=1.0)


class _ToDisplay(logging.Handler):
    """Shows records on the display of this process."""

    def emit(self, record: logging.LogRecord) -> None:
        display().line(self.format(record))


class _Lines(logging.Formatter):
    """A message alone; a failed step is its own words, with a traceback only where the error was not foreseen."""

    def format(self, record: logging.LogRecord) -> str:
        meta = getattr(record, LOG_RECORD_METADATA_ATTR, {})
        event = meta.get("dagster_event")
        if event is None or not event.is_step_failure:
            return str(meta.get("orig_message") or record.getMessage())
        error, foreseen = event.step_failure_data.error, event.step_failure_data.user_failure_data
        if error and error.cls_name == "DagsterExecutionInterruptedError":
            return f"{event.step_key} was interrupted"
        return f"FAILED: {foreseen.description if foreseen else f'{event.step_key}: {error}'}"


class _OwnLines(logging.Filter):
    """Assets' own lines and failures; not Dagster's account of every step and process, which is in its log."""

    def filter(self, record: logging.LogRecord) -> bool:
        if hasattr(record, NOT_ON_CONSOLE):
            return False
        meta = getattr(record, LOG_RECORD_METADATA_ATTR, {})
        event = meta.get("dagster_event")
        if event is None:
            return not str(meta.get("orig_message", "")).startswith("[pipes]")
        return event.is_step_failure


@dg.logger(
    {"log_level": dg.Field(str, is_required=False, default_value="INFO", description="the threshold")},
    description="One line for what an asset made.",
)
def console_logger(context: dg.InitLoggerContext) -> logging.Logger:
    """Shows an asset's own lines on the display of this process."""
    handler = _ToDisplay()
    handler.setFormatter(_Lines())
    handler.addFilter(_OwnLines())
    logger = logging.Logger("etpi", context.logger_config["log_level"])
    logger.addHandler(handler)
    return logger
