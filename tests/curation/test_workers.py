"""Scoring, pairs and weighted data sets give the same versions from one process and from several."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from etpi_assets.curation import dataset_blocks, pair_blocks
from etpi_assets.trajectories import tables as trajectory_tables
from etpi_resources.process import pool
from tests.support.curation import STEPS, CurationLake


@pytest.mark.slow
def test_versions_are_the_same_from_one_process_and_from_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = CurationLake(tmp_path / "alone")
    alone.write("suites", "small", "title = 's'\nfamily = 'coop_tiny_shared'\n[params]\ntrain = 10\nheldout = 24\n")
    alone.rollout_set("good")
    alone.experiment("clean", more='[pairs]\ncapture = "native"\n')
    alone.experiment("written_again", more='[pairs]\ncapture = "retokenised"\n')
    alone.make("tasks", "small")
    alone.make("raw_rollouts", "good")
    shutil.copytree(alone.folder, tmp_path / "shared")
    started: list[object] = []
    start = pool.LocalWorkers._start
    monkeypatch.setattr(pool.LocalWorkers, "_start", lambda self: started.append(self) or start(self))
    monkeypatch.setattr(trajectory_tables, "_ROLLOUTS", 3)
    monkeypatch.setattr(dataset_blocks, "BLOCK_ROWS", 8)
    monkeypatch.setattr(pair_blocks, "_ROWS", 8)
    monkeypatch.setattr(pool, "START_SECONDS", 1e-9)  # as if there were a lot of work
    made = {}
    for workers, world in ((1, alone), (2, CurationLake(tmp_path / "shared"))):
        monkeypatch.setenv(pool.WORKERS_VARIABLE, str(workers))
        made[workers] = [world.make(*step).manifest for step in STEPS]
        assert not [m.failures for m in made[workers] if m.blocked]
        assert len(started) == (0 if workers == 1 else 14), "two each for scores; for pairs, leaks and rows of both"
    assert [(m.version, m.checks) for m in made[2]] == [(m.version, m.checks) for m in made[1]]
    assert {m.tables["pairs"]["rows"] > 0 for m in made[2] if "pairs" in m.tables} == {True}
