"""Experiments on three machines: as on one machine, and through kills of workers, of Ray's head and of Postgres.

Each kill has a rollout set of its own. After each: nothing that was in the journal is rolled out again, no rollout is
there twice, nothing is damaged, no process is left.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from tests.support import lakes
from tests.support.cluster_runs import Runs
from tests.support.cluster_services import until
from tests.support.graph import write_spec
from tests.support.machines import ROOT
from tests.support.small_specs import write_small_specs

pytestmark = pytest.mark.slow

_MANY = 'extends = "coop_tiny_strong"\nsuite = "little"\ntasks = 24\nk = 6\n'
_NO_GATES = "teacher = {}\nformat_exposure = 0\nrole_balance = 0.0\nplan_paths_in_task = 0.0\n"
_TRAINED = (
    'extends = "plan_first_tiny"\nrollout_sets = ["little_strong"]\nevaluate = "none"\n'
    f"[train]\nepochs = 6.0\n[gates]\n{_NO_GATES}"
)
_KILLS = ("one_worker", "both_workers", "head", "postgres", "readonly", "publish", "twice")
_LEFT = ("execute_step", "bwrap", "etpi.cli", "trainers", "ray::")
_RAY_OWN = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")


@pytest.fixture(scope="module")
def runs(services):
    specs = write_small_specs(services.machines.shared / "specs")
    for name in _KILLS:
        write_spec(specs, "rollout_sets", f"many_{name}", _MANY)
    write_spec(specs, "experiments", "trained", _TRAINED)
    result = Runs(services)
    services.head.start(
        "dagster-daemon", "run", "-m", "etpi_assets.definitions", log=services.log("daemon"), **services.environment()
    )
    result.start_web_page()
    return result


@pytest.fixture(scope="module")
def lake(services):
    return services.machines.shared / "lake"


@pytest.fixture(scope="module")
def collected(runs):
    """The suite and the rollout set of `first`, by `dagster job launch`."""
    runs.succeed(runs.by_command("prepare_suite", "little"))
    run = runs.by_command("collect_rollouts", "little_strong")
    runs.succeed(run)
    return run


def test_rollouts_run_on_both_workers(runs, collected):
    spread = [line for line in runs.messages(collected) if "rollouts run on 2 nodes" in line]
    assert spread and "worker1" in spread[0] and "worker2" in spread[0]


def test_experiment_is_the_same_row_for_row_as_on_one_machine(runs, collected, lake, tmp_path):
    runs.succeed(runs.by_web_page("run_experiment", "first"))
    alone = tmp_path / "lake"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ETPI_", "DAGSTER_"))}
    specs = write_small_specs(tmp_path / "specs")
    subprocess.run(
        [sys.executable, "-m", "etpi", "run", "first"], cwd=ROOT, check=True, capture_output=True,
        env={**environment, "ETPI_DATA": str(alone), "ETPI_SPECS": str(specs), "DAGSTER_HOME": str(tmp_path / "home")},
    )  # fmt: skip
    assert lakes.differences(alone, lake) == []
    other = {name for name, version in lakes.hashes(alone).items() if lakes.hashes(lake).get(name) != version}
    print("other data versions:", sorted(other))
    assert all(name.startswith(("raw_rollouts", "experiment_report", "catalog")) for name in other)


def _begun(runs, lake, name: str, least: int = 12) -> tuple[str, dict[str, str]]:
    """Launch a rollout set, wait until that many rollouts are in the journal, and return the run and the journal."""
    before = len(lakes.journaled(lake))
    run = runs.by_web_page("collect_rollouts", f"many_{name}")
    until(lambda: len(lakes.journaled(lake)) >= before + least, 240, f"{least} rollouts of many_{name}")
    return run, lakes.journaled(lake)


def _whole(services, lake, name: str, journal: dict[str, str]) -> None:
    """Check the invariants after a set was finished."""
    finished = lakes.rollouts(lake, f"many_{name}")
    assert len(finished) == 144
    again = [key for key, at in finished.items() if key in journal and not _same(journal[key], at)]
    assert again == [], "rolled out again"
    assert sum(key in journal for key in finished) >= 12, "the kill came in mid-collection"
    assert lakes.damages(lake) == []
    until(lambda: not _left(services), 60, "no orphans")


def _same(left: str, right: str) -> bool:
    return left[:19].replace("T", " ") == right[:19].replace("T", " ")


def _left(services) -> list[str]:
    return [
        f"{machine.name}: {line}"
        for machine in services.machines.by_name.values()
        for line in machine.processes().values()
        if any(word in line for word in _LEFT) and not any(word in line for word in _RAY_OWN)
    ]


def _finish(runs, name: str, run: str) -> str:
    """Wait for the run; if it failed, say why and launch it again. Return its first status."""
    status = runs.wait(run)
    if status != "SUCCESS":
        print("failed:", [line for line in runs.messages(run) if "FAILURE" in line][:3])
        runs.succeed(runs.by_web_page("collect_rollouts", f"many_{name}"))
    print(f"many_{name}: {status}")
    return status


def test_a_worker_killed_in_mid_collection(services, runs, collected, lake):
    run, journal = _begun(runs, lake, "one_worker")
    worker = next((m for m in services.workers if services.running(m, "raw_rollouts")), services.workers[0])
    worker.kill_everything()
    assert _finish(runs, "one_worker", run) == "SUCCESS"
    services.start_ray(worker)
    _whole(services, lake, "one_worker", journal)


def test_the_raylet_of_the_head_killed_in_mid_collection(services, runs, collected, lake):
    run, journal = _begun(runs, lake, "head")
    services.head.kill("raylet/raylet")
    services.head.kill("ray start --head")
    until(lambda: not services.running(services.head, "gcs_server"), 60, "Ray's head has ended")
    for machine in services.workers:
        machine.kill_everything()
    services.start_ray()
    _finish(runs, "head", run)
    _whole(services, lake, "head", journal)


def test_postgres_killed_and_started_again_in_mid_collection(services, runs, collected, lake):
    run, journal = _begun(runs, lake, "postgres")
    services.stop_postgres()
    time.sleep(5)
    services.start_postgres()
    _finish(runs, "postgres", run)
    _whole(services, lake, "postgres", journal)


def test_the_shared_folder_read_only_for_a_while(services, runs, collected, lake):
    run, journal = _begun(runs, lake, "readonly")
    everywhere = list(services.machines.by_name.values())
    for machine in everywhere:
        machine.shared_is_writable(False)
    time.sleep(10)
    for machine in everywhere:
        machine.shared_is_writable(True)
    status = _finish(runs, "readonly", run)
    assert status == "SUCCESS" or any("Read-only" in line for line in runs.messages(run, "%FAILURE%"))
    _whole(services, lake, "readonly", journal)


def test_workers_killed_while_a_version_is_published(services, runs, collected, lake):
    run, journal = _begun(runs, lake, "publish")

    def publishing() -> bool:
        return any((lake / ".staging").glob("*/rollouts*"))

    deadline = time.monotonic() + 300
    while not publishing():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for worker in services.workers:
        worker.kill_everything()
    services.start_ray(*services.workers)
    _finish(runs, "publish", run)
    _whole(services, lake, "publish", journal)


def test_two_users_launch_the_same_at_once_and_it_is_made_once(services, runs, collected, lake):
    launched: list[str] = []

    def launch() -> None:
        launched.append(runs.by_web_page("collect_rollouts", "many_twice"))

    users = [threading.Thread(target=launch) for _ in range(2)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    for run in launched:
        runs.succeed(run)
    _whole_once = [line for run in launched for line in runs.messages(run) if "raw_rollouts of many_twice made" in line]
    assert len(_whole_once) == 1
    versions = list((lake / "raw_rollouts" / "rollouts" / "rollout_set=many_twice").glob("version=*"))
    assert len(versions) == 1
    assert len(lakes.rollouts(lake, "many_twice")) == 144


def test_a_worker_killed_in_mid_training(services, runs, collected, lake):
    run = runs.by_web_page("run_experiment", "trained")
    until(lambda: any(services.running(m, "sft_worker") for m in services.machines.by_name.values()), 400, "it trains")
    machine = next(m for m in services.machines.by_name.values() if services.running(m, "sft_worker"))
    time.sleep(8)
    if machine.name == "head":
        machine.kill("sft_worker")
    else:
        machine.kill_everything()
        services.start_ray(machine)
    status = runs.wait(run)
    print("trained:", machine.name, status, [line for line in runs.messages(run) if "FAILURE" in line][:2])
    if status != "SUCCESS":
        runs.succeed(runs.by_web_page("run_experiment", "trained"))
    assert lakes.damages(lake) == []
    until(lambda: not _left(services), 60, "no orphans")
