"""Run Dagster jobs in this process, one after another, to bring an experiment up to date.

`planner` says what is missing or stale; `pool` runs several experiments at once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

import dagster as dg

from etpi_assets.asset import CONSENT_TAG, label
from etpi_assets.definitions import build_defs, resource_of
from etpi_assets.graph import JOBS
from etpi_assets.planner import Step, open_steps, plan
from etpi_assets.resources import Resources
from etpi_assets.runs.live_lines import ChainDisplay
from etpi_assets.runs.stopping import StopRequests
from etpi_assets.specs.load import Specs
from etpi_resources.lake.lake import Lake
from etpi_resources.process.progress import Activity, acting_for, display, shown_on

_QUIET = {"loggers": {"console": {"config": {}}}}
LONGEST_REASON = 300
"""Characters of a failure in the summary of a run; the whole message was shown when the step failed."""


class Runner:
    """Runs jobs against the persistent Dagster instance, so that the web page shows them."""

    def __init__(self, specs: Specs, specs_folder: Path | None = None, consent: Collection[str] = ()) -> None:
        """`consent`: the options that allow expensive work because code changed (`planner.Consent`)."""
        self._specs, self._lake = specs, Lake.open()
        self._tags = {f"{CONSENT_TAG}{option}": "true" for option in consent}
        resources = Resources(lake=self._lake, specs_folder=specs_folder)
        self._defs = build_defs(specs, {"etpi": resource_of(resources)})
        self._instance = dg.DagsterInstance.get()

    def bring_up_to_date(self, name: str, assets: Sequence[str] | None = None) -> list[str]:
        """Compute what is missing or stale of an experiment's inputs, then of the experiment or the named assets.

        Jobs for inputs start only where they have something to do; `run_experiment` always starts, and skips the
        assets that are up to date.

        Returns:
            One line for each failed step; empty where all succeeded.

        Raises:
            KeyboardInterrupt: as `run`.
        """
        steps = plan(name, self._specs, self._lake)
        jobs = input_jobs(steps)
        display().line(opening(name, steps))
        with acting_for(name), shown_on(_chain_display(name, steps, jobs)):
            for job, key in jobs:
                if failures := self.run(job, key):
                    return failures
            return self.run("run_experiment", name, assets)

    def run(self, job: str, key: str | None, assets: Sequence[str] | None = None) -> list[str]:
        """Run a job, or the named ones of its assets; return one line for each failed step.

        Raises:
            KeyboardInterrupt: this process received SIGINT or SIGTERM meanwhile.
        """
        start = time.monotonic()
        name = f"{job} of {key}" if key else job
        display().line(f"-- {name}")
        display().show(Activity(name))
        try:
            with StopRequests() as requests:
                result = self._defs.resolve_job_def(job).execute_in_process(
                    instance=self._instance,
                    partition_key=key,
                    run_config=_QUIET,
                    tags=self._tags,
                    raise_on_error=False,
                    asset_selection=None if assets is None else [dg.AssetKey(name) for name in assets],
                )
                stop = requests.any()
        finally:
            display().show(None)
        state = "done" if result.success else "FAILED"
        display().line(f"-- {name}: {state} in {time.monotonic() - start:.1f} s{_counted(result)}")
        if stop:
            raise KeyboardInterrupt  # Dagster reports a failed run at most; no further job may start
        return [] if result.success else _failures(result) or [f"{job}: Dagster's page of run {result.run_id} says why"]


def _chain_display(name: str, steps: Sequence[Step], jobs: Sequence[tuple[str, str]]) -> ChainDisplay:
    """Return a display that shows at which of the chain's assets the experiment is."""
    running = {(JOBS[job][0], key) for job, key in jobs} | {("experiment", name)}
    labels = {label(step.asset, step.key): (step.set, step.key) in running for step in steps}
    return ChainDisplay(display(), name, labels, [text for text, runs in labels.items() if not runs])


def _counted(result: dg.ExecuteInProcessResult) -> str:
    """Count the assets that a run computed, skipped as unchanged, or found not applicable."""
    counts = Counter[str]()
    for event in result.all_events:
        if event.is_step_materialization:
            shown = event.step_materialization_data.materialization.metadata
            unchanged = shown["skipped"].value
            counts["unchanged" if unchanged else "not applicable" if "not_applicable" in shown else "made"] += 1
    return f"; assets: {', '.join(f'{n} {what}' for what, n in counts.items())}" if counts else ""


def _failures(result: dg.ExecuteInProcessResult) -> list[str]:
    """Return one line for each failed step of a run."""
    return [line for event in result.all_events if (line := failure_line(event))]


def failure_line(event: dg.DagsterEvent) -> str | None:
    """Return the reason of a failed step on one line; None for any other event."""
    if not event.is_step_failure:
        return None
    data = event.step_failure_data
    error = data.error.message if data.error else "no reason given"
    text = data.user_failure_data.description if data.user_failure_data else f"{event.step_key}: {error}"
    return _one_line(text or "")


def _one_line(text: str) -> str:
    """Return a message on one line; a long one is cut in the middle, because a worker's error is at the end."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_REASON else f"{line[: LONGEST_REASON // 2]} ... {line[-LONGEST_REASON // 2 :]}"


def input_jobs(steps: Sequence[Step]) -> list[tuple[str, str]]:
    """Return (job, partition key) for each of an experiment's inputs that is not up to date."""
    todo = {(step.set, step.key): None for step in open_steps(steps) if step.set != "experiment"}
    jobs = {"suite": "prepare_suite", "rollout_set": "collect_rollouts"}
    return [(jobs[set_name], key) for set_name, key in todo]


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
