"""Start a worker in its own interpreter, and return its progress and its result or the reason why it failed.

Under Dagster the worker's log lines arrive through Dagster Pipes; without it (tests, benchmarks) everything else is the
same. A worker's folder holds `config.json` (written here), `worker.log`, `result.json` (left by a worker that
succeeded) and the worker's own files; `trainers.contracts` has the models of both JSON files.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel

from etpi_resources.process.progress import NOT_ON_CONSOLE, Progress
from etpi_resources.process.supervise import supervised
from etpi_resources.trainers.contracts import StageProgress
from etpi_resources.trainers.workers import ranks
from etpi_resources.trainers.workers.reporting import CONFIG_FILE, PROGRESS_MARK, RESULT_FILE

PYTHON_VARIABLE = "ETPI_TRAINER_PYTHON"
LAST_LINES = 20
STAGE_LOG_SECONDS = 30.0
"""How often the logs (not the display) get a line of a worker's progress."""
ROOT = Path(__file__).resolve().parents[2]

ENVIRONMENT: Mapping[str, str] = {
    # Idle threads sleep instead of spinning, because other processes want the cores.
    "OMP_WAIT_POLICY": "PASSIVE",
    # By default glibc returns large freed tensors to the kernel and faults them in again at the next step. Keeping them
    # made eager attention over 8 x 896 tokens three times as fast.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYTHONUNBUFFERED": "1",
}
"""Defaults of every worker's environment; the launcher's own variables override them."""

Result = TypeVar("Result", bound=BaseModel)


class WorkerFailed(RuntimeError):
    """A worker ended without a result; the message holds its last lines and the path of its log."""


def trainer_python() -> str:
    """Return the interpreter that runs workers: $ETPI_TRAINER_PYTHON, or this one."""
    return os.environ.get(PYTHON_VARIABLE) or sys.executable


def run_worker(
    module: str,
    config: BaseModel,
    folder: Path,
    result: type[Result],
    *,
    processes: int = 1,
    context: Any = None,
    echo: Callable[[str], None] | None = print,
    grace: float = 10.0,
) -> Result:
    """Run `python -m module folder` to its end and return its result.

    The worker is supervised: however this process ends, no process of the worker stays behind. Its progress goes to the
    display; `worker.log` and Dagster's log get a line of it every 30 s.

    Args:
        module: dotted name of a worker module.
        config: what the worker reads from `config.json`.
        folder: where it works; created if missing, an earlier result in it is removed.
        result: the model of its `result.json`.
        processes: how many processes train one sharded model (see `workers.ranks`); if one fails, all end.
        context: Dagster's execution context; the worker's lines then reach the run's log through Pipes.
        echo: gets every line of `worker.log` where no Dagster logs them; None prints nothing.
        grace: seconds the worker has to end after this process was interrupted.

    Raises:
        WorkerFailed: it ended with an error, was killed, or left no result.
        FileNotFoundError: the interpreter does not exist.
        ValidationError: its result is no `result`.
    """
    command = _command(module, folder, processes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT_FILE).unlink(missing_ok=True)
    (folder / CONFIG_FILE).write_text(config.model_dump_json(indent=1) + "\n")
    environment = _environment()
    last: deque[str] = deque(maxlen=LAST_LINES)
    with ExitStack() as stack:
        if context is not None:
            environment.update(stack.enter_context(_pipes_session(context)))
        log = stack.enter_context((folder / "worker.log").open("w"))
        stages = stack.enter_context(_StageDisplay(_label(context, module)))
        process = subprocess.Popen(
            supervised(command, grace=grace),
            env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace",
        )  # fmt: skip
        try:
            for line in _log_lines(process, stages, context):
                log.write(line + "\n")
                log.flush()
                last.append(line)
                if echo is not None and context is None:
                    echo(line)
            status = process.wait()
        finally:
            # An interrupt arrives in the loop above. The supervisor ends only after its whole process tree.
            if process.poll() is None:
                process.terminate()
                process.wait()
    if status != 0 or not (folder / RESULT_FILE).exists():
        raise WorkerFailed(_failure(module, status, last, folder / "worker.log"))
    return result.model_validate_json((folder / RESULT_FILE).read_bytes())


def _command(module: str, folder: Path, processes: int) -> list[str]:
    python = trainer_python()
    if not Path(python).exists():
        raise FileNotFoundError(f"{PYTHON_VARIABLE} names {python}, which does not exist")
    launcher = ["-m", ranks.MODULE, str(processes), module] if processes > 1 else ["-m", module]
    return [python, *launcher, str(folder)]


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**ENVIRONMENT, **os.environ, "PYTHONPATH": path}


def _log_lines(process: subprocess.Popen[str], stages: _StageDisplay, context: Any) -> Iterator[str]:
    """Yield the worker's lines for its log. Progress is displayed, and becomes a log line only now and then."""
    assert process.stdout is not None
    for line in process.stdout:
        text = line.rstrip("\n")
        if not text.startswith(PROGRESS_MARK):
            yield text
            continue
        progress = stages.show(StageProgress.model_validate_json(text.removeprefix(PROGRESS_MARK)))
        if progress is None:
            continue
        if context is not None:
            context.log.info(progress, extra={NOT_ON_CONSOLE: True})
        yield progress


class _StageDisplay:
    """Displays a worker's progress, and words it for logs now and then."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._name, self._logged = "", float("-inf")
        self._progress: Progress | None = None

    def show(self, update: StageProgress) -> str | None:
        """Display progress; return a line for the logs at most every 30 s and when the stage is complete."""
        if self._progress is None or self._name != update.stage:
            self.close()
            self._name, self._logged = update.stage, time.monotonic()
            self._progress = Progress(self._label, update.stage, update.total)
        self._progress.advance(update.done - self._progress.done, update.note)
        now = time.monotonic()
        if not update.done or (now - self._logged < STAGE_LOG_SECONDS and update.done < update.total):
            return None
        self._logged = now
        return self._progress.line()

    def close(self) -> None:
        """End the stage on display, if any."""
        if self._progress is not None:
            self._progress.close()
            self._progress = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _label(context: Any, module: str) -> str:
    """Return the asset and partition that start the worker; without Dagster, the worker's module."""
    if context is None:
        return module.rpartition(".")[2]
    asset = context.asset_key.path[-1]
    return f"{asset} of {context.partition_key}" if context.has_partition_key else asset


@contextmanager
def _pipes_session(context: Any) -> Iterator[Mapping[str, str]]:
    """Open a Pipes session over temporary files; yield the variables with which the worker joins it."""
    import dagster as dg

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.PreviewWarning)
        reader = dg.PipesTempFileMessageReader()
        with dg.open_pipes_session(context, dg.PipesTempFileContextInjector(), reader) as session:
            yield session.get_bootstrap_env_vars()


def _failure(module: str, status: int, last: Sequence[str], log: Path) -> str:
    name = module.rpartition(".")[2]
    if status == 0:
        how = "ended without a result"
    elif status > 128:
        how = f"was killed by signal {status - 128}"
        if status == 128 + 9:
            how += " (SIGKILL: the machine may have run out of memory; lower train.batch_tokens)"
    else:
        how = f"failed with status {status}"
    lines = "\n".join(f"  {line}" for line in last) or "  (nothing)"
    return f"{name} {how}. Last lines of {log}:\n{lines}"
