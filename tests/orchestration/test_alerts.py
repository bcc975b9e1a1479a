"""The sensor that posts a message for every failed run, against a local server."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import dagster as dg
import pytest

from etpi_assets.orchestration.automation.alerts import alert_sensor


class _Receiver(BaseHTTPRequestHandler):
    bodies: list[dict] = []
    status = 200

    def do_POST(self):
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, format, *args):
        pass


@pytest.fixture
def receiver(monkeypatch):
    _Receiver.bodies, _Receiver.status = [], 200
    server = HTTPServer(("127.0.0.1", 0), _Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("ETPI_ALERT_URL", f"http://127.0.0.1:{server.server_port}/hook?token=geheim")
    yield _Receiver
    server.shutdown()
    server.server_close()


@dg.op
def fail():
    raise dg.Failure("sft_checkpoint: no GPU; run it elsewhere")


@dg.job(partitions_def=dg.StaticPartitionsDefinition(["first"]))
def train():
    fail()


@pytest.fixture
def evaluated():
    """Evaluate the sensor on a failed run of the partition `first`."""

    def evaluate():
        with dg.DagsterInstance.ephemeral() as instance:
            result = train.execute_in_process(instance=instance, partition_key="first", raise_on_error=False)
            context = dg.build_run_status_sensor_context(
                "alert_on_failure", result.get_run_failure_event(), instance, result.dagster_run
            )
            return result.run_id, alert_sensor()(context.for_run_failure())

    return evaluate


def test_failed_run_is_posted_with_job_partition_step_and_reason(receiver, evaluated, monkeypatch):
    monkeypatch.setenv("ETPI_PAGE_URL", "http://gpu-box:3000/")
    run_id, _ = evaluated()
    (body,) = receiver.bodies
    assert (body["job"], body["partition"], body["run_id"]) == ("train", "first", run_id)
    assert body["errors"] == [{"step": "fail", "error": "sft_checkpoint: no GPU; run it elsewhere"}]
    assert body["url"] == f"http://gpu-box:3000/runs/{run_id}"
    assert body["text"].startswith("etpi: train of first failed: sft_checkpoint: no GPU")


def test_refused_alert_fails_the_tick_without_the_secret_of_the_address(receiver, evaluated):
    receiver.status = 403
    with pytest.raises(dg.Failure, match="403") as raised:
        evaluated()
    assert "geheim" not in str(raised.value)


def test_unreachable_address_fails_the_tick(evaluated, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("ETPI_ALERT_URL", f"http://127.0.0.1:{unused.getsockname()[1]}/")
    with pytest.raises(dg.Failure, match="was not taken by ETPI_ALERT_URL"):
        evaluated()


def test_no_address_no_message(evaluated, monkeypatch):
    monkeypatch.delenv("ETPI_ALERT_URL", raising=False)
    _, said = evaluated()
    assert isinstance(said, dg.SkipReason)
    assert alert_sensor().default_status is dg.DefaultSensorStatus.STOPPED
