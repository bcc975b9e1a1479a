"""The sensor for files of imported rollout sets."""

from __future__ import annotations

import json
import os
import time

import dagster as dg
import pytest

from etpi_assets.orchestration.automation.import_folders import QUIET_SECONDS, evaluate, import_sensor, imported_folders
from etpi_assets.specs.load import load_specs
from tests.support.graph import write_spec

SPEC = 'title = "logs"\nkind = "imported"\nformat = "cooperbench"\npath = "{path}"\nsuite = "coop_tiny"\n'


def _write(folder, name, age=2 * QUIET_SECONDS):
    """Write a file as it is `age` seconds after it was last written."""
    (folder / name).write_text(name)
    then = time.time() - age
    for path in (folder / name, folder):
        os.utime(path, (then, then))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "logs").mkdir()
    _write(tmp_path / "logs", "a.json")
    return tmp_path / "logs"


def test_new_file_is_imported_once_after_two_equal_listings(folder):
    paths, now = {"logs": str(folder)}, time.time()
    cursor, due = evaluate(paths, {}, now)
    assert due == [], "switching the sensor on imports nothing"
    _write(folder, "b.json")
    cursor, due = evaluate(paths, cursor, now)
    assert due == [], "it may still be growing"
    cursor, due = evaluate(paths, cursor, now)
    assert due == ["logs"]
    cursor, due = evaluate(paths, cursor, now)
    assert due == []


def test_folder_that_is_being_written_waits(folder):
    paths, now = {"logs": str(folder)}, time.time()
    cursor, _ = evaluate(paths, {}, now)
    _write(folder, "b.json", age=1)
    for _ in range(3):
        cursor, due = evaluate(paths, cursor, now)
        assert due == []
    assert evaluate(paths, cursor, now + QUIET_SECONDS)[1] == ["logs"]


def test_emptied_folder_is_not_imported_and_its_return_is_no_change(folder):
    paths, now = {"logs": str(folder)}, time.time()
    cursor, _ = evaluate(paths, {}, now)
    content, stat = (folder / "a.json").read_text(), (folder / "a.json").stat()
    (folder / "a.json").unlink()
    for _ in range(2):
        cursor, due = evaluate(paths, cursor, now + 2 * QUIET_SECONDS)
        assert due == []
    (folder / "a.json").write_text(content)
    os.utime(folder / "a.json", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    for _ in range(2):
        cursor, due = evaluate(paths, cursor, now + 2 * QUIET_SECONDS)
        assert due == []


def test_sensor_requests_collect_rollouts_of_the_set(folder, tmp_path, monkeypatch):
    write_spec(tmp_path / "specs", "rollout_sets", "own_logs", SPEC.format(path=folder))
    write_spec(tmp_path / "specs", "rollout_sets", "elsewhere", SPEC.format(path="${NOT_SET_ANYWHERE}/x"))
    monkeypatch.setenv("ETPI_SPECS", str(tmp_path / "specs"))
    assert imported_folders(load_specs()) == {"own_logs": str(folder)}
    sensor, cursor, requests = import_sensor(), None, []
    for step in range(3):
        if step == 1:
            _write(folder, "b.json")
        result = sensor(dg.build_sensor_context(cursor=cursor))
        assert isinstance(result, dg.SensorResult)
        cursor, requests = result.cursor, result.run_requests or []
    (request,) = requests
    assert (request.partition_key, sensor.job_name) == ("own_logs", "collect_rollouts")
    assert json.loads(cursor or "")["own_logs"]["requested"] in (request.run_key or "")
    assert sensor.default_status is dg.DefaultSensorStatus.STOPPED
