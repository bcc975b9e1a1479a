"""Dagster jobs: the selections of `graph.JOBS`; `run_experiment` brings an experiment's inputs up to date first."""

from __future__ import annotations

import os
from collections.abc import Iterator

import dagster as dg

from etpi_assets.graph import JOBS
from etpi_assets.orchestration.materialize import EXPERIMENT_INPUTS
from etpi_assets.orchestration.partitions import partition_sets
from etpi_assets.specs.load import Specs
from etpi_assets.specs.section import SpecError

_DESCRIPTIONS = {
    "prepare_suite": "Make a suite's tasks and prove them.",
    "collect_rollouts": "Collect or import a rollout set, and score it.",
    "build_dataset": "From scored rollouts to the sequences an experiment trains on.",
    "train": "Train an experiment's checkpoints.",
    "evaluate": "Probe and evaluate an experiment's checkpoints, and report.",
    "run_experiment": "An experiment with everything it depends on, from its suites to its report and the leaderboard.",
    "publish_catalog": "The leaderboard, the teacher ceiling and the DuckDB file.",
}


def build_jobs(specs: Specs) -> list[dg.UnresolvedAssetJobDefinition]:
    """Return every job, its partitions taken from the specs."""
    sets = partition_sets(specs)
    return [
        dg.define_asset_job(
            name,
            dg.AssetSelection.assets(*([EXPERIMENT_INPUTS] if name == "run_experiment" else []), *assets),
            partitions_def=sets.get(set_name),
            description=_DESCRIPTIONS[name],
        )
        for name, (set_name, assets) in JOBS.items()
    ]


def failure_reason(event: dg.DagsterEvent) -> str:
    """Return why a step failed, from its event: the message for people if it has one, else that of the error."""
    data = event.step_failure_data
    if data.user_failure_data and data.user_failure_data.description:
        return data.user_failure_data.description
    error = data.error and (data.error.cause or data.error)  # Dagster's own error only names the step
    return f"{event.step_key}: {error.message.strip() if error else 'no reason given'}"


SCHEDULE_CRON = "ETPI_SCHEDULE"
SCHEDULE_EXPERIMENTS = "ETPI_SCHEDULE_EXPERIMENTS"
NAME, JOB = "run_experiments", "run_experiment"


def schedules(specs: Specs) -> list[dg.ScheduleDefinition]:
    """Return the schedule of $ETPI_SCHEDULE, stopped until someone starts it; none if the variable is not set.

    Raises:
        SpecError: the cron expression is invalid, or $ETPI_SCHEDULE_EXPERIMENTS names no or unknown experiments.
    """
    cron = os.environ.get(SCHEDULE_CRON, "").strip()
    if not cron:
        return []
    names = os.environ.get(SCHEDULE_EXPERIMENTS, "").replace(",", " ").split()
    if not names:
        raise SpecError(
            f"{SCHEDULE_CRON} is set, but not which experiments run: export {SCHEDULE_EXPERIMENTS}=NAME,NAME"
        )
    for name in names:
        specs.entry("experiment", name)

    def requests(context: dg.ScheduleEvaluationContext) -> Iterator[dg.RunRequest]:
        for name in names:
            yield dg.RunRequest(run_key=f"{name}-{context.scheduled_execution_time.isoformat()}", partition_key=name)

    try:
        schedule = dg.ScheduleDefinition(
            name=NAME,
            cron_schedule=cron,
            job_name=JOB,
            execution_fn=requests,
            default_status=dg.DefaultScheduleStatus.STOPPED,
            description=f"Computes what is missing or stale of {', '.join(names)}. What is up to date is skipped.",
        )
    except dg.DagsterInvalidDefinitionError as error:
        raise SpecError(f'{SCHEDULE_CRON}={cron!r} is not a cron expression such as "0 3 * * 1": {error}') from None
    return [schedule]
