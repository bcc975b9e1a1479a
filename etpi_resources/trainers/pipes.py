"""Starting a worker in an interpreter of its own, and bringing back what it says, what came out, or why it failed.

Belongs here: the caller's side of a worker: its folder, environment, supervisor, log and errors. Under Dagster the
worker speaks through Dagster Pipes; without it (tests, benchmarks) everything else is the same. Does not belong here:
what a worker does (`workers`), or what to ask of it (the recipes of a stage).

A worker's folder holds `config.json` (written here), `worker.log`, `result.json` (left by the worker when it succeeded)
and whatever else it makes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from etpi_resources.process.progress import NOT_ON_CONSOLE, Progress
from etpi_resources.process.supervise import supervised
from etpi_resources.trainers.workers import ranks
from etpi_resources.trainers.workers.reporting import CONFIG_FILE, RESULT_FILE, UPDATE_MARK

PYTHON_VARIABLE = "ETPI_TRAINER_PYTHON"
LAST_LINES = 20
STAGE_LOG_SECONDS = 30.0
"""How often the logs (not the display) get a line of how far a worker is."""
ROOT = Path(__file__).resolve().parents[2]

ENVIRONMENT: Mapping[str, str] = {
    # Idle threads sleep instead of spinning: other processes want the cores.
    "OMP_WAIT_POLICY": "PASSIVE",
    # glibc hands large freed tensors back to the kernel and faults them in again at the next step; keeping them made
    # eager attention over 8 x 896 tokens three times as fast.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYTHONUNBUFFERED": "1",
}
"""What every worker's environment holds unless the caller's says otherwise."""


class WorkerFailed(RuntimeError):
    """A worker ended without a result; the message holds its last lines and where its whole log is."""


def trainer_python() -> str:
    """The interpreter workers run in: $ETPI_TRAINER_PYTHON, or this one."""
    return os.environ.get(PYTHON_VARIABLE) or sys.executable


def run_worker(
    module: str,
    config: Mapping[str, Any],
    folder: Path,
    *,
    processes: int = 1,
    context: Any = None,
    echo: Callable[[str], None] | None = print,
    grace: float = 10.0,
) -> dict[str, Any]:
    """Run `python -m module folder` to its end and return what it left in `result.json`.

    The worker is supervised: however this process ends, nothing of the worker stays. How far it is goes to the display;
    `worker.log` and Dagster's log get a line of it every 30 s.

    Args:
        module: dotted name of a worker module.
        config: what it is asked to do (JSON).
        folder: where it works; made where missing, its earlier result removed.
        processes: run it so many times over, to train one sharded model (see `workers.ranks`); one that fails ends all.
        context: Dagster's execution context; the worker's lines then reach the run's log through Pipes.
        echo: gets every line of `worker.log` where there is no Dagster to log them; None keeps them there alone.
        grace: seconds the worker has to end after this process was interrupted.

    Raises:
        WorkerFailed: it ended with an error, was killed, or left no result.
        FileNotFoundError: the interpreter does not exist.
    """
    python = trainer_python()
    if not Path(python).exists():
        raise FileNotFoundError(f"{PYTHON_VARIABLE} names {python}, which does not exist")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT_FILE).unlink(missing_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=1, sort_keys=True))
    environment = {**ENVIRONMENT, **os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [python, "-m", module, str(folder)]
    if processes > 1:
        command[2:2] = [ranks.MODULE, str(processes)]
    with ExitStack() as stack:
        if context is not None:
            environment.update(stack.enter_context(_pipes_session(context)))
        log = stack.enter_context((folder / "worker.log").open("w"))
        stages = stack.enter_context(_Stages(_label(context, module)))
        process = subprocess.Popen(
            supervised(command, grace=grace),
            env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace",
        )  # fmt: skip
        last: deque[str] = deque(maxlen=LAST_LINES)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                text = line.rstrip("\n")
                if text.startswith(UPDATE_MARK):
                    text = stages.update(json.loads(text.removeprefix(UPDATE_MARK)))
                    if text is None:
                        continue
                    if context is not None:
                        context.log.info(text, extra={NOT_ON_CONSOLE: True})
                log.write(text + "\n")
                log.flush()
                last.append(text)
                if echo is not None and context is None:
                    echo(text)
            status = process.wait()
        finally:
            # An interrupt lands in the loop above; the supervisor has gone only when its whole tree has.
            if process.poll() is None:
                process.terminate()
                process.wait()
    result = folder / RESULT_FILE
    if status != 0 or not result.exists():
        raise WorkerFailed(_failure(module, status, last, folder / "worker.log"))
    return json.loads(result.read_text())


class _Stages:
    """Shows how far a worker is, and words it for logs now and then."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._name, self._logged = "", float("-inf")
        self._progress: Progress | None = None

    def update(self, update: Mapping[str, Any]) -> str | None:
        """Show an update of the worker's; the line for the logs, at most every 30 s and where the stage is complete."""
        stage, done, total, note = (update[name] for name in ("stage", "done", "total", "note"))
        if self._progress is None or self._name != stage:
            self.close()
            self._name, self._progress, self._logged = stage, Progress(self._label, stage, total), time.monotonic()
        self._progress.advance(done - self._progress.done, note)
        now = time.monotonic()
        if not done or (now - self._logged < STAGE_LOG_SECONDS and done < total):
            return None
        self._logged = now
        return self._progress.line()

    def close(self) -> None:
        """End the stage that is shown, if any."""
        if self._progress is not None:
            self._progress.close()
            self._progress = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _label(context: Any, module: str) -> str:
    """The asset and partition that a worker works for; without Dagster, the worker's module."""
    if context is None:
        return module.rpartition(".")[2]
    asset = context.asset_key.path[-1]
    return f"{asset} of {context.partition_key}" if context.has_partition_key else asset


@contextmanager
def _pipes_session(context: Any) -> Iterator[Mapping[str, str]]:
    """Open a Pipes session over temporary files; the variables that let the worker join it."""
    import dagster as dg

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.PreviewWarning)
        reader = dg.PipesTempFileMessageReader()
        with dg.open_pipes_session(context, dg.PipesTempFileContextInjector(), reader) as session:
            yield session.get_bootstrap_env_vars()


def _failure(module: str, status: int, last: deque[str], log: Path) -> str:
    name = module.rpartition(".")[2]
    if status == 0:
        how = "ended without a result"
    elif status > 128:
        how = f"was ended by signal {status - 128}"
        if status == 128 + 9:
            how += " (SIGKILL: the machine may have run out of memory; lower train.batch_tokens)"
    else:
        how = f"failed with status {status}"
    said = "\n".join(f"  {line}" for line in last) or "  (nothing)"
    return f"{name} {how}. Its last lines, of {log}:\n{said}"
