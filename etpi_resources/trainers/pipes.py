"""Start a worker in its own interpreter, and return its progress and its result or the reason why it failed.

Under Dagster the worker's log lines arrive through Dagster Pipes; without it (tests, benchmarks) everything else is the
same. A worker's folder holds `config.json` (written here), `worker.log`, `result.json` (left by a worker that
succeeded) and the worker's own files; `trainers.contracts` has the models of both JSON files.
"""

from __future__ import annotations

import subprocess
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel

from etpi_resources.backend import backend
from etpi_resources.errors import ExpectedError
from etpi_resources.process.progress import Progress
from etpi_resources.process.supervise import supervised
from etpi_resources.trainers.contracts import StageProgress
from etpi_resources.trainers.interpreter import visible, worker_command, worker_environment
from etpi_resources.trainers.workers import ranks
from etpi_resources.trainers.workers.reporting import CONFIG_FILE, PROGRESS_MARK, RESULT_FILE

LAST_LINES = 20

Result = TypeVar("Result", bound=BaseModel)


class WorkerFailed(ExpectedError, RuntimeError):
    """A worker ended without a result; the message holds its last lines and the path of its log."""


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

    The worker is supervised: however this process ends, no process of the worker stays behind. `worker.log` and
    Dagster's log get a line of its progress now and then (`process.progress`), and when a stage is complete.

    Args:
        module: dotted name of a worker module.
        config: what the worker reads from `config.json`.
        folder: where it works; created if missing, an earlier result in it is removed.
        result: the model of its `result.json`.
        processes: how many processes train one sharded model (see `workers.ranks`), on this node or, on a cluster
            whose nodes have fewer accelerators, over several; if one fails, all end.
        context: Dagster's execution context; the worker's lines then reach the run's log through Pipes.
        echo: gets every line of `worker.log` where no Dagster logs them; None prints nothing.
        grace: seconds the worker has to end after this process was interrupted.

    Raises:
        WorkerFailed: it ended with an error, was killed, or left no result.
        BackendError: it needs several nodes, and the cluster cannot run it; the message says what is missing.
        FileNotFoundError: the interpreter does not exist.
        ValidationError: its result is no `result`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT_FILE).unlink(missing_ok=True)
    (folder / CONFIG_FILE).write_text(config.model_dump_json(indent=1) + "\n")
    with ExitStack() as stack:
        log = stack.enter_context((folder / "worker.log").open("w"))

        def write(line: str) -> None:
            log.write(line + "\n")
            log.flush()
            if echo is not None and context is None:
                echo(line)

        def report(line: str) -> None:
            if context is not None:
                context.log.info(line)
            write(line)

        label, stages = _label(context, module), dict[str, Progress]()
        elsewhere = backend()
        if elsewhere and elsewhere.spans_nodes(processes):
            running = elsewhere.ranks(module, folder, processes, context=context, grace=grace, log=write)
        else:
            running = _on_this_node(module, folder, processes, context, grace)
        launched = stack.enter_context(running)
        for line in launched.lines():
            if not line.startswith(PROGRESS_MARK):
                write(line)
                continue
            update = StageProgress.model_validate_json(line.removeprefix(PROGRESS_MARK))
            progress = stages.setdefault(update.stage, Progress(label, update.stage, update.total, report))
            progress.advance(update.done - progress.done, update.note)
            if update.done == update.total > 0:
                report(progress.line(update.note))
        if failure := launched.failure():
            raise WorkerFailed(f"{module.rpartition('.')[2]} {failure}\nThe log is {folder / 'worker.log'}")
        text = launched.result()
    if text is None:
        raise WorkerFailed(f"{module.rpartition('.')[2]} ended without a result. The log is {folder / 'worker.log'}")
    return result.model_validate_json(text)


class RunningWorker(Protocol):
    """A running worker."""

    def lines(self) -> Iterator[str]:
        """Yield the lines that it writes, until it has ended."""
        ...

    def failure(self) -> str | None:
        """Return how it failed, with its last lines, once it has ended; None if it did not."""
        ...

    def result(self) -> str | None:
        """Return the text of the result that it left, if it did."""
        ...


@contextmanager
def _on_this_node(module: str, folder: Path, processes: int, context: Any, grace: float) -> Iterator[RunningWorker]:
    """Start a worker of one or several processes here, under a supervisor; it sees a GPU for each process."""
    ranked = ["-m", ranks.MODULE, str(processes), module] if processes > 1 else ["-m", module]
    command = worker_command(*ranked, str(folder))
    environment = {**worker_environment(), **visible(0, processes)}
    with ExitStack() as stack:
        if context is not None:
            environment.update(stack.enter_context(_pipes_session(context)))
        process = subprocess.Popen(
            supervised(command, grace=grace),
            env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace",
        )  # fmt: skip
        try:
            yield _LocalWorker(process, folder)
        finally:
            # An interrupt arrives while the lines are read. The supervisor ends only after its whole process tree.
            if process.poll() is None:
                process.terminate()
                process.wait()


class _LocalWorker:
    """A worker that runs on this node."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self._folder = process, folder
        self._last: deque[str] = deque(maxlen=LAST_LINES)

    def lines(self) -> Iterator[str]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.rstrip("\n")
            if not text.startswith(PROGRESS_MARK):
                self._last.append(text)
            yield text

    def failure(self) -> str | None:
        status = self._process.wait()
        if status == 0 and (self._folder / RESULT_FILE).exists():
            return None
        return _failure(status, self._last)

    def result(self) -> str | None:
        return (self._folder / RESULT_FILE).read_text()


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


LESS_MEMORY = "a lower ETPI_MICRO_TOKENS takes fewer tokens a pass in fine-tuning, for steps of the same size"


def _failure(status: int, last: Sequence[str]) -> str:
    if status == 0:
        how = "ended without a result"
    elif status > 128:
        how = f"was killed by signal {status - 128}"
        if status == 128 + 9:
            how += f" (SIGKILL: the machine may have run out of memory; {LESS_MEMORY})"
    else:
        how = f"failed with status {status}"
        if any("out of memory" in line for line in last):
            how += f" ({LESS_MEMORY})"
    lines = "\n".join(f"  {line}" for line in last) or "  (nothing)"
    return f"{how}. Last lines:\n{lines}"
