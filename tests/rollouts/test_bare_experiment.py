"""An experiment that names only its rollouts and its student: nothing is lost, and no gate of a method decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from etpi_assets.curation.lengths import STEPS
from etpi_resources.lake.lake import Ref
from tests.support.curation import CURATION, CurationLake
from tests.support.own_runs import recorded_run, write_runs

pytest.importorskip("dashscope", reason="the qwen3 vocabulary comes with etpi[import]")

RUNS = [recorded_run(number, turns) for number, turns in enumerate((2, 3, 4, 3, 40))]
TURNS = sum(message["role"] == "assistant" for run in RUNS for message in run["messages"])
SET = 'title = "mine"\nkind = "imported"\npath = "PATH"\n'
BARE = """title = "bare"
rollout_sets = ["SET"]
[base]
kind = "none"
tokenizer = "qwen3"
chat_template = "qwen3"
"""
NOT_ASKED_FOR = {"history_as_captured", "prompt_is_default_render",
                 "teacher_gate", "turn_loss_share", "format_exposure", "role_balance", "plan_paths_in_task",
                 "prompt_length_ratio", "template_distance", "generation_prompt", "recorded_text"}  # fmt: skip


@pytest.fixture
def room(tmp_path: Path) -> CurationLake:
    return CurationLake(tmp_path)


def curate(room: CurationLake, name: str, rewards: list[float | None]) -> dict[str, dict]:
    """Import the five runs with these rewards, build the data set, and return its checks by name."""
    folder = room.folder / name
    folder.mkdir()
    runs = [{**run, "reward": reward} for run, reward in zip(RUNS, rewards, strict=True)]
    runs = [{key: value for key, value in run.items() if value is not None} for run in runs]
    room.write("rollout_sets", name, SET.replace("PATH", str(write_runs(folder, runs))))
    room.write("experiments", name, BARE.replace("SET", name))
    room.make_set(name)
    checks = {}
    for asset in CURATION:
        manifest = room.make(asset, name).manifest
        checks |= {check["name"]: check for check in manifest.checks}
        if manifest.blocked:
            break
    return checks


def dropped(room: CurationLake, name: str) -> list[str]:
    refs = [Ref(asset, "experiment", name) for asset in CURATION]
    return [reason for ref in refs for reason in room.lake.read(ref, "dropped")["reason"].to_pylist()]


def test_every_turn_of_five_runs_without_rewards_is_trained_on(room: CurationLake) -> None:
    checks = curate(room, "plain", [None] * 5)
    assert [name for name, check in checks.items() if not check["passed"]] == ["validation_rows"]
    assert {name for name, check in checks.items() if not check.get("applicable", True)} == NOT_ASKED_FOR
    assert dropped(room, "plain") == []
    rows = room.lake.read(Ref("upweighted_dataset", "experiment", "plain"), "dataset_rows")
    assert len(rows) == TURNS and set(rows["weight"].to_pylist()) == {1.0}
    assert "no rollout has one" in checks["selection_reconciles"]["message"]
    notes = room.lake.require(Ref("upweighted_dataset", "experiment", "plain")).notes["lengths"]
    assert set(notes["over"]) == {str(step) for step in STEPS}
    assert notes["over"]["2048"]["rows"] > 0 == notes["over"]["32768"]["rows"], "the run of 40 turns is long"
    assert notes["longest_row"] == notes["longest_sequence"] < notes["limit"] == 131072


def test_runs_with_rewards_are_selected_by_full_reward(room: CurationLake) -> None:
    checks = curate(room, "rewarded", [1.0, 0.0, 1.0, None, 1.0])
    assert [name for name, check in checks.items() if not check["passed"]] == ["validation_rows"]
    assert sorted(dropped(room, "rewarded")) == ["low_reward", "no_reward"]
    message = checks["selection_reconciles"]["message"]
    assert all(term in message for term in ("auto", "4 of 5", "3 pass"))


@pytest.mark.parametrize(("rewards", "term"), [([87.0, 20.0, 1.0, 3.0, 4.0], "87"), ([0.5, 0.0, 0.2, 0.1, 0.0], "0.5")])
def test_rewards_of_another_scale_block_and_name_the_key(room: CurationLake, rewards: list, term: str) -> None:
    checks = curate(room, "scaled", rewards)
    failed = {name: check["message"] for name, check in checks.items() if not check["passed"]}
    assert set(failed) == {"selection_reconciles"}
    assert term in failed["selection_reconciles"] and "select.min_reward" in failed["selection_reconciles"]
