"""The whole chain at its smallest, as a user runs it: rollouts, a training, its evaluation, the reports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from etpi_assets.specs.load import load_shipped
from etpi_resources.lake.lake import Lake, Ref
from tests.support.graph import write_spec
from tests.support.small_specs import write_small_specs

TRAINED = """
extends = "plan_first_tiny"
rollout_sets = ["little_strong"]
[train]
max_steps = 4
[gates]
teacher = {}
format_exposure = 0
role_balance = 0.0
plan_paths_in_task = 0.0
[probe]
prompts = 4
min_differs = 0.0
[evaluate]
suite = "little"
tasks = 2
decodings = [{name = "greedy"}]
"""
ROOT = Path(__file__).parents[2]


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ETPI_DATA": str(folder / "data"), "ETPI_SPECS": str(folder / "specs")}
    environment |= {"PYTHONPATH": str(ROOT), "DAGSTER_HOME": "", "ETPI_CATALOG": ""}
    return subprocess.run(
        [sys.executable, "-m", "etpi", *words], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_an_experiment_is_rolled_out_trained_evaluated_and_reported_once(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    write_spec(write_small_specs(folder / "specs"), "experiments", "trained", TRAINED)
    done = run(folder, "run", "trained")
    assert done.returncode == 0, done.stderr
    lake = Lake(folder / "data")
    rollouts = lake.read(Ref("raw_rollouts", "rollout_set", "little_strong"), "rollouts")
    assert len(rollouts) == 24 and rollouts["error"].null_count == 24
    (final,) = [row for row in lake.read(Ref("sft_checkpoint", "experiment", "trained"), "checkpoints").to_pylist()
                if row["final"]]  # fmt: skip
    assert final["step"] == 4 and final["label_tokens"] > 0
    evaluated = lake.read(Ref("eval_rollouts", "experiment", "trained"), "rollouts")
    assert sorted(evaluated["checkpoint_role"].to_pylist()) == ["base"] * 2 + ["sft"] * 2
    assert "trained" in lake.read(Ref("leaderboard", "all", "all"), "leaderboard")["experiment"].to_pylist()
    before = {ref: lake.require(ref).version for ref in lake.refs()}
    assert run(folder, "run", "trained").returncode == 0
    assert {ref: lake.require(ref).version for ref in lake.refs()} == before


@pytest.mark.long
def test_data_of_each_shipped_demo_pass_the_checks_before_its_training(tmp_path: Path) -> None:
    specs = load_shipped()
    demos = [path.stem for path in (ROOT / "etpi_assets/specs/experiments/demo").glob("*.toml")]
    names = [name for name in demos if specs.get("experiment", name).train.method != "none"]
    assert {"plan_first_tiny", "plan_first_smol_lora", "grpo_tcr_tiny"} <= set(names)
    (tmp_path / "specs/experiments").mkdir(parents=True)
    done = run(tmp_path, "run", "--data-only", *names)
    assert done.returncode == 0, done.stderr
