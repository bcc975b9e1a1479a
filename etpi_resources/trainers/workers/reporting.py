"""A worker's side of the launcher: what it was asked for, how far it is, what came out.

Belongs here: the files and lines that a worker and `trainers.pipes` agree on. Does not belong here: training. Imports
the standard library and, where the caller is Dagster, `dagster_pipes`; never `dagster`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.json"
RESULT_FILE = "result.json"
PIPES_VARIABLE = "DAGSTER_PIPES_CONTEXT"
UPDATE_MARK = "etpi-progress "
"""Begins a line of stdout that is an update of a stage (JSON: stage, done, total, note)."""
UPDATE_SECONDS = 1.0
RANK_VARIABLE = "RANK"
"""Which of a worker's processes this is, where there are several; the first, 0, speaks for all."""


class Worker:
    """The running worker: its configuration, its folder, its voice. Of several processes only the first speaks and
    leaves a result.

    Attributes:
        speaks: whether this process is the first, or the only one.
    """

    def __init__(self, folder: Path, pipes: Any = None) -> None:
        self.folder = folder
        self.speaks = _is_first()
        self.config: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text())
        self._pipes = pipes

    def say(self, line: str) -> None:
        """One line to stdout and, under Dagster, to the run's log."""
        if not self.speaks:
            return
        print(line, flush=True)
        if self._pipes is not None:
            self._pipes.log.info(line)

    def stage(self, name: str, total: int) -> Stage:
        """A counter whose count, rate and time left the launcher shows."""
        return Stage(self, name, total)

    def send(self, update: Mapping[str, Any]) -> None:
        """One update of a stage, as a marked line of stdout that the launcher takes out again."""
        if self.speaks:
            print(f"{UPDATE_MARK}{json.dumps(update)}", flush=True)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Leave the result (JSON) for the caller. Written last and whole: where it stands, the worker succeeded.

        Raises:
            ValueError: a figure is not finite; JSON has no word for it.
        """
        if not self.speaks:
            return
        text = json.dumps(result, allow_nan=False)
        beside = self.folder / f".{RESULT_FILE}"
        beside.write_text(text)
        beside.replace(self.folder / RESULT_FILE)


class Stage:
    """Counts towards a total and sends it to the launcher: at the start, at most once a second, and at the end."""

    def __init__(self, worker: Worker, name: str, total: int) -> None:
        self.worker, self.name, self.total = worker, name, total
        self.done = 0
        self.note = ""
        self._send()

    def advance(self, n: int = 1, note: str = "") -> None:
        """Count `n` more as done; `note` (the loss, say) is shown at the end of the line."""
        self.done += n
        self.note = note or self.note
        now = time.monotonic()
        if now - self._sent >= UPDATE_SECONDS or self.done >= self.total > self.done - n:
            self._send()

    def _send(self) -> None:
        self._sent = time.monotonic()
        self.worker.send({"stage": self.name, "done": self.done, "total": self.total, "note": self.note})


def _is_first() -> bool:
    return os.environ.get(RANK_VARIABLE, "0") == "0"


@contextmanager
def open_worker() -> Iterator[Worker]:
    """The worker of this process, whose folder is the program's one argument."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: python -m WORKER FOLDER, where FOLDER holds {CONFIG_FILE}")
    folder = Path(sys.argv[1])
    if PIPES_VARIABLE not in os.environ or not _is_first():
        yield Worker(folder)
        return
    from dagster_pipes import open_dagster_pipes

    with open_dagster_pipes() as pipes:
        yield Worker(folder, pipes)
