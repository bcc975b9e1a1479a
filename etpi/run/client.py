"""The client that brings experiments up to date: it submits runs to the Dagster instance and follows their event logs.

Runs are those of any other client: `run_experiment` computes an experiment with its inputs, and the locks of the lake
have partitions that several runs need computed once. On this machine the runs end with this process; on a cluster they
go on if it is killed, and end if it is stopped.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import dagster as dg

from etpi.run import CodeServerError
from etpi.run.code_server import CodeServer, code_server
from etpi_assets.asset import CONSENT_TAG, label
from etpi_assets.graph import GRAPH, JOBS
from etpi_assets.orchestration.experiment_inputs import input_steps
from etpi_assets.orchestration.jobs import failure_reason
from etpi_assets.orchestration.live_progress import SOCKET_VARIABLE, received_progress
from etpi_assets.orchestration.partitions import PARTITION_TAG
from etpi_assets.planning.planner import Step, open_steps, plan
from etpi_assets.resources import side_by_side
from etpi_assets.specs.folders import VARIABLE, user_folders
from etpi_assets.specs.load import Specs
from etpi_assets.specs.shown import ALL, SHIPPED_VARIABLE
from etpi_resources.backend import backend
from etpi_resources.lake.lake import Lake
from etpi_resources.process.pool import WORKERS_VARIABLE
from etpi_resources.process.progress import LOGGED_PROGRESS, Activity, display

POLL_SECONDS = 0.5
STOP_SECONDS = 30.0
"""Time for a terminated run to end in order."""
LONGEST_REASON = 300
"""Characters of a failure in the summary of a run; the whole message was shown when the step failed."""
EXPERIMENT_ASSETS = ("experiment_inputs", *(name for name in JOBS["run_experiment"][1] if GRAPH[name].set != "all"))
"""The assets of an experiment's run where one of several ends with the tables across experiments."""
SERVER_KILLED = "Dagster's code server was killed, and its runs with it; the machine may have run out of memory"
_DAGSTERS_OWN = ("[pipes]", "Dependencies for step ")
"""Prefixes of Dagster's messages without an event; a failed run's summary lists the steps that did not run."""

Finished = Callable[[str, list[str]], None]
_REPORTING = threading.Lock()


@dataclass
class _Followed:
    """State of a run that the client follows.

    Attributes:
        name: the experiment or other partition that it works for.
        chain: the labels of the assets of the experiment's chain; empty for other jobs.
        seen: those that are up to date or were shown; their number is the position in the chain, so it only grows.
        counts: materialized assets that were made, unchanged or not applicable.
        failures: a line for each failed step.
        last: the last message of Dagster about the run itself.
    """

    name: str
    chain: frozenset[str] = frozenset()
    seen: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    last: str = ""

    def placed(self, activity: Activity) -> Activity:
        """Return an activity with the experiment and the position in its chain."""
        activity = replace(activity, run=self.name if self.chain else "")
        if activity.label not in self.chain:
            return activity
        self.seen.add(activity.label)
        return replace(activity, step=len(self.seen), steps=len(self.chain))


