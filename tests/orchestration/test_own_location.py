"""The code location of docs/automation.md, with a schedule and an alert of one's own."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest

from tests.support.web_server import WebServer


@pytest.fixture
def receiver(monkeypatch):
    bodies = []
    with WebServer(lambda handler: (bodies.append(handler.body), handler.reply(200))) as server:
        monkeypatch.setenv("ALERT_URL", f"{server.url}/hook")
        yield bodies


@dg.op
def fail():
    raise dg.Failure("sft_checkpoint: no GPU; run it elsewhere")


@dg.job
def train():
    fail()


def test_own_location_has_all_of_etpi_and_posts_the_reason_of_a_failed_run(receiver):
    page = (Path(__file__).parents[2] / "docs" / "automation.md").read_text("utf-8")
    location: dict = {}
    exec(page.partition("```python\n")[2].partition("```")[0], location)
    assert sum(isinstance(value, dg.Definitions) for value in location.values()) == 1, "Dagster loads no file of two"
    repository = location["defs"].get_repository_def()
    assert {"import_logs"} == {schedule.name for schedule in repository.schedule_defs}
    assert {"alert"} == {sensor.name for sensor in repository.sensor_defs}
    with dg.DagsterInstance.ephemeral() as instance:
        result = train.execute_in_process(instance=instance, raise_on_error=False)
        event = result.get_run_failure_event()
        context = dg.build_run_status_sensor_context("alert", event, instance, result.dagster_run)
        location["alert"](context.for_run_failure())
    assert receiver == [{"text": "train failed: sft_checkpoint: no GPU; run it elsewhere"}]
