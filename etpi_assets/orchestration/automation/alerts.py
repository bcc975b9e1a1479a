"""A sensor that reports every failed run to an address, as JSON."""

from __future__ import annotations

import json
import os
from typing import Any

import dagster as dg

from etpi_assets.orchestration.jobs import failure_reason
from etpi_assets.orchestration.partitions import PARTITION_TAG

SENSOR = "alert_on_failure"
ALERT_URL = "ETPI_ALERT_URL"
PAGE_URL = "ETPI_PAGE_URL"
TIMEOUT_SECONDS = 5.0
MOST_CHARACTERS = 2_000
"""Of an error message; chat services cut or refuse longer ones."""


def alert_sensor() -> dg.SensorDefinition:
    """Return the sensor; it is stopped until someone starts it, and does nothing without $ETPI_ALERT_URL."""

    @dg.run_failure_sensor(
        name=SENSOR,
        default_status=dg.DefaultSensorStatus.STOPPED,
        minimum_interval_seconds=30,
        description=f"Posts a JSON object with run, job, partition and errors to ${ALERT_URL} for every failed run.",
    )
    def sensor(context: dg.RunFailureSensorContext) -> dg.SkipReason | None:
        address = os.environ.get(ALERT_URL)
        if not address:
            return dg.SkipReason(f"{ALERT_URL} is not set")
        errors = [(event.step_key or "", failure_reason(event)) for event in context.get_step_failure_events()]
        post(address, message(context.dagster_run, errors, context.failure_event.message or ""))
        return None

    return sensor


def message(run: dg.DagsterRun, errors: list[tuple[str, str]], otherwise: str) -> dict[str, Any]:
    """Return the posted object.

    Its `text` is what Slack, Mattermost and Discord's Slack endpoint show.

    Args:
        errors: (step, error message) of each failed step.
        otherwise: the failure of the run itself, where no step failed.
    """
    partition = run.tags.get(PARTITION_TAG)
    link = f"{(os.environ.get(PAGE_URL) or 'http://localhost:3000').rstrip('/')}/runs/{run.run_id}"
    shown = [{"step": step, "error": error.strip()[:MOST_CHARACTERS]} for step, error in errors]
    name = f"{run.job_name} of {partition}" if partition else run.job_name
    reason = shown[0]["error"] if shown else otherwise
    return {
        "text": f"etpi: {name} failed: {reason}\n{link}",
        "run_id": run.run_id,
        "job": run.job_name,
        "partition": partition,
        "errors": shown or [{"step": "", "error": otherwise}],
        "url": link,
    }


def post(address: str, body: dict[str, Any]) -> None:
    """Post a JSON object.

    Raises:
        dg.Failure: the address does not take it; the tick of the sensor shows the reason.
    """
    from urllib.error import URLError
    from urllib.request import Request, urlopen

    try:
        request = Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=TIMEOUT_SECONDS):
            pass
    except (URLError, OSError, ValueError) as error:
        # The address may contain a secret, so the message does not repeat it.
        reason = f"the alert for run {body['run_id']} was not taken by {ALERT_URL}: {error}"
        raise dg.Failure(reason, allow_retries=False) from None
