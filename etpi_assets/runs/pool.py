"""Run several experiments at once in a pool of worker processes; a worker runs one experiment after another.

A model of an embedded world uses little more than one core, so on a machine without an accelerator two experiments at
once take little longer than one. Two experiments that need the same missing rollouts or base gain nothing, because one
computes them while the other waits. So a worker takes the experiment that shares the fewest inputs with the running
experiments. Workers run under the supervisor and end with the process that started them.

Protocol: a worker reads names of experiments from its stdin, one per line. It writes events to its stdout, one JSON
object per line with one key: `line` (text to show), `activity` (the fields of an `Activity`, or null), and once per
experiment `failures` (one line per failed step; empty if it succeeded). All other output of its jobs goes to stderr.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import IO, Any, TextIO

from etpi_assets.graph import GRAPH, JOBS
from etpi_assets.resources import side_by_side
from etpi_assets.runs.runner import Runner
from etpi_assets.runs.stopping import wake_on_sigint
from etpi_assets.specs.load import Specs, load_specs
from etpi_resources.process.pool import WORKERS_VARIABLE
from etpi_resources.process.progress import Activity, display, shown_on
from etpi_resources.process.supervise import supervised

Finished = Callable[[str, list[str]], None]
_REPORTING = Lock()

EXPERIMENT_ASSETS = tuple(name for name in JOBS["run_experiment"][1] if GRAPH[name].set == "experiment")
"""The assets that a worker computes. The tables across experiments are computed once, after all workers."""


def run_experiments_in_parallel(
    names: Sequence[str],
    specs: Specs,
    specs_folder: Path | None = None,
    consent: Collection[str] = (),
    finished: Finished = lambda name, failures: None,
) -> dict[str, list[str]]:
    """Run experiments in a pool of workers.

    Args:
        consent: as for `Runner`.
        finished: called after each experiment with its failures, by one thread at a time.

    Returns:
        Experiment -> one line per failed step with the reason, in order; empty if it succeeded.

    Raises:
        KeyboardInterrupt: this process received SIGINT or SIGTERM; the workers have ended.
    """
    count = min(len(names), side_by_side())
    queue = ExperimentQueue({name: shared_inputs(name, specs) for name in names})
    workers: list[subprocess.Popen[str]] = []
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    wake_on_sigint()
    with ThreadPoolExecutor(count) as threads:
        try:
            workers += (_start(count, specs_folder, consent) for _ in range(count))
            results = threads.map(lambda worker: _serve(worker, queue, finished), workers)
            failures = {name: lines for result in results for name, lines in result.items()}
        except BaseException:
            for worker in workers:
                worker.terminate()
            raise
        finally:  # the thread pool waits for its threads, and they wait for their workers
            for worker in workers:
                worker.wait()
            signal.signal(signal.SIGTERM, handler)
    return {name: failures.get(name, ["no process was left to run it"]) for name in names}


class ExperimentQueue:
    """Experiments that no worker has taken yet."""

    def __init__(self, inputs: Mapping[str, Collection[str]]) -> None:
        """`inputs`: for each experiment, in order, the inputs that it may share with others."""
        self._inputs = {name: frozenset(parts) for name, parts in inputs.items()}
        self._waiting, self._running, self._lock = list(inputs), list[str](), Lock()

    def take(self) -> Iterator[str]:
        """Yield one worker's experiments. Each counts as running until the next is taken or the iterator is closed."""
        while name := self._next():
            try:
                yield name
            finally:
                with self._lock:
                    self._running.remove(name)

    def _next(self) -> str | None:
        with self._lock:
            if not self._waiting:
                return None
            name = min(self._waiting, key=self._overlap)
            self._waiting.remove(name)
            self._running.append(name)
            return name

    def _overlap(self, name: str) -> int:
        return sum(len(self._inputs[name] & self._inputs[running]) for running in self._running)


def shared_inputs(name: str, specs: Specs) -> set[str]:
    """Return the inputs of an experiment that other experiments may share: suites, rollout sets and its base."""
    keys = {
        f"{kind} {key}" for kind in ("suite", "rollout_set") for key in specs.upstream_keys("experiment", name, kind)
    }
    return keys | {f"base {specs.experiments[name].base.model_dump_json()}"}


def _start(count: int, specs_folder: Path | None, consent: Collection[str]) -> subprocess.Popen[str]:
    threads = str(max(1, (os.cpu_count() or 1) // count))
    return subprocess.Popen(
        supervised([sys.executable, "-m", "etpi_assets.runs.pool", str(specs_folder or ""), *sorted(consent)]),
        env={"OMP_NUM_THREADS": threads, WORKERS_VARIABLE: threads, **os.environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _serve(worker: subprocess.Popen[str], queue: ExperimentQueue, finished: Finished) -> dict[str, list[str]]:
    """Give a worker experiments until the queue is empty; return the failures of each.

    If a worker dies, its current experiment fails.
    """
    assert worker.stdin and worker.stdout
    results: dict[str, list[str]] = {}
    with suppress(BrokenPipeError), worker.stdout, worker.stdin:
        for name in queue.take():
            results[name] = ["the process that ran it was killed; the machine may have run out of memory"]
            print(name, file=worker.stdin, flush=True)
            if (failures := _show_until_done(worker.stdout, source=str(worker.pid))) is None:
                break
            results[name] = failures
            with _REPORTING:
                finished(name, failures)
    return results


def _show_until_done(events: IO[str], source: str) -> list[str] | None:
    """Show a worker's events until its experiment ends; return the failures, or None if the worker died."""
    try:
        for text in events:
            event = json.loads(text)
            if "line" in event:
                display().line(event["line"])
            elif "activity" in event:
                display().show(Activity(**event["activity"]) if event["activity"] else None, source)
            else:
                return event["failures"]
        return None
    finally:
        display().show(None, source)


class WorkerDisplay:
    """The display of a worker: send its lines and activity to the process that started it."""

    def __init__(self, events: TextIO) -> None:
        self._events, self._lock = events, Lock()

    def line(self, text: str) -> None:
        self.send({"line": text})

    def show(self, activity: Activity | None, source: str = "") -> None:
        self.send({"activity": asdict(activity) if activity else None})

    def send(self, event: Mapping[str, Any]) -> None:
        """Write one event."""
        with self._lock:
            print(json.dumps(event), file=self._events, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Run a worker: `python -m etpi_assets.runs.pool SPECS [CONSENT ...]`; SPECS may be empty."""
    parent = WorkerDisplay(os.fdopen(os.dup(sys.stdout.fileno()), "w"))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    folder = Path(arguments[0]) if arguments and arguments[0] else None
    with shown_on(parent):
        runner = Runner(load_specs(folder), folder, arguments[1:])
        try:
            for line in sys.stdin:
                parent.send({"failures": runner.bring_up_to_date(line.strip(), EXPERIMENT_ASSETS)})
        except KeyboardInterrupt:
            return 130
        finally:  # a signal while the interpreter ends would only print a traceback
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
