"""Experiments side by side: real lanes, each a process that runs real jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from etpi_assets import resources
from etpi_assets.asset_run import shared_lock
from etpi_assets.runs import pool as lanes
from etpi_assets.specs.load import load_specs
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.process.progress import WORKER_VARIABLE
from etpi_resources.process.supervise import descendants
from tests.support.graph import write_spec
from tests.support.small_specs import DATA_ALONE, write_small_specs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where specs, lake and Dagster's home are. What the experiments below rest on is there."""
    made = tmp_path_factory.mktemp("lanes")
    write_small_specs(made / "specs")
    with _started(made, "first") as process:
        assert process.stderr
        said = process.stderr.read()
        assert process.wait() == 0, said
    assert "-- collect_rollouts of little_strong: done" in said
    return made


def test_a_lane_takes_what_has_least_in_common_with_what_the_others_run():
    suite = {"suite a", "base a"}
    waiting = lanes.Waiting(
        {"a1": {*suite, "set 1"}, "a2": {*suite, "set 1"}, "a3": {*suite, "set 2"}, "b": {"suite b"}}
    )
    first, second = waiting.taken(), waiting.taken()
    assert (next(first), next(second)) == ("a1", "b")
    assert next(second) == "a3", "another rollout set, so less to wait for than for a2"
    assert (next(first, None), next(first, None), next(second, None)) == ("a2", None, None)


def test_what_the_shipped_experiments_share():
    specs = load_specs()
    found = {name: lanes.rests_on(name, specs) for name in ("plan_first_tiny", "plan_first_tiny_weak", "grpo_tcr_tiny")}
    assert found["grpo_tcr_tiny"].isdisjoint(found["plan_first_tiny"])
    assert len(found["plan_first_tiny"] & found["plan_first_tiny_weak"]) == 2
    assert lanes.rests_on("grpo_tcr_tiny_without", specs) == found["grpo_tcr_tiny"]


def _started(folder: Path, *names: str) -> subprocess.Popen[str]:
    """`make run` of experiments, its words on stderr."""
    places = {"DAGSTER_HOME": "", "ETPI_DATA": "data", "ETPI_CATALOG": "etpi.duckdb", "ETPI_SPECS": "specs"}
    return subprocess.Popen(
        [sys.executable, "-m", "etpi", "run", *names],
        cwd=ROOT,
        env={**os.environ, **{name: str(folder / place) for name, place in places.items()}},
        stderr=subprocess.PIPE,
        text=True,
    )


def _until(lines: Iterable[str], wanted: str) -> None:
    seen = []
    for line in lines:
        seen.append(line)
        if wanted in line:
            return
    raise AssertionError(f"never said {wanted!r}:\n{''.join(seen)}")


def test_several_experiments_run_side_by_side_and_one_that_fails_stops_no_other(folder):
    for name in ("left", "right", "third"):
        write_spec(folder / "specs", "experiments", name, DATA_ALONE)
    write_spec(folder / "specs", "experiments", "right", DATA_ALONE.replace("teacher = {}", "teacher.solved = 1.01"))
    with _started(folder, "left", "right", "third") as process:
        assert process.stderr
        said = process.stderr.read()
        assert process.wait() == 1, said
    assert "etpi: failed: right.\n  right: " in said and "etpi status right" in said
    assert "-- run_experiment of right: FAILED" in said
    assert "collect_rollouts" not in said and said.count("-- publish_catalog: done") == 1
    lake = Lake(folder / "data")
    for name in ("left", "third"):
        dataset = lake.current(Ref("upweighted_dataset", "experiment", name))
        assert dataset and dataset.rows["sequences"] > 0, said


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_stopped_command_leaves_no_lane(folder, number, code):
    names = [f"stopped_{number}_{letter}" for letter in "ab"]
    for name in names:
        write_spec(folder / "specs", "experiments", name, DATA_ALONE)
    with _started(folder, *names) as process:
        assert process.stderr
        _until(process.stderr, f"-- run_experiment of {names[0]}")
        below = descendants(process.pid)
        assert {_lane_of(pid) for pid in below} >= {"0", "1"}
        process.send_signal(number)
        process.stderr.read()
        assert process.wait(60) == code
    end = time.monotonic() + 30
    while left := [pid for pid in below if os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < end, left
        time.sleep(0.1)


def test_a_lane_that_dies_fails_what_it_had_alone(folder):
    for name in ("one", "two", "three"):
        write_spec(folder / "specs", "experiments", name, DATA_ALONE)
    with _started(folder, "one", "two", "three") as process:
        assert process.stderr
        _until(process.stderr, "-- run_experiment of one")
        os.kill(next(pid for pid in descendants(process.pid) if _lane_of(pid) == "0"), signal.SIGKILL)
        said = process.stderr.read()
        assert process.wait() == 1
    failed = [name for name in ("one", "two", "three") if f"etpi: failed: {name}.\n" in said]
    assert len(failed) == 1 and "the process that ran it was killed" in said, said


def _lane_of(pid: int) -> str | None:
    """The number of the lane that a process is; None for a supervisor of it."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    given = dict(pair.split(b"=", 1) for pair in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"=" in pair)
    return given.get(b"ETPI_LANE", b"").decode() if words[1:3] == [b"-m", b"etpi_assets.runs.pool"] else None


def test_a_shared_accelerator_is_one_lane(monkeypatch):
    monkeypatch.setattr(resources, "ACCELERATORS", ("null",))
    assert lanes.lanes_here(8) == 1
    monkeypatch.setattr(resources, "ACCELERATORS", ())
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert [lanes.lanes_here(n) for n in (1, 2, 8)] == [1, 2, 3]
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert lanes.lanes_here(8) == lanes.MOST


@pytest.mark.parametrize(
    ("lane", "shared", "lock"), [("1", (), "sandboxes-1"), ("0", ("null",), "sandboxes"), (None, (), "sandboxes")]
)
def test_a_lane_waits_for_another_s_rollouts_only_where_they_share_an_accelerator(monkeypatch, lane, shared, lock):
    monkeypatch.setattr(resources, "ACCELERATORS", shared)
    monkeypatch.delenv(WORKER_VARIABLE, raising=False)
    if lane:
        monkeypatch.setenv(WORKER_VARIABLE, lane)
    assert shared_lock("sandboxes") == lock
