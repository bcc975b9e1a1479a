"""Dagster jobs run in this process, one after the other.

Belongs here: starting the jobs that bring an experiment up to date, and saying how each went. Does not belong here:
what is missing or stale (`planner`), or several processes (`lanes`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

import dagster as dg

from etpi_assets.asset_run import CONSENT_TAG
from etpi_assets.definitions import build_defs
from etpi_assets.planner import Step, open_steps, plan
from etpi_assets.resources import Resources
from etpi_assets.runs.stopping import StopRequests
from etpi_assets.specs.load import Specs
from etpi_resources.lake.lake import Lake
from etpi_resources.process.progress import Activity, acting_for, display

_QUIET = {"loggers": {"console": {"config": {}}}}
LONGEST_REASON = 300
"""Characters of a failure's reason at the end of a run; the whole message was shown where the step failed."""


class Runner:
    """Runs jobs against the persistent Dagster instance, so that the web page shows them."""

    def __init__(self, specs: Specs, specs_folder: Path | None = None, consent: Collection[str] = ()) -> None:
        """`consent`: options that agree to expensive work for changed code (`asset_run.Consent`)."""
        self._specs, self._lake = specs, Lake.open()
        self._tags = {f"{CONSENT_TAG}{option}": "true" for option in consent}
        resources = Resources(lake=self._lake, specs_folder=specs_folder)
        self._defs = build_defs(specs, {"etpi": resources})
        self._instance = dg.DagsterInstance.get()

    def bring(self, name: str, assets: Sequence[str] | None = None) -> list[str]:
        """Bring an experiment, or some of its assets, and all it rests on up to date: why that failed, a line a step;
        empty where it succeeded.

        Only jobs with something to do are started for what it rests on; `run_experiment` always is, and skips what
        is up to date. Raises as `run` does.
        """
        steps = plan(name, self._specs, self._lake)
        display().line(_opening(name, steps))
        with acting_for(name):
            for job, key in _before(steps):
                if failures := self.run(job, key):
                    return failures
            return self.run("run_experiment", name, assets)

    def run(self, job: str, key: str | None, assets: Sequence[str] | None = None) -> list[str]:
        """Run the job, or some of its assets: why steps failed, a line each; empty where it succeeded.

        Raises:
            KeyboardInterrupt: this process was asked to stop meanwhile.
        """
        start = time.monotonic()
        name = f"{job} of {key}" if key else job
        display().line(f"-- {name}")
        display().show(Activity(name))
        try:
            with StopRequests() as asked:
                result = self._defs.resolve_job_def(job).execute_in_process(
                    instance=self._instance,
                    partition_key=key,
                    run_config=_QUIET,
                    tags=self._tags,
                    raise_on_error=False,
                    asset_selection=None if assets is None else [dg.AssetKey(name) for name in assets],
                )
                stop = asked.any()
        finally:
            display().show(None)
        state = "done" if result.success else "FAILED"
        display().line(f"-- {name}: {state} in {time.monotonic() - start:.1f} s{_counted(result)}")
        if stop:
            raise KeyboardInterrupt  # Dagster took it for a failed run, if at all; no further job is wanted
        return [] if result.success else _failures(result) or [f"{job}: Dagster's page of run {result.run_id} says why"]


def _counted(result: dg.ExecuteInProcessResult) -> str:
    """How many assets a run made, left as they were, or had no use for."""
    counts = Counter[str]()
    for event in result.all_events:
        if event.is_step_materialization:
            shown = event.step_materialization_data.materialization.metadata
            unchanged = shown["skipped"].value
            counts["unchanged" if unchanged else "not applicable" if "not_applicable" in shown else "made"] += 1
    return f"; assets: {', '.join(f'{n} {what}' for what, n in counts.items())}" if counts else ""


def _failures(result: dg.ExecuteInProcessResult) -> list[str]:
    """Why the steps of a run failed, shortened to a line each."""
    lines = []
    for event in result.all_events:
        if event.is_step_failure:
            data = event.step_failure_data
            error = data.error.message if data.error else "no reason given"
            text = data.user_failure_data.description if data.user_failure_data else f"{event.step_key}: {error}"
            lines.append(_one_line(text or ""))
    return lines


def _one_line(text: str) -> str:
    """A message on one line: of a long one its beginning and its end, where a worker's error is."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_REASON else f"{line[: LONGEST_REASON // 2]} ... {line[-LONGEST_REASON // 2 :]}"


def _before(steps: Sequence[Step]) -> list[tuple[str, str]]:
    """The jobs that make what an experiment rests on, as far as they have something to do."""
    todo = {(step.set, step.key): None for step in open_steps(steps) if step.set != "experiment"}
    jobs = {"suite": "prepare_suite", "rollout_set": "collect_rollouts"}
    return [(jobs[set_name], key) for set_name, key in todo]


def _opening(name: str, steps: Sequence[Step]) -> str:
    """How many assets are to be made, and of what."""
    todo = open_steps(steps)
    if not todo:
        return f"== {name}: nothing is missing or stale"
    states = Counter("of changed code" if step.state == "code" else step.state for step in todo)
    keys = dict.fromkeys(step.key for step in todo if step.key != name)
    first = f", first {', '.join(keys)}" if keys else ""
    return f"== {name}: {', '.join(f'{n} assets {state}' for state, n in states.items())}{first}"
