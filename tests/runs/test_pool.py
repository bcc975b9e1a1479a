"""Experiments in parallel: real worker processes that run real jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread

import pytest

from etpi_assets import resources
from etpi_assets.asset import resource_lock
from etpi_assets.runs import pool
from etpi_assets.specs.load import load_specs
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.process.progress import acting_for
from etpi_resources.process.supervise import descendants
from tests.support.graph import write_spec
from tests.support.small_specs import DATA_ALONE, write_small_specs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with specs, lake and Dagster home, in which the inputs of the experiments below are up to date."""
    path = tmp_path_factory.mktemp("pool")
    write_small_specs(path / "specs")
    with _started(path, "first") as process:
        assert process.stderr
        output = process.stderr.read()
        assert process.wait() == 0, output
    assert "-- collect_rollouts of little_strong: done" in output
    return path


def test_worker_takes_the_experiment_that_shares_fewest_inputs_with_running_ones():
    suite = {"suite a", "base a"}
    queue = pool.ExperimentQueue(
        {"a1": {*suite, "set 1"}, "a2": {*suite, "set 1"}, "a3": {*suite, "set 2"}, "b": {"suite b"}}
    )
    first, second = queue.take(), queue.take()
    assert (next(first), next(second)) == ("a1", "b")
    assert next(second) == "a3", "another rollout set, so less to wait for than for a2"
    assert (next(first, None), next(first, None), next(second, None)) == ("a2", None, None)


def test_shared_inputs_of_shipped_experiments():
    specs = load_specs()
    inputs = {
        name: pool.shared_inputs(name, specs) for name in ("plan_first_tiny", "plan_first_tiny_weak", "grpo_tcr_tiny")
    }
    assert inputs["grpo_tcr_tiny"].isdisjoint(inputs["plan_first_tiny"])
    assert len(inputs["plan_first_tiny"] & inputs["plan_first_tiny_weak"]) == 2
    assert pool.shared_inputs("grpo_tcr_tiny_without", specs) == inputs["grpo_tcr_tiny"]


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


def test_failed_experiment_stops_no_other(folder):
    for name in ("left", "right", "third"):
        write_spec(folder / "specs", "experiments", name, DATA_ALONE)
    write_spec(folder / "specs", "experiments", "right", DATA_ALONE.replace("teacher = {}", "teacher.solved = 1.01"))
    with _started(folder, "left", "right", "third") as process:
        assert process.stderr
        output = process.stderr.read()
        assert process.wait() == 1, output
    assert "etpi: failed: right.\n  right: " in output and "etpi status right" in output
    assert "-- run_experiment of right: FAILED" in output
    assert "collect_rollouts" not in output and output.count("-- publish_catalog: done") == 1
    lake = Lake(folder / "data")
    for name in ("left", "third"):
        dataset = lake.current(Ref("upweighted_dataset", "experiment", name))
        assert dataset and dataset.rows["sequences"] > 0, output


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_stopped_command_leaves_no_worker(folder, number, code):
    names = [f"stopped_{number}_{letter}" for letter in "ab"]
    for name in names:
        write_spec(folder / "specs", "experiments", name, DATA_ALONE)
    with _started(folder, *names) as process:
        assert process.stderr
        _until(process.stderr, f"-- run_experiment of {names[0]}")
        below = descendants(process.pid)
        assert sum(map(_is_worker, below)) == 2
        process.send_signal(number)
        process.stderr.read()
        assert process.wait(60) == code
    end = time.monotonic() + 30
    while left := [pid for pid in below if os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < end, left
        time.sleep(0.1)


def test_worker_that_dies_fails_only_its_own_experiment(folder):
    for name in ("one", "two", "three"):
        write_spec(folder / "specs", "experiments", name, DATA_ALONE)
    with _started(folder, "one", "two", "three") as process:
        assert process.stderr
        _until(process.stderr, "-- run_experiment of one")
        os.kill(next(filter(_is_worker, descendants(process.pid))), signal.SIGKILL)
        output = process.stderr.read()
        assert process.wait() == 1
    failed = [name for name in ("one", "two", "three") if f"etpi: failed: {name}.\n" in output]
    assert len(failed) == 1 and "the process that ran it was killed" in output, output


def _is_worker(pid: int) -> bool:
    """Whether the process is a pool worker, and not its supervisor."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:3] == [b"-m", b"etpi_assets.runs.pool"]


def test_runs_share_an_accelerator_one_by_one_else_one_for_each_core(monkeypatch):
    monkeypatch.setattr(resources, "ACCELERATORS", ("null",))
    assert resources.side_by_side() == 1
    monkeypatch.setattr(resources, "ACCELERATORS", ())
    for cores, places in ((3, 3), (64, resources.MOST_SIDE_BY_SIDE)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert resources.side_by_side() == places


def test_runs_take_the_places_of_the_machine_and_the_next_one_waits(world, monkeypatch):
    """Whoever starts them: the pool, `dg launch` and the web page take the same places."""
    monkeypatch.setattr(resources, "ACCELERATORS", ())
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    lines, inside = [], Event()
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(resource_lock("sandboxes", world.lake, lines.append))

        def enter() -> None:
            with acting_for("third"), resource_lock("sandboxes", world.lake, lines.append):
                inside.set()

        thread = Thread(target=enter)
        thread.start()
        with resource_lock("accelerator", world.lake, lines.append):
            assert not inside.wait(1.5), "two places, and neither is free"
    thread.join()
    assert inside.is_set() and len(lines) == 1
    assert lines[0].startswith("third waits for the sandboxes that ") and lines[0].endswith(" are using")
    assert lines[0].count(f"process {os.getpid()} ") == 2


def test_runs_on_different_accelerators_of_a_machine_do_not_wait_and_one_on_all_does(world, monkeypatch):
    monkeypatch.setattr(resources, "ACCELERATORS", ("null",))

    def waits_on(devices: str) -> bool:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        inside = Event()

        def enter() -> None:
            with resource_lock("accelerator", world.lake, lambda line: None):
                inside.set()

        thread = Thread(target=enter)
        thread.start()
        threads.append(thread)
        return not inside.wait(0.5)

    threads: list[Thread] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with resource_lock("accelerator", world.lake, print):
        assert [waits_on(devices) for devices in ("2,3", "1,2", "")] == [False, True, True]
    for thread in threads:
        thread.join()