class Client:
    """Submits runs and follows them; a context manager, because the code server ends with it.

    Its methods raise KeyboardInterrupt if this process received SIGINT or SIGTERM; the runs have ended then.
    """

    def __init__(
        self, specs: Specs, specs_folder: Path | None = None, consent: Collection[str] = (), at_once: int = 1
    ) -> None:
        """
        Args:
            consent: the options that allow expensive work because code changed (`planner.Consent`).
            at_once: the number of experiments that are wanted at once; on this machine `side_by_side` bounds it.
        """
        self._specs, self._lake, self._at_once = specs, Lake.open(), at_once
        self._tags = {f"{CONSENT_TAG}{option}": "true" for option in consent}
        folders = [specs_folder] if specs_folder else [folder.path for folder in user_folders()]
        self._variables = {
            VARIABLE: os.pathsep.join(str(folder.absolute()) for folder in folders),
            SHIPPED_VARIABLE: ALL,
        }
        self._stopped = threading.Event()
        self._runs: dict[str, _Followed] = {}
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
            if self._here:
                progress = folder / "progress"
                stack.enter_context(received_progress(progress, self._show_activity))
                self._variables[SOCKET_VARIABLE] = str(progress)
            self._server: CodeServer = stack.enter_context(code_server(self._instance, folder, self._variables))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._runs:
            self._server.kill()
        self._stack.close()

    def run_experiments(
        self, names: Sequence[str], finished: Finished = lambda name, failures: None
    ) -> dict[str, list[str]]:
        """Bring experiments with their inputs up to date, then the tables across experiments.

        Args:
            finished: called after each experiment with its failures, by one thread at a time.

        Returns:
            Name -> one line for each failed step, in order; only what failed. The tables are "publish_catalog".
        """
        queue = _Queue({name: _shared_inputs(name, self._specs) for name in names})
        alone = len(names) == 1
        failures: dict[str, list[str]] = {}

        def work() -> None:
            for name in queue.take():
                lines = self._run_experiment(name, None if alone else EXPERIMENT_ASSETS)
                with _REPORTING:
                    failures[name] = lines
                    finished(name, lines)

        self._in_threads([work] * min(self._at_once, len(names)))
        failed = {name: failures[name] for name in names if failures[name]}
        # The catalog then has the results of the experiments that succeeded.
        if (failed or not alone) and (lines := self.run("publish_catalog", None)):
            failed["publish_catalog"] = lines
        return failed

    def run(self, job: str, key: str | None, assets: Sequence[str] | None = None) -> list[str]:
        """Run a job, or the named ones of its assets; return one line for each failed step."""
        lines: list[str] = []
        self._in_threads([lambda: lines.extend(self._run(job, key, assets, _Followed(key or job)))])
        return lines

    def _in_threads(self, works: Sequence[Callable[[], None]]) -> None:
        """Do works at once; a signal to this process ends the runs."""
        with ThreadPoolExecutor(len(works)) as threads:
            futures = [threads.submit(work) for work in works]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                self._stopped.set()
                raise

    def _run_experiment(self, name: str, assets: Sequence[str] | None) -> list[str]:
        steps = plan(name, self._specs, self._lake)
        display().line(opening(name, steps))
        computed = {step for step in steps if step.set == "experiment"}.union(input_steps(steps))
        labels = {step: label(step.asset, step.key) for step in steps}
        finished = {labels[step] for step in steps if step not in computed}
        return self._run("run_experiment", name, assets, _Followed(name, frozenset(labels.values()), finished))

    # --- one run ---------------------------------------------------------------------------------------------------

    def _run(self, job: str, key: str | None, assets: Sequence[str] | None, run: _Followed) -> list[str]:
        if self._server_killed:
            return [SERVER_KILLED]
        start, run_id = time.monotonic(), str(uuid.uuid4())
        name = f"{job} of {key}" if key else job
        display().line(f"-- {name}: run {run_id}")
        display().show(Activity(name), run_id)
        self._runs[run_id] = run
        try:
            tags = {**self._tags, **({PARTITION_TAG: key} if key else {})}
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
        finally:
            display().show(None, run_id)
        del self._runs[run_id]
        status = self._dagster_run(run_id).status
        state = "done" if status is dg.DagsterRunStatus.SUCCESS else "FAILED"
        counted = f"; assets: {', '.join(f'{n} {what}' for what, n in run.counts.items())}" if run.counts else ""
        display().line(f"-- {name}: {state} in {time.monotonic() - start:.1f} s{counted}")
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
                    display().line(f"-- stopping run {run_id}")
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

    # --- what is shown ---------------------------------------------------------------------------------------------

    def _show_activity(self, run_id: str, activity: Activity | None) -> None:
        if run := self._runs.get(run_id):
            display().show(run.placed(activity) if activity else None, run_id)

    def _take(self, entry: dg.EventLogEntry, run: _Followed) -> None:
        """Note and show an entry of a run's event log."""
        event = entry.dagster_event
        if event is None:
            from_dagster = entry.user_message.startswith(_DAGSTERS_OWN)
            shown_live = self._here and entry.user_message.startswith(LOGGED_PROGRESS)
            if not (from_dagster or shown_live):
                display().line(entry.user_message)
        elif event.is_step_failure:
            self._take_failure(event, run)
        elif event.is_step_materialization:
            materialization = event.step_materialization_data.materialization
            asset, metadata = materialization.asset_key.to_user_string(), materialization.metadata
            if asset in GRAPH:
                run.seen |= run.chain & {label(asset, materialization.partition or "all")}
                unchanged = bool(metadata["skipped"].value)
                kind = "unchanged" if unchanged else "not applicable" if "not_applicable" in metadata else "made"
                run.counts[kind] += 1
        elif event.event_type in (dg.DagsterEventType.ENGINE_EVENT, dg.DagsterEventType.RUN_FAILURE):
            failed = event.event_type is dg.DagsterEventType.RUN_FAILURE
            run.last = f"{run.last}; {event.message}" if failed else event.message or ""
            if event.step_key and event.is_engine_event:  # the executor of a cluster: a step waits
                display().line(f"{event.step_key}: {event.message}")

    def _take_failure(self, event: dg.DagsterEvent, run: _Followed) -> None:
        data, reason = event.step_failure_data, failure_reason(event)
        if data.error and data.error.cls_name == "DagsterExecutionInterruptedError":
            display().line(f"{event.step_key} was interrupted")
        else:
            display().line(f"FAILED: {reason if data.user_failure_data else f'{event.step_key}: {data.error}'}")
        run.failures.append(_one_line(reason))


