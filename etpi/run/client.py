"""The client that brings experiments up to date: it submits runs to the Dagster instance and follows their event logs.

Its runs are those of any other client: `run_experiment` computes an experiment with its inputs, and the lake's locks
let only one run compute a partition that several need. On this machine the runs end with this process; on a cluster
they continue if it is killed, and end if it is stopped.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import dagster as dg

from etpi.run import CATALOG, CodeServerError
from etpi.run.code_server import CodeServer, code_server
from etpi.run.console import say
from etpi_assets.graph import GRAPH, JOBS
from etpi_assets.orchestration.jobs import failure_reason
from etpi_assets.orchestration.partitions import PARTITION_TAG
from etpi_assets.planning.planner import REBUILD_TAG, Step, open_steps, plan, set_of
from etpi_assets.resources import side_by_side
from etpi_assets.specs.folders import VARIABLE
from etpi_assets.specs.load import Specs
from etpi_assets.specs.shown import SHIPPED_VARIABLE
from etpi_resources.backend import backend
from etpi_resources.lake.lake import Lake
from etpi_resources.process.pool import WORKERS_VARIABLE

POLL_SECONDS = 0.5
STOP_SECONDS = 30.0
"""Time for a terminated run to end in order."""
LONGEST_REASON = 300
"""Characters of a failure in the summary of a run; the whole message was shown when the step failed."""
DATA_ASSETS, EXPERIMENT_ASSETS = (
    ("experiment_inputs", *(name for name in JOBS[job][1] if GRAPH[name].set != "all"))
    for job in ("build_dataset", "run_experiment")
)
"""The assets of an experiment's run that ends with its data set, and where one of several ends with the tables across
experiments."""
SERVER_KILLED = "Dagster's code server was killed, and its runs with it; the machine may have run out of memory"
_DAGSTERS_OWN = ("[pipes]", "Dependencies for step ")
"""Prefixes of Dagster's messages without an event; a failed run's summary lists the steps that did not run."""

Finished = Callable[[str, list[str]], None]
_REPORTING = threading.Lock()


@dataclass
class _Followed:
    """State of a run that the client follows.

    Attributes:
        counts: materialized assets that were computed, unchanged or not applicable.
        failures: a line for each failed step.
        last: the last message of Dagster about the run itself.
    """

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    last: str = ""


class Client:
    """Submits runs and follows them; a context manager, because the code server ends with it.

    Its methods raise KeyboardInterrupt if this process received SIGINT or SIGTERM; the runs have ended then.
    """

    def __init__(
        self,
        specs: Specs,
        rebuild: Collection[str] = (),
        at_once: int = 1,
        data_only: bool = False,
    ) -> None:
        """
        Args:
            data_only: end with the data sets of experiments.
            rebuild: outdated assets that are computed again although they are expensive (`planner.plan`).
            at_once: the number of experiments that are wanted at once; on this machine `side_by_side` bounds it.
        """
        self._specs, self._lake, self._at_once = specs, Lake.open(), at_once
        self._data_only = data_only
        self._tags = {REBUILD_TAG: ",".join(rebuild)} if rebuild else {}
        folders = os.pathsep.join(str(folder.path) for folder in specs.folders)
        self._variables = {VARIABLE: folders, SHIPPED_VARIABLE: "all"}
        self._stopped = threading.Event()
        self._following: set[str] = set()
        self._here = backend() is None
        if self._here:
            self._at_once = max(1, min(at_once, side_by_side()))
        if self._here and self._at_once > 1:
            threads = str(max(1, (os.cpu_count() or 1) // self._at_once))
            limits = {"OMP_NUM_THREADS": threads, WORKERS_VARIABLE: threads}
            self._variables |= {name: os.environ.get(name, value) for name, value in limits.items()}

    def __enter__(self) -> Self:
        # With the handler that polars installs, SIGINT would not wake the main thread while it waits for others.
        signal.siginterrupt(signal.SIGINT, True)
        self._handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
        with ExitStack() as stack:
            stack.callback(signal.signal, signal.SIGTERM, self._handler)
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="etpi-")))
            self._instance = stack.enter_context(dg.DagsterInstance.get())
            self._server: CodeServer = stack.enter_context(code_server(self._instance, folder, self._variables))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._following:
            self._server.kill()
        self._stack.close()

    def run_experiments(
        self, names: Sequence[str], finished: Finished = lambda name, failures: None
    ) -> dict[str, list[str]]:
        """Bring experiments, rollout sets and suites with their inputs up to date, then the tables across experiments.

        Args:
            names: of specs, or CATALOG for the tables across experiments alone.
            finished: called after each of them with its failures, by one thread at a time.

        Returns:
            Name -> one line for each failed step, in order; only what failed. The tables are "publish_catalog".
        """
        alone = len(names) == 1 and not self._data_only
        failures: dict[str, list[str]] = {}

        def work(name: str) -> None:
            lines = self._run_spec(name, alone)
            with _REPORTING:
                failures[name] = lines
                finished(name, lines)

        self._in_threads([partial(work, name) for name in names])
        failed = {name: failures[name] for name in names if failures[name]}
        # The catalog then has the results of the experiments that succeeded.
        if (failed.keys() - {CATALOG} or not alone) and (lines := self.run("publish_catalog", None)):
            failed["publish_catalog"] = lines
        return failed

    def _run_spec(self, name: str, alone: bool) -> list[str]:
        """Run the jobs of an experiment, a rollout set or a suite; return one line for each failed step."""
        if name == CATALOG:
            return self._run("publish_catalog", None, None)
        say(opening(name, plan(name, self._specs, self._lake)))
        set_name = set_of(name, self._specs)
        if set_name == "experiment":
            assets = DATA_ASSETS if self._data_only else None if alone else EXPERIMENT_ASSETS
            return self._run("run_experiment", name, assets)
        jobs = [("prepare_suite", suite) for suite in self._specs.upstream_keys(set_name, name, "suite")]
        jobs += [("collect_rollouts", name)] if set_name == "rollout_set" else []
        for job, key in jobs:
            if lines := self._run(job, key, None):
                return lines
        return []

    def run(self, job: str, key: str | None, assets: Sequence[str] | None = None) -> list[str]:
        """Run a job, or the named ones of its assets; return one line for each failed step."""
        lines: list[str] = []
        self._in_threads([lambda: lines.extend(self._run(job, key, assets))])
        return lines

    def _in_threads(self, works: Sequence[Callable[[], None]]) -> None:
        """Do works, at most `at_once` at a time; a signal to this process ends the runs."""
        with ThreadPoolExecutor(self._at_once) as threads:
            futures = [threads.submit(work) for work in works]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                self._stopped.set()
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _run(self, job: str, key: str | None, assets: Sequence[str] | None) -> list[str]:
        if self._server_killed:
            return [SERVER_KILLED]
        start, run_id = time.monotonic(), str(uuid.uuid4())
        name = f"{job} of {key}" if key else job
        say(f"-- {name}: run {run_id}")
        self._following.add(run_id)
        run, tags = _Followed(), {**self._tags, **({PARTITION_TAG: key} if key else {})}
        try:
            self._server.launch(job, run_id, tags, assets)
        except CodeServerError as error:  # a stored run fails alone; one that is not stored cannot be followed
            if (stored := self._instance.get_run_by_id(run_id)) is None:
                if self._server_killed:
                    return [SERVER_KILLED]
                raise
            if not stored.is_finished:
                self._instance.report_run_failed(stored, SERVER_KILLED if self._server_killed else str(error))
        for entry in self._entries(run_id):
            self._take(entry, run)
        self._following.remove(run_id)
        status = self._dagster_run(run_id).status
        failed = "stopped" if self._stopped.is_set() else "FAILED"  # Dagster's status of a stopped run may be FAILURE
        state = "done" if status is dg.DagsterRunStatus.SUCCESS else failed
        counted = f"; assets: {', '.join(f'{n} {what}' for what, n in run.counts.items())}" if run.counts else ""
        say(f"-- {name}: {state} in {time.monotonic() - start:.1f} s{counted}")
        if self._stopped.is_set():
            raise KeyboardInterrupt  # no further run may start
        if status is dg.DagsterRunStatus.SUCCESS:
            return []
        killed = [SERVER_KILLED] if self._server_killed else []
        return run.failures or killed or [_one_line(f"{status.value}: {run.last}")]

    def _entries(self, run_id: str) -> Iterator[dg.EventLogEntry]:
        """Yield the entries of a run's event log as they are written, until it has ended."""
        cursor, deadline, canceled = None, float("inf"), False
        while True:
            stopped = self._stopped.is_set()
            ended = self._dagster_run(run_id).is_finished
            connection = self._instance.get_records_for_run(run_id, cursor)
            cursor = connection.cursor
            yield from (record.event_log_entry for record in connection.records)
            if connection.has_more:
                continue
            if ended:
                return
            if stopped and not canceled:
                deadline = min(deadline, time.monotonic() + STOP_SECONDS)
                if canceled := self._instance.run_coordinator.cancel_run(run_id):
                    say(f"-- stopping run {run_id}")
            if time.monotonic() > deadline:
                if not self._here:
                    return
                self._server.kill()
            if self._server_killed:
                self._instance.report_run_failed(self._dagster_run(run_id), SERVER_KILLED)
            elif stopped:
                time.sleep(POLL_SECONDS)
            else:
                self._stopped.wait(POLL_SECONDS)

    @property
    def _server_killed(self) -> bool:
        """Return whether the runs of this machine have ended with their code server."""
        return self._here and self._server.ended

    def _dagster_run(self, run_id: str) -> dg.DagsterRun:
        run = self._instance.get_run_by_id(run_id)
        if run is None:
            raise CodeServerError(f"run {run_id} was deleted while it was followed")
        return run

    def _take(self, entry: dg.EventLogEntry, run: _Followed) -> None:
        """Note and show an entry of a run's event log."""
        event = entry.dagster_event
        if event is None:
            if not entry.user_message.startswith(_DAGSTERS_OWN):
                say(entry.user_message)
        elif event.is_step_failure:
            self._take_failure(event, run)
        elif event.is_step_materialization:
            materialization = event.step_materialization_data.materialization
            asset, metadata = materialization.asset_key.to_user_string(), materialization.metadata
            if asset in GRAPH:
                unchanged = bool(metadata["skipped"].value)
                kind = "unchanged" if unchanged else "not applicable" if "not_applicable" in metadata else "computed"
                run.counts[kind] += 1
        elif event.event_type in (dg.DagsterEventType.ENGINE_EVENT, dg.DagsterEventType.RUN_FAILURE):
            failed = event.event_type is dg.DagsterEventType.RUN_FAILURE
            run.last = f"{run.last}; {event.message}" if failed else event.message or ""
            if event.step_key and event.is_engine_event:  # the executor of a cluster: a step waits
                say(f"{event.step_key}: {event.message}")

    def _take_failure(self, event: dg.DagsterEvent, run: _Followed) -> None:
        data, reason = event.step_failure_data, failure_reason(event)
        if data.error and data.error.cls_name == "DagsterExecutionInterruptedError":
            say(f"{event.step_key} was interrupted")
        else:
            say(f"FAILED: {reason if data.user_failure_data else f'{event.step_key}: {data.error}'}")
        run.failures.append(_one_line(reason))


def opening(name: str, steps: Sequence[Step]) -> str:
    """Return the first line of a run: the number of missing or stale assets, and the inputs that are computed first."""
    todo = open_steps(steps)
    if not todo:
        return f"== {name}: nothing is missing or stale"
    states = Counter(step.state for step in todo)
    keys = dict.fromkeys(step.key for step in todo if step.key != name)
    first = f", first {', '.join(keys)}" if keys else ""
    parts = [f"{n} asset{'s' if n != 1 else ''} {state}" for state, n in states.items()]
    return f"== {name}: {', '.join(parts)}{first}"


def _one_line(text: str) -> str:
    """Return a message on one line; a long one is cut in the middle, because a worker's error is at the end."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_REASON else f"{line[: LONGEST_REASON // 2]} ... {line[-LONGEST_REASON // 2 :]}"
