"""Scoring, pairs and data sets continue after the blocks of a killed run, with the result of an undisturbed one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from etpi_assets.curation import dataset_plan, merge, pair_blocks
from etpi_assets.scoring import assets as scoring
from etpi_assets.trajectories import blocks
from tests.support.curation import SUITE, CurationLake

STEPS = (
    ("raw_rollouts", "good"),
    ("scored_rollouts", "good"),
    ("selected_trajectories", "clean"),
    ("tito_pairs", "clean"),
    ("upweighted_dataset", "clean"),
)


class Counted:
    """A function that counts its calls and is interrupted at one of them, as by Ctrl-C."""

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
        ("tito_pairs", pair_blocks, "make_pairs"),
        ("upweighted_dataset", merge, "merge"),
    ],
)
def test_interrupted_asset_continues_with_the_next_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asset: str, module: Any, name: str
) -> None:
    monkeypatch.setattr(blocks, "_ROLLOUTS", 4)
    monkeypatch.setattr(dataset_plan, "BLOCK_ROWS", 8)
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
