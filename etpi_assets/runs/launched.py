"""Run Dagster jobs on a cluster to bring experiments up to date: launch each, follow its log, report what failed.

`runner` does the same in this process. The runs go on if this process is killed; Ctrl-C stops them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dagster as dg

from etpi_assets.asset import CONSENT_TAG
from etpi_assets.partitions import PARTITION_TAG
from etpi_assets.planner import plan
from etpi_assets.runs.runner import failure_line, input_jobs, opening
from etpi_assets.runs.stopping import wake_on_sigint
from etpi_assets.specs.folders import VARIABLE, user_folders
from etpi_assets.specs.load import Specs
from etpi_resources.cluster.settings import ClusterError
from etpi_resources.lake.lake import Lake
from etpi_resources.process.progress import display

POLL_SECONDS = 1.0
LOCATION = "etpi"
"""The code location's name in `etpi/workspace.yaml`."""


class LaunchedRuns:
    """Runs jobs on the cluster against its Dagster instance; methods as those of `Runner`, from any thread."""

    def __init__(
        self, specs: Specs, workspace: Path, specs_folder: Path | None = None, consent: Collection[str] = ()
    ) -> None:
        """`workspace`: the file that names the code location; `consent`: as for `Runner`."""
        self._specs, self._lake, self._workspace = specs, Lake.open(), workspace
        self._tags = {f"{CONSENT_TAG}{option}": "true" for option in consent}
        self._instance = dg.DagsterInstance.get()
        folders = [specs_folder] if specs_folder else [folder.path for folder in user_folders()]
        self._specs_variable = os.pathsep.join(str(folder.absolute()) for folder in folders)
        self._stopped = threading.Event()

    def bring_all_up_to_date(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Bring experiments up to date, all at once; return one line for each failed step of each.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed; the runs have been stopped.
        """
        wake_on_sigint()
        with ThreadPoolExecutor(len(names)) as threads:
            futures = {name: threads.submit(self.bring_up_to_date, name) for name in names}
            try:
                return {name: future.result() for name, future in futures.items()}
            except BaseException:
                self._stopped.set()
                raise

    def bring_up_to_date(self, name: str) -> list[str]:
        """Compute what is missing or stale of an experiment's inputs, then of the experiment; return as `run`."""
        steps = plan(name, self._specs, self._lake)
        display().line(opening(name, steps))
        for job, key in input_jobs(steps):
            if failures := self.run(job, key):
                return failures
        return self.run("run_experiment", name)

    def run(self, job: str, key: str | None) -> list[str]:
        """Launch a job and follow it to its end; return one line for each failed step.

        Raises:
            ClusterError: Dagster cannot launch it.
            KeyboardInterrupt: as `bring_all_up_to_date`.
        """
        run_id, start = str(uuid.uuid4()), time.monotonic()
        name = f"{job} of {key}" if key else job
        self._launch(job, key, run_id)
        display().line(f"-- {name}: run {run_id}")
        failures: list[str] = []
        try:
            for entry in self._follow(run_id):
                _show(entry)
                if entry.dagster_event is not None and (line := failure_line(entry.dagster_event)):
                    failures.append(line)
        except KeyboardInterrupt:
            self._instance.run_launcher.terminate(run_id)
            display().line(f"-- {name}: stopping run {run_id}")
            raise
        status = self._status(run_id)
        state = "done" if status is dg.DagsterRunStatus.SUCCESS else status.value
        display().line(f"-- {name}: {state} in {time.monotonic() - start:.1f} s")
        if status is dg.DagsterRunStatus.SUCCESS:
            return []
        return failures or [f"{name}: run {run_id} ended as {status.value}; Dagster's page says why"]

    def _launch(self, job: str, key: str | None, run_id: str) -> None:
        tags: Mapping[str, str] = {**self._tags, **({PARTITION_TAG: key} if key else {})}
        command = [
            sys.executable, "-m", "dagster", "job", "launch", "-w", str(self._workspace), "-l", LOCATION, "-j", job,
            "--tags", json.dumps(tags), "--run-id", run_id,
        ]  # fmt: skip
        home = self._instance.root_directory
        environment = {**os.environ, "DAGSTER_HOME": home, VARIABLE: self._specs_variable}
        # In its home, where no `.env` names another DAGSTER_HOME; in a session of its own, because a Ctrl-C that ended
        # it halfway would leave a run that nobody follows.
        done = subprocess.run(
            command, cwd=home, env=environment, capture_output=True, text=True, check=False, start_new_session=True
        )
        if done.returncode:
            lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
            raise ClusterError(f"{job} cannot be launched: {lines[-1] if lines else 'no reason given'}")

    def _follow(self, run_id: str) -> Iterator[dg.EventLogEntry]:
        """Yield the entries of a run's log as they are written, until it has ended."""
        cursor = None
        while True:
            ended = self._status(run_id) in _ENDED
            connection = self._instance.get_records_for_run(run_id, cursor)
            cursor = connection.cursor
            yield from (record.event_log_entry for record in connection.records)
            if ended and not connection.has_more:
                return
            if not connection.has_more and self._stopped.wait(POLL_SECONDS):
                raise KeyboardInterrupt

    def _status(self, run_id: str) -> dg.DagsterRunStatus:
        run = self._instance.get_run_by_id(run_id)
        if run is None:
            raise ClusterError(f"run {run_id} was deleted while it was followed")
        return run.status


_ENDED = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)


def _show(entry: dg.EventLogEntry) -> None:
    """Print what an asset wrote to the log, and what the executor says about a step that waits."""
    event = entry.dagster_event
    if event is not None:
        if entry.step_key and event.event_type_value == "ENGINE_EVENT":
            display().line(f"{entry.step_key}: {entry.message}")
    elif "Dependencies for step" not in entry.message:  # the failures at the end say so
        display().line(entry.message)
