"""The code location of docs/automation.md, with a schedule and an alert of one's own."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import dagster as dg
import pytest


class _Receiver(BaseHTTPRequestHandler):
    bodies: list[dict] = []

    def do_POST(self):
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format, *args):
        pass


@pytest.fixture
def receiver(monkeypatch):
    server = HTTPServer(("127.0.0.1", 0), _Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("ALERT_URL", f"http://127.0.0.1:{server.server_port}/hook")
    yield _Receiver.bodies
    server.shutdown()
    server.server_close()


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
