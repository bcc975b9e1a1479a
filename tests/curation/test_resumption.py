"""Scoring, pairs and data sets continue after the blocks of a killed run, with the result of an undisturbed one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from etpi_assets.curation import dataset_blocks, integrity, merge
from etpi_assets.scoring import assets as scoring
from etpi_assets.trajectories import tables as trajectory_tables
from etpi_resources.lake.lake import Ref
from etpi_resources.process.pool import WORKERS_VARIABLE
from tests.support.curation import SUITE, CurationLake
from tests.support.waiting import until

STEPS = (
    ("raw_rollouts", "good"),
    ("scored_rollouts", "good"),
    ("selected_trajectories", "clean"),
    ("tito_pairs", "clean"),
    ("upweighted_dataset", "clean"),
)
BLOCK_ROWS = 8
ROOT = Path(__file__).parents[2]
KILLED = f"""
import json, os, signal, sys
from pathlib import Path
from etpi_assets import asset as asset_module
from etpi_assets.curation import dataset_blocks
from etpi_resources.process import pool
from etpi_resources.process.supervise import descendants
from tests.support.curation import CurationLake

dataset_blocks.BLOCK_ROWS, pool.START_SECONDS = {BLOCK_ROWS}, 1e-9

def killed_at_the_third_block(*arguments, **options):
    for number, part in enumerate(pool.ordered_map(*arguments, **options)):
        if number == 2:
            print(json.dumps(descendants(os.getpid())), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        yield part

asset_module.ordered_map = killed_at_the_third_block
CurationLake(Path(sys.argv[1])).make("upweighted_dataset", "clean")
"""
"""A run with worker processes that is killed when it has the third block of a data set; it prints their pids."""


class Counted:
    """A function that a block calls once: it counts its calls and is interrupted at one of them, as by Ctrl-C."""

    def __init__(self, function: Any) -> None:
        self._function, self.calls, self.interrupted_at = function, 0, 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == self.interrupted_at:
            raise KeyboardInterrupt
        return self._function(*arguments, **options)


@pytest.mark.parametrize(
    ("asset", "module", "name"),
    [
        ("scored_rollouts", scoring, "score"),
        ("tito_pairs", integrity, "reconcile_figures"),
        ("upweighted_dataset", merge, "merge"),
    ],
)
def test_interrupted_asset_continues_with_the_next_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asset: str, module: Any, name: str
) -> None:
    monkeypatch.setattr(trajectory_tables, "_ROLLOUTS", 4)
    monkeypatch.setattr(dataset_blocks, "BLOCK_ROWS", BLOCK_ROWS)
    counted = Counted(getattr(module, name))
    monkeypatch.setattr(module, name, counted)
    whole = CurationLake(tmp_path / "whole")
    whole.write("suites", "small", SUITE)
    whole.rollout_set("good")
    whole.experiment("clean")
    whole.make("tasks", "small")
    for step in STEPS[: [step for step, _ in STEPS].index(asset)]:
        whole.make(*step)
    shutil.copytree(whole.folder, tmp_path / "killed")
    killed = CurationLake(tmp_path / "killed")
    counted.calls = 0
    key = dict(STEPS)[asset]
    version = whole.make(asset, key).manifest
    calls = counted.calls
    assert calls > 4 and not version.blocked

    counted.calls, counted.interrupted_at = 0, 4
    with pytest.raises(KeyboardInterrupt):
        killed.make(asset, key)
    counted.calls, counted.interrupted_at = 0, 0
    resumed = killed.make(asset, key).manifest
    assert (resumed.version, resumed.checks) == (version.version, version.checks)
    assert counted.calls == calls - 3
    assert not list(killed.lake.root.glob("scratch/parts/*"))


def test_data_set_killed_by_sigkill_continues_with_the_blocks_that_its_workers_had_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_blocks, "BLOCK_ROWS", BLOCK_ROWS)
    whole = CurationLake.with_rollouts(tmp_path / "whole")
    for asset, key in STEPS[2:4]:
        whole.make(asset, key)
    shutil.copytree(whole.folder, tmp_path / "killed")
    counted = Counted(merge.merge)
    monkeypatch.setattr(merge, "merge", counted)
    version = whole.make("upweighted_dataset", "clean").manifest
    total = counted.calls

    environment = {**os.environ, WORKERS_VARIABLE: "2"}
    command = [sys.executable, "-c", KILLED, str(tmp_path / "killed")]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, timeout=60)
    assert done.returncode == -signal.SIGKILL
    _wait_for_the_end_of(json.loads(done.stdout))
    killed = CurationLake(tmp_path / "killed")
    finished = list(killed.lake.root.glob("scratch/parts/*/*/[!.]*"))
    assert 3 <= len(finished) < total

    counted.calls = 0
    resumed = killed.make("upweighted_dataset", "clean").manifest
    assert counted.calls == total - len(finished), "finished blocks were computed again"
    assert (resumed.version, resumed.checks) == (version.version, version.checks) and not resumed.blocked
    tables = [{name: _bytes(world, name) for name in version.tables} for world in (whole, killed)]
    assert tables[0] == tables[1]
    assert not list(killed.lake.root.glob("scratch/parts/*")) and not list(killed.lake.root.glob(".staging/*"))


def _bytes(world: CurationLake, table: str) -> list[bytes]:
    files = world.lake.files(Ref("upweighted_dataset", "experiment", "clean"), table)
    return [path.read_bytes() for path in files]


def _wait_for_the_end_of(pids: list[int]) -> None:
    assert len(pids) >= 2, "there were worker processes"
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), 30)
