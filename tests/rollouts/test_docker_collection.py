"""Killing a collection in containers: no container remains, and the next collection resumes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from etpi_assets.resources import Resources
from etpi_assets.rollouts.assets import raw_rollouts
from etpi_assets.tasks.assets import tasks
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.sandboxes.docker import DockerFactory
from tests.support.waiting import until

SUITE = 'extends = "coop_tiny_shared"\n[params]\ntrain = 3\nheldout = 24\nsandbox = "docker"\n'
SET = 'extends = "coop_tiny_shared_strong"\nsuite = "little"\ntasks = 3\nk = 1\nsandbox = "docker"\n'
COLLECT = """
import sys
from pathlib import Path
from etpi_assets.resources import Resources
from etpi_assets.rollouts.assets import raw_rollouts
from etpi_resources.lake.lake import Lake
folder = Path(sys.argv[1])
raw_rollouts.execute("little", Resources(lake=Lake(folder / "lake"), specs_folder=folder / "specs", concurrency=1))
"""


def finished(folder: Path) -> dict[str, str]:
    """Return rollout id -> start time of the journals' complete lines."""
    lines = [
        json.loads(line)
        for file in (folder / "lake" / "scratch").rglob("journal-*.jsonl")
        for line in file.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
    return {line["key"]: line["rows"]["rollouts"][0]["started_at"] for line in lines}


@pytest.mark.slow
def test_killed_collection_leaves_no_container_and_resumes(engine, tmp_path):
    for kind, text in (("suites", SUITE), ("rollout_sets", SET)):
        (tmp_path / "specs" / kind).mkdir(parents=True)
        (tmp_path / "specs" / kind / "little.toml").write_text(text)
    resources = Resources(lake=Lake(tmp_path / "lake"), specs_folder=tmp_path / "specs", concurrency=1)
    assert tasks.execute("little", resources).manifest.rows == {"tasks": 27, "quarantined": 0}
    before = set(engine.containers())

    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    host = subprocess.Popen([sys.executable, "-c", COLLECT, str(tmp_path)], env=environment)
    until(lambda: finished(tmp_path), 120)
    assert host.poll() is None, "the premise: the collection is killed in the middle"
    host.send_signal(signal.SIGKILL)
    host.wait()
    journaled = finished(tmp_path)

    outcome = raw_rollouts.execute("little", resources)
    assert not outcome.manifest.blocked
    rows = resources.lake.read(Ref("raw_rollouts", "rollout_set", "little"), "rollouts").to_pylist()
    assert len({row["rollout_id"] for row in rows}) == len(rows) == 3
    assert {row["error"] for row in rows} == {None}
    assert all(json.loads(row["outcome"])["reward"] in (0.0, 1.0) for row in rows)
    started = {row["rollout_id"]: row["started_at"] for row in rows}
    assert journaled and len(journaled) < 3
    for rollout, at in journaled.items():  # finished rollouts are not run again
        assert started[rollout] == datetime.fromisoformat(at)
    deadline = time.monotonic() + 20
    while set(engine.containers()) - before and time.monotonic() < deadline:
        time.sleep(0.5)
        DockerFactory().check()  # the engine may have been creating a container when the second collection connected
    assert set(engine.containers()) <= before