def opening(name: str, steps: Sequence[Step]) -> str:
    """Return the first line of a run: the number of missing or stale assets, and the inputs that are computed first."""
    todo = open_steps(steps)
    if not todo:
        return f"== {name}: nothing is missing or stale"
    states = Counter("of changed code" if step.state == "code" else step.state for step in todo)
    keys = dict.fromkeys(step.key for step in todo if step.key != name)
    first = f", first {', '.join(keys)}" if keys else ""
    parts = [f"{n} asset{'s' if n != 1 else ''} {state}" for state, n in states.items()]
    return f"== {name}: {', '.join(parts)}{first}"


def _one_line(text: str) -> str:
    """Return a message on one line; a long one is cut in the middle, because a worker's error is at the end."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_REASON else f"{line[: LONGEST_REASON // 2]} ... {line[-LONGEST_REASON // 2 :]}"


# --- which experiment is next ----------------------------------------------------------------------------------------


class _Queue:
    """Experiments that have not been submitted; the next one shares the fewest inputs with those that run.

    Two experiments that need the same missing rollouts or base gain nothing from running at once: one waits.
    """

    def __init__(self, inputs: Mapping[str, Collection[str]]) -> None:
        """`inputs`: for each experiment, in order, the inputs that it may share with others."""
        self._inputs = {name: frozenset(parts) for name, parts in inputs.items()}
        self._waiting, self._running, self._lock = list(inputs), list[str](), threading.Lock()

    def take(self) -> Iterator[str]:
        """Yield experiments to one thread. Each counts as running until the next is taken."""
        while name := self._next():
            yield name
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


def _shared_inputs(name: str, specs: Specs) -> set[str]:
    """Return the inputs of an experiment that other experiments may share: suites, rollout sets and its base."""
    sets = ("suite", "rollout_set")
    keys = {f"{set_name} {key}" for set_name in sets for key in specs.upstream_keys("experiment", name, set_name)}
    return keys | {f"base {specs.experiments[name].base.model_dump_json()}"}
