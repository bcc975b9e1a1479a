"""Faults of a cluster while rollouts are collected: nothing finished is lost or doubled, and nobody is left behind.

Each case has a rollout set of its own. A run that a fault ends says why in one message, and the next continues.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from etpi_resources.lake.lake import Lake, Ref
from tests.support import lakes
from tests.support.cluster_runs import MANY, Runs
from tests.support.cluster_services import ClusterServices
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # a fixture's time counts too
BEGUN = 12
"""Rollouts in the journal before a fault comes."""


@dataclass
class Collection:
    """A rollout set that is being collected.

    Attributes:
        run: Dagster's id.
        journal: {rollout id: its start}, when the fault came.
    """

    services: ClusterServices
    runs: Runs
    lake: Path
    name: str
    run: str = ""
    journal: dict[str, str] | None = None

    def launch(self) -> str:
        return self.runs.by_web_page("collect_rollouts", f"many_{self.name}", "raw_rollouts")

    def begin(self) -> None:
        """Launch it, and wait until it is in its middle."""
        self.run = self.launch()
        until(lambda: len(self.journaled()) >= BEGUN or self.runs.has_ended(self.run), 240, "rollouts of the set")
        self.journal = self.journaled()
        assert BEGUN <= len(self.journal) < MANY, self.runs.messages(self.run)[-20:]

    def journaled(self) -> dict[str, str]:
        return lakes.journaled(self.lake, f"many_{self.name}")

    def end(self) -> tuple[str, list[str]]:
        """Wait for the run's end, and launch it again if it failed; return how it ended, and why it failed."""
        status, failures = self.runs.wait(self.run), self.runs.failures(self.run)
        print(self.name, status, failures)
        if status != "SUCCESS":
            self.runs.succeed(self.launch())
        return status, failures

    def require_whole(self) -> None:
        """Check that each rollout is there once, none was made again, nothing is damaged, and no process is left."""
        finished = lakes.rollouts(self.lake, f"many_{self.name}")
        assert len(finished) == MANY
        for key, at in (self.journal or {}).items():
            assert _second(finished[key]) == _second(at), f"{key} was rolled out again"
        versions = self.lake / "raw_rollouts" / "rollouts" / f"rollout_set=many_{self.name}"
        assert len(list(versions.glob("version=*"))) == 1
        assert lakes.damages(self.lake) == []
        self.services.await_no_orphans()


def _second(at: str) -> str:
    return at[:19].replace("T", " ")


@pytest.fixture
def collection(request, services, runs, prepared, shared_lake) -> Collection:
    """The set that the test's parameter names."""
    return Collection(services, runs, shared_lake, request.param)


def _of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("collection", [name], indirect=True, ids=[name])


@_of("worker")
def test_run_goes_on_by_itself_when_a_worker_is_killed(collection, services):
    collection.begin()
    worker = next(m for m in services.workers if services.running(m, "execute_step"))
    worker.kill_everything()
    services.start_ray(worker)
    assert collection.end()[0] == "SUCCESS"
    collection.require_whole()


@_of("postgres")
def test_run_says_that_postgres_was_restarted_and_the_page_launches_the_next(collection, services):
    collection.begin()
    services.stop_postgres()
    time.sleep(3)
    services.start_postgres()
    status, failures = collection.end()  # launches from the page that ran before
    assert (status, len(failures)) == ("FAILURE", 1)
    assert "ended" in failures[0] and "Nothing was published" in failures[0]
    collection.require_whole()


@_of("readonly")
def test_run_says_that_the_shared_folder_is_read_only(collection, services, runs):
    collection.begin()
    everywhere = list(services.machines.by_name.values())
    for machine in everywhere:
        machine.shared_is_writable(False)
    runs.wait(collection.run)  # at the latest where its version is published
    for machine in everywhere:
        machine.shared_is_writable(True)
    status, failures = collection.end()
    assert status == "FAILURE" and len(failures) == 1 and "Read-only file system" in failures[0]
    collection.require_whole()


@_of("publish")
def test_step_killed_while_its_version_is_published(collection, services, runs, shared_lake):
    """The step is stopped at the first file of its version, so that it dies before the pointer names it."""
    collection.begin()
    step = next(m for m in services.workers if services.running(m, "execute_step"))
    pids = [pid for pid, line in step.processes().items() if "execute_step" in line]
    staging = shared_lake / ".staging"
    until(lambda: any(staging.glob("*/*rollouts*")), 300, every=0.002)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    assert Lake(shared_lake).current(Ref("raw_rollouts", "rollout_set", f"many_{collection.name}")) is None, "too late"
    collection.journal = collection.journaled()
    step.kill_everything()
    services.start_ray(step)
    assert collection.end()[0] == "SUCCESS"
    collection.require_whole()


@_of("twice")
def test_two_users_launch_the_same_at_once_and_it_is_made_once(collection, runs):
    launched: list[str] = []
    users = [threading.Thread(target=lambda: launched.append(collection.launch())) for _ in range(2)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    for run in launched:
        runs.succeed(run)
    name = f"raw_rollouts of many_{collection.name} computed in"
    collections = [line for run in launched for line in runs.messages(run) if name in line]
    assert len(launched) == 2 and len(collections) == 1
    collection.require_whole()


@_of("head")
def test_run_continues_when_the_heads_raylet_is_killed(collection, services):
    """Ray's head ends with its raylet; every node is started again, and the daemon resumes the run."""
    collection.begin()
    services.head.kill("raylet/raylet")
    until(lambda: not services.running(services.head, "gcs_server"), 60, "Ray's head has ended")
    for machine in services.workers:
        machine.kill_everything()
    services.start_ray()
    collection.end()
    collection.require_whole()
