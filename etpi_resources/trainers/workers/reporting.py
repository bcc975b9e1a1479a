"""A worker's side of its launcher (`trainers.pipes`): reads its config, reports its progress, leaves its result.

While a training runs, its steps are in `metrics.jsonl` in its folder, `scratch/train/<key>` of the
lake or `scratch/reinforce/<key>`: a line of JSON as soon as a step is logged (SftLogLine, GrpoLogLine). `config.json`
beside it has the label, seed and settings. The folder goes when the training is stored.

Imports the standard library, pydantic and, under Dagster, `dagster_pipes`; never `dagster`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from etpi_resources.trainers.contracts import StageProgress

CONFIG_FILE = "config.json"
RESULT_FILE = "result.json"
PIPES_VARIABLE = "DAGSTER_PIPES_CONTEXT"
PROGRESS_MARK = "etpi-progress "
"""Begins a line of stdout that is a StageProgress as JSON."""
PROGRESS_SECONDS = 1.0
RANK_VARIABLE = "RANK"
"""The number of this process where a worker has several."""

Config = TypeVar("Config", bound=BaseModel)


class Worker(Generic[Config]):
    """The running worker: its folder, its config, and its channel to the launcher. Only rank 0 logs, reports progress
    and leaves a result.

    Attributes:
        is_rank_0: whether this process is rank 0, or the only one.
    """

    def __init__(self, folder: Path, model: type[Config], pipes: Any = None) -> None:
        """Raises ValidationError where `config.json` in `folder` is no `model`."""
        self.folder = folder
        self.is_rank_0 = _is_rank_0()
        self.config: Config = model.model_validate_json((folder / CONFIG_FILE).read_bytes())
        self._pipes = pipes

    def log(self, line: str) -> None:
        """Write one line to stdout and, under Dagster, to the run's log."""
        if not self.is_rank_0:
            return
        print(line, flush=True)
        if self._pipes is not None:
            self._pipes.log.info(line)

    def stage(self, name: str, total: int) -> Stage:
        """Return a counter; the launcher displays its count, speed and time left."""
        return Stage(self, name, total)

    def report(self, progress: StageProgress) -> None:
        """Send progress as a marked line of stdout, which the launcher removes from the log."""
        if self.is_rank_0:
            print(f"{PROGRESS_MARK}{progress.model_dump_json()}", flush=True)

    def finish(self, result: BaseModel) -> None:
        """Leave the result for the launcher. The file appears last and complete, so its existence means success.

        Raises:
            ValueError: a figure is not finite, which JSON cannot express.
        """
        if not self.is_rank_0:
            return
        text = json.dumps(result.model_dump(mode="json"), allow_nan=False)
        beside = self.folder / f".{RESULT_FILE}"
        beside.write_text(text)
        beside.replace(self.folder / RESULT_FILE)


class Stage:
    """Counts towards a total and reports it: at the start, at most once a second, and at the end."""

    def __init__(self, worker: Worker[Any], name: str, total: int) -> None:
        self.worker, self.name, self.total = worker, name, total
        self.done = 0
        self.note = ""
        self._report()

    def advance(self, n: int = 1, note: str = "") -> None:
        """Count `n` more as done; `note` (the loss, for example) ends the displayed line."""
        self.done += n
        self.note = note or self.note
        now = time.monotonic()
        if now - self._reported >= PROGRESS_SECONDS or self.done >= self.total > self.done - n:
            self._report()

    def _report(self) -> None:
        self._reported = time.monotonic()
        self.worker.report(StageProgress(stage=self.name, done=self.done, total=self.total, note=self.note))


def _is_rank_0() -> bool:
    return os.environ.get(RANK_VARIABLE, "0") == "0"


@contextmanager
def open_worker(model: type[Config]) -> Iterator[Worker[Config]]:
    """Open this process's worker; its folder is the program's only argument, and `model` is the type of its config."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: python -m WORKER FOLDER, where FOLDER holds {CONFIG_FILE}")
    folder = Path(sys.argv[1])
    if PIPES_VARIABLE not in os.environ or not _is_rank_0():
        yield Worker(folder, model)
        return
    from dagster_pipes import open_dagster_pipes

    with open_dagster_pipes() as pipes:
        yield Worker(folder, model, pipes)
