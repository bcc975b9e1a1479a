"""Dagster's home, when several commands start on a new lake at the same time."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from etpi.dagster_home import prepare_dagster_home
from etpi_resources.lake.lake import LakeError

TIMES = int(os.environ.get("ETPI_TEST_FIRST_STARTS", "1"))
"""New homes in a row; before a release 100 are worth their quarter of an hour."""
_START_TOGETHER = """
import multiprocessing as mp
import sys
import dagster as dg
from etpi.dagster_home import prepare_dagster_home

def start(ready, failures):
    ready.wait()
    try:
        prepare_dagster_home()
        with dg.DagsterInstance.get() as instance:
            instance.get_runs()
        failures.put(None)
    except BaseException as error:
        failures.put(f"{type(error).__name__}: {error}")

fork = mp.get_context("fork")
ready, failures = fork.Barrier(20), fork.Queue()
processes = [fork.Process(target=start, args=(ready, failures)) for _ in range(20)]
for process in processes:
    process.start()
print(*(failure for failure in (failures.get() for _ in processes) if failure), sep="\\n")
"""


def _open(home: Path) -> None:
    import dagster as dg

    with dg.DagsterInstance.from_config(str(home)) as instance:
        for storage in (instance.run_storage, instance.event_log_storage, instance.schedule_storage):
            assert storage is not None
            current, newest = storage.alembic_version() or ("", None)
            assert current == newest


@pytest.mark.slow
@pytest.mark.parametrize("number", range(TIMES))
def test_twenty_processes_that_start_at_once_create_one_storage(number: int, tmp_path: Path) -> None:
    environment = {**os.environ, "DAGSTER_HOME": str(tmp_path / "home")}
    line = [sys.executable, "-c", _START_TOGETHER]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == ""
    _open(tmp_path / "home")


@pytest.fixture
def home(tmp_path: Path, monkeypatch) -> Path:
    """A home whose storage is to be looked at again."""
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    prepare_dagster_home()
    (tmp_path / "home" / "storage_ready").unlink()
    return tmp_path / "home"


def test_storage_that_a_killed_process_left_half_made_is_completed(home: Path) -> None:
    with sqlite3.connect(home / "history" / "runs.db") as runs:
        runs.execute("DROP TABLE alembic_version")
    prepare_dagster_home()
    _open(home)


def test_storage_that_cannot_be_opened_is_an_error_with_a_remedy(home: Path) -> None:
    with sqlite3.connect(home / "history" / "runs.db") as runs:
        runs.execute("INSERT INTO alembic_version VALUES ('5771160a95ad')")
    with pytest.raises(LakeError, match="mv "):
        prepare_dagster_home()
