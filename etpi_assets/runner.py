"""Dagster jobs run in this process, one after the other.

Belongs here: starting the jobs that bring an experiment up to date, and saying how each went. Does not belong here:
what is missing or stale (`specs.planner`), or several processes (`lanes`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import dagster as dg

from etpi_assets.definitions import build_defs
from etpi_assets.resources import Resources
from etpi_assets.specs.load import Specs
from etpi_assets.specs.planner import Step, open_steps, plan
from etpi_assets.stopping import StopRequests
from etpi_resources.lake import Lake

_QUIET = {"loggers": {"console": {"config": {}}}}


class Runner:
    """Runs jobs against the persistent Dagster instance, so that the web page shows them."""

    def __init__(self, specs: Specs, specs_folder: Path | None = None) -> None:
        self._specs, self._lake = specs, Lake.open()
        resources = Resources(lake=self._lake, specs_folder=specs_folder)
        self._defs = build_defs(specs, {"etpi": resources})
        self._instance = dg.DagsterInstance.get()

    def bring(self, name: str, assets: Sequence[str] | None = None) -> bool:
        """Whether an experiment, or some of its assets, and all it rests on are now up to date.

        Only jobs with something to do are started for what it rests on; `run_experiment` always is, and skips what
        stands. Raises as `run` does.
        """
        steps = plan(name, self._specs, self._lake)
        print(_opening(name, steps), file=sys.stderr)
        return all(self.run(job, key) for job, key in _before(steps)) and self.run("run_experiment", name, assets)

    def run(self, job: str, key: str | None, assets: Sequence[str] | None = None) -> bool:
        """Whether the run of the job, or of some of its assets, succeeded; the console logger has said why where not.

        Raises:
            KeyboardInterrupt: this process was asked to stop meanwhile.
        """
        start = time.monotonic()
        of = f" of {key}" if key else ""
        print(f"-- {job}{of}", file=sys.stderr)
        with StopRequests() as asked:
            result = self._defs.resolve_job_def(job).execute_in_process(
                instance=self._instance,
                partition_key=key,
                run_config=_QUIET,
                raise_on_error=False,
                asset_selection=None if assets is None else [dg.AssetKey(name) for name in assets],
            )
            stop = asked.any()
        print(
            f"-- {job}{of}: {'done' if result.success else 'FAILED'} in {time.monotonic() - start:.1f} s",
            file=sys.stderr,
        )
        if stop:
            raise KeyboardInterrupt  # Dagster took it for a failed run, if at all; no further job is wanted
        return result.success


def _before(steps: Sequence[Step]) -> list[tuple[str, str]]:
    """The jobs that make what an experiment rests on, as far as they have something to do."""
    todo = {(step.set, step.key): None for step in open_steps(steps) if step.set != "experiment"}
    jobs = {"suite": "prepare_suite", "rollout_set": "collect_rollouts"}
    return [(jobs[set_name], key) for set_name, key in todo]


def _opening(name: str, steps: Sequence[Step]) -> str:
    todo = open_steps(steps)
    what = ", ".join(f"{step.asset} of {step.key} ({step.state})" for step in todo[:6])
    more = f" and {len(todo) - 6} more" if len(todo) > 6 else ""
    return f"== {name}: {what}{more}" if todo else f"== {name}: nothing is missing or stale"
