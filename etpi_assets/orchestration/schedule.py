"""A schedule that brings experiments up to date at fixed times, if the environment names some."""

from __future__ import annotations

import os
from collections.abc import Iterator

import dagster as dg

from etpi_assets.specs.load import Specs
from etpi_assets.specs.section import SpecError

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
