"""Blame: its objective from held-out rollouts, what it refuses, and the asset with a real training and worker."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from etpi_assets.asset import asset_definitions
from etpi_assets.evaluation import assets as evaluation
from etpi_assets.evaluation import blame
from etpi_assets.resources import Resources
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_resources.lake.lake import Lake, LakeError, Ref, folder_hash
from etpi_resources.lake.schemas import from_rows
from tests.support.graph import ROLLOUT_SET, SUITE, write_spec
from tests.support.small_lake import put
from tests.support.tiny_training import learnable, make_base

TASKS = [f"held{i}" for i in range(20)]


def test_split_of_tasks_is_by_name_alone():
    seen = blame.seen_tasks(TASKS, 0.5)
    assert len(seen) == 10 and seen == blame.seen_tasks(reversed([*TASKS, *TASKS]), 0.5)
    assert blame.seen_tasks(TASKS, 0.25) < seen


def heldout(values, role="sft", **columns):
    rollouts = [
        {"rollout_id": f"r{i}", "task_id": TASKS[i], "checkpoint_role": role, "seed": 0, "decoding": "t1", **columns}
        for i in range(len(values))
    ]
    scores = [
        {"rollout_id": f"r{i}", "task_id": TASKS[i], "reward": value, "plan_first": bool(value),
         "infrastructure_error": False}
        for i, value in enumerate(values)
    ]  # fmt: skip
    return from_rows("rollouts", rollouts), from_rows("scores", scores)


def test_advantages_are_distances_from_the_mean_of_the_tasks_that_are_read():
    tables = heldout([1.0, 0.0, 0.5, 1.0, None])
    found = blame.advantages(*tables, "solved", 0, {*TASKS[:3], TASKS[4]})
    assert found == pytest.approx({"r0": 2 / 9, "r1": -1 / 9, "r2": -1 / 9}), "0.5 is not solved, None has no value"
    rewards = blame.advantages(*tables, "reward", 0, set(TASKS[:3]))
    assert rewards == pytest.approx({"r0": 1 / 6, "r1": -1 / 6}), "a rollout at the mean has no gradient"
    assert blame.advantages(*tables, "plan_first", 0, set(TASKS[:2])) == pytest.approx({"r0": 0.25, "r1": -0.25})


@pytest.mark.parametrize(
    "columns", [{"role": "base"}, {"seed": 1}, {"decoding": "t1@long"}, {"decoding": "t1+steering"}]
)
def test_other_checkpoints_and_conditions_are_left_out(columns):
    assert blame.advantages(*heldout([1.0, 0.0], **columns), "solved", 0, set(TASKS)) == {}


def turns(*names, output=(4, 5)):
    return from_rows(
        "turns",
        [
            {"rollout_id": name, "agent_id": "agent1", "turn": number, "prefix_turn": number - 1 if number else None,
             "suffix_ids": [6] if number else [1, 2, 3], "output_ids": list(output)}
            for name in names
            for number in range(2)
        ],
    )  # fmt: skip


def test_heldout_turns_are_merged_and_weighed_by_the_size_of_their_advantage():
    task_of = {"r0": "held0", "r1": "held1", "r2": "held2"}
    table = blame.heldout_sequences(turns("r0", "r1", "r2"), task_of, {"r0": 0.25, "r1": -0.5}, 100)
    rows = {row["sequence_id"]: row for row in table.to_pylist()}
    assert {name: (row["split"], row["span_weights"]) for name, row in rows.items()} == {
        "held0": ("raised", [0.25, 0.25]), "held1": ("lowered", [0.5, 0.5]),
    }  # fmt: skip
    assert rows["held0"]["input_ids"] == [1, 2, 3, 4, 5, 6, 4, 5], "a turn that extends another is in its sequence"


def test_turns_without_ids_are_left_out():
    assert len(blame.heldout_sequences(turns("r0", output=()), {"r0": "held0"}, {"r0": 0.25}, 100)) == 0


def test_refusals():
    assert not blame.outcomes_vary({0: ["raised", "raised"], 1: ["raised", "lowered"]}, "solved").passed
    assert blame.outcomes_vary({0: ["raised", "lowered"]}, "solved").passed
    assert blame.outcomes_vary({0: []}, "solved").message != blame.outcomes_vary({0: ["raised"]}, "solved").message
    few = blame.MINIMUM_TASKS - 1
    assert not blame.enough_tasks(few, 9).passed and not blame.enough_tasks(few + 1, 0).passed
    assert blame.enough_tasks(few + 1, 1).passed
    assert blame.matches_gradients([1.0, -2.0], [1.01, -2.0]).passed
    assert not blame.matches_gradients([1.0, -2.0], [1.5, -2.0]).passed
    assert not blame.matches_gradients([1.0], [float("nan")]).passed
    rows = [{"seed": 0, "step": 1, "dataset_row_id": name, "influence": 1.0} for name in "ab"]
    assert blame.every_row_blamed(from_rows("blame", rows), 2, 1).passed
    for wrong in ([rows[0]], [rows[0], rows[0]], [rows[0], rows[1] | {"influence": float("inf")}]):
        assert not blame.every_row_blamed(from_rows("blame", wrong), 2, 1).passed


@pytest.mark.parametrize(
    "more", [{"train": {"method": "none"}}, {"evaluate": None}, {"train": {"method": "full", "shards": 2}}]
)
def test_spec_without_both_ends_or_with_shards_is_refused(more):
    spec = {
        "title": "e", "rollout_sets": ["few"], "base": {"kind": "tiny"}, "train": {"method": "full"},
        "evaluate": {"suite": "small"}, "blame": {},
    }  # fmt: skip
    assert ExperimentSpec.model_validate(spec).blame
    with pytest.raises(ValueError, match="blame"):
        ExperimentSpec.model_validate(spec | more)


# --- the asset --------------------------------------------------------------------------------------------------------


class Blamed:
    """A lake with a data set, a base, a training and held-out rollouts of an experiment `first` with [blame]."""

    def __init__(self, folder: Path, base: Path, method: str = "full", steps: str = "[]") -> None:
        self.folder, self.lake = folder, Lake(folder / "data")
        write_spec(folder / "specs", "suites", "small", SUITE)
        write_spec(folder / "specs", "rollout_sets", "few", ROLLOUT_SET)
        write_spec(
            folder / "specs", "experiments", "first",
            f'title = "e"\nrollout_sets = ["few"]\nevaluate = {{suite = "small"}}\n[base]\nkind = "path"\n'
            f'path = "{base}"\nsha256 = "{folder_hash(base)}"\ntokenizer = "tiny"\nchat_template = "tiny"\n'
            f'[train]\nmethod = "{method}"\ndtype = "fp32"\nbatch_tokens = 512\nepochs = 2\nlearning_rate = 1e-2\n'
            f"lora_rank = 4\nsave_steps = 1\n[blame]\nsteps = {steps}\n",
        )  # fmt: skip
        sequences = learnable(6, validation=1)
        rows = [
            {"dataset_row_id": f"{s['sequence_id']}-{n}", "rollout_id": s["sequence_id"], "agent_id": "agent1",
             "turn": n, "split": s["split"], "sequence_id": s["sequence_id"], "span_start": s["span_starts"][n],
             "span_end": s["span_ends"][n]}
            for s in sequences for n in range(2)
        ]  # fmt: skip
        put(self.lake, "upweighted_dataset", "first", {"dataset_rows": rows, "sequences": sequences})

    def heldout(self, values):
        """Publish held-out rollouts: the solved ones go on as the training data do, the others do not."""
        rollouts, scores = heldout(values)
        ids = [[(10 + 3 * k if value else 60 - k) for k in range(8)] for value in values]
        rows = [
            {"rollout_id": f"r{i}", "agent_id": "agent1", "turn": 0, "suffix_ids": [4, 7], "output_ids": ids[i]}
            for i in range(len(values))
        ]
        tables = {"rollouts": rollouts.to_pylist(), "turns": rows}
        put(self.lake, "eval_rollouts", "first", tables)
        put(self.lake, "eval_metrics", "first", {"scores": scores.to_pylist()})

    def make(self, asset):
        resources = Resources(lake=self.lake, specs_folder=self.folder / "specs")
        return asset_definitions()[asset].execute("first", resources, log=lambda line: None)

    def rows(self, table):
        return self.lake.read(Ref("blame", "experiment", "first"), table).to_pylist()


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_asset_blames_every_row_by_each_checkpoint(tmp_path, base, method, monkeypatch):
    configs, run_worker = [], evaluation.run_worker
    monkeypatch.setattr(
        evaluation, "run_worker", lambda *words, **more: configs.append(words[1]) or run_worker(*words, **more)
    )
    blamed = Blamed(tmp_path, base, method, steps="[1, 2]")
    blamed.heldout([1.0, 0.0] * 10)
    for asset in ("base_checkpoint", "sft_checkpoint"):
        assert not blamed.make(asset).manifest.blocked
    outcome = blamed.make("blame")
    assert not outcome.manifest.blocked, outcome.manifest.checks
    assert {config.micro_tokens for config in configs} == {512}, "a pass has no more tokens than a training step"
    rows, tasks = blamed.rows("blame"), blamed.rows("blame_tasks")
    assert {(row["seed"], row["step"]) for row in rows} == {(0, 1), (0, 2)} and len(rows) == 2 * 12
    for row in rows:
        assert sum(row["influences"]) == pytest.approx(row["influence"], abs=1e-3)
    for key in {(row["step"], row["rollout_id"]) for row in rows}:
        whole = sum(r["influence"] for r in rows if (r["step"], r["rollout_id"]) == key)
        parts = [t["influence"] for t in tasks if (t["step"], t["rollout_id"]) == key]
        assert len(parts) == 10 and sum(parts) == pytest.approx(whole, rel=0.05, abs=0.02), "tasks add up"
    total = np.mean([row["influence"] for row in rows])
    assert total > 0, "rows that count by threes raise the share of rollouts that count by threes"


@pytest.mark.slow
def test_asset_refuses_equal_outcomes_and_steps_that_were_not_kept(tmp_path, base):
    blamed = Blamed(tmp_path, base, steps="[99]")
    for asset in ("base_checkpoint", "sft_checkpoint"):
        blamed.make(asset)
    blamed.heldout([1.0] * 20)
    outcome = blamed.make("blame")
    assert [check["name"] for check in outcome.manifest.failures] == ["outcomes_vary"]
    blamed.heldout([1.0, 0.0] * 10)
    with pytest.raises(LakeError, match=r"\[99\].*train.save_steps"):
        blamed.make("blame")
