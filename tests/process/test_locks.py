"""The contract of locks, over flock and Postgres: exclusion, sharing, the end of a holder, messages."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from etpi_resources.process.locks import LockHeld, LockLost, Locks, lake_locks, machine_locks, require_held
from etpi_resources.process.progress import acting_for

CHECKOUT = str(Path(__file__).parents[2])
HOLDER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from etpi_resources.process.locks import lake_locks
with lake_locks().hold(Path(sys.argv[2]), shared=sys.argv[3] == "shared"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(params=["flock", pytest.param("postgres", marks=pytest.mark.cluster)])
def locks(request) -> Locks:
    """Each implementation, as a lake gets it."""
    if request.param == "postgres":
        request.getfixturevalue("cluster_settings")
    found = lake_locks()
    assert (found is machine_locks()) == (request.param == "flock")
    return found


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "lake" / "locks" / "thing.lock"


@pytest.fixture
def other(path):
    """Start processes that hold the lock; none outlives the test."""
    started: list[subprocess.Popen[str]] = []

    def start(kind: str = "alone") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, CHECKOUT, str(path), kind], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout and process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def taken(locks: Locks, path: Path, shared: bool = False) -> bool:
    """Whether another thread can take the lock now."""
    results: list[bool] = []

    def take() -> None:
        try:
            with locks.hold(path, wait=False, shared=shared):
                results.append(False)
        except LockHeld:
            results.append(True)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return results[0]


def test_lock_excludes_another_process_until_it_is_killed(locks, path, other):
    assert not locks.is_held(path)
    process = other()
    assert locks.is_held(path)
    with (
        pytest.raises(LockHeld, match=f"thing .*{process.pid} .* {socket.gethostname()}"),
        locks.hold(path, wait=False),
    ):
        pass
    lines: list[str] = []

    def kill_the_holder(line: str) -> None:
        lines.append(line)
        os.kill(process.pid, signal.SIGKILL)

    with acting_for("plan_first"), locks.hold(path, log=kill_the_holder, what="the base", doing="training") as held:
        assert held.still_held() and locks.is_held(path)
        assert locks.holder_of(path) == f"plan_first on {socket.gethostname()}"
    (line,) = lines
    assert line.startswith(f"plan_first waits for the base that process {process.pid} ")
    assert line.endswith(f"on {socket.gethostname()} is training")
    assert not locks.is_held(path)


def test_lock_excludes_threads_of_one_process(locks, path):
    with locks.hold(path):
        assert taken(locks, path) and taken(locks, path, shared=True)
        assert not taken(locks, path.with_name("another.lock"))
    assert not taken(locks, path)
    running: list[int] = []

    def enter() -> None:
        for _ in range(5):
            with locks.hold(path):
                running.append(1)
                assert len(running) == 1
                time.sleep(0.002)
                running.pop()

    threads = [threading.Thread(target=enter) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert running == []


def test_shared_holders_exclude_one_alone_and_not_each_other(locks, path, other):
    process = other("shared")
    with locks.hold(path, wait=False, shared=True) as held, locks.hold(path, wait=False, shared=True):
        assert held.still_held() and taken(locks, path) and not taken(locks, path, shared=True)
    assert locks.is_held(path) and taken(locks, path)
    process.kill()
    process.wait()
    with locks.hold(path):
        assert taken(locks, path, shared=True)


def test_thread_is_told_of_a_lost_lock_of_its_own(locks, path, request):
    with locks.hold(path) as held, locks.hold(path.with_name("inner.lock")):
        require_held()
        if isinstance(locks, type(machine_locks())):
            path.unlink()
        else:
            assert request.getfixturevalue("postgres_server").end_sessions() >= 1
        assert not held.still_held()
        with pytest.raises(LockLost, match=" thing "):
            require_held()
        assert not taken(locks, path), "the lock is free for others"
        thread = threading.Thread(target=require_held)
        thread.start()
        thread.join()
    require_held()
