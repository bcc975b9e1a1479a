"""CooperBench's task folders as a suite: every pair a task, everything unreadable refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from etpi_assets.curation.assets import selected_trajectories, tito_pairs
from etpi_assets.resources import Resources
from etpi_assets.rollouts.assets import raw_rollouts
from etpi_assets.scoring.assets import scored_rollouts
from etpi_assets.specs.load import load_specs
from etpi_assets.tasks.assets import tasks as tasks_asset
from etpi_assets.tasks.cooperbench import FAMILY
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import RejectedInput, Task
from etpi_resources.lake.lake import Lake, Ref
from tests.support.recorded_runs import flattened_messages, pair_run, verdict
from tests.support.repositories import PATCH

RUNS, TASKS = Ref("raw_rollouts", "rollout_set", "cooperbench_logs"), Ref("tasks", "suite", "cooperbench")


def make(root: Path, repo: str = "harbor_task", task: int = 7, features: int = 3) -> Path:
    folder = root / repo / f"task{task}"
    for n in range(1, features + 1):
        feature = folder / f"feature{n}"
        feature.mkdir(parents=True)
        (feature / "feature.md").write_text(
            f"**Title**: tie {n}\n\nAdd `tie_{n}(rope)` to `src/moor.py`; never `None`, é.\n"
        )
        (feature / "feature.patch").write_text(PATCH.replace("{n}", str(n)))
        (feature / "tests.patch").write_text(PATCH.replace("src/", "tests/"))
    return folder


def load(root: Path, **params: Any) -> list[Task | RejectedInput]:
    return list(FAMILY.load("pairs", 0, {"path": str(root), **params}))


def tasks(root: Path, **params: Any) -> list[Task]:
    result = load(root, **params)
    assert not [item for item in result if isinstance(item, RejectedInput)]
    return [item for item in result if isinstance(item, Task)]


def test_every_pair_of_features_is_a_task(tmp_path: Path) -> None:
    make(tmp_path)
    make(tmp_path, task=12, features=2)
    result = tasks(tmp_path)
    assert [t.task_id for t in result] == [f"harbor_task/7/f{p}" for p in ("1_f2", "1_f3", "2_f3")] + [
        "harbor_task/12/f1_f2"
    ]
    assert {t.repo for t in result} == {"harbor_task"} and {t.split for t in result} == {"train"}
    assert len({t.content_hash for t in result}) == 4
    assert result == tasks(tmp_path)
    assert json.loads(json.dumps(result[0].payload)) == result[0].payload


def test_task_gives_each_of_two_agents_its_instruction(tmp_path: Path) -> None:
    make(tmp_path)
    task = tasks(tmp_path)[1]
    first, second = FAMILY.roles(task)
    assert (first.agent_id, first.feature_id, first.partner) == ("agent1", "1", "agent2")
    assert (second.agent_id, second.feature_id, second.partner) == ("agent2", "3", "agent1")
    assert "tie_3" in second.instruction and "tie_1" not in second.instruction
    assert "# Feature 1" in task.instruction and "# Feature 3" in task.instruction
    assert task.payload["files"]["3"]["feature.patch"]["path"] == "harbor_task/task7/feature3/feature.patch"


def test_entities_are_paths_and_functions_and_no_words_of_the_language(tmp_path: Path) -> None:
    make(tmp_path)
    assert FAMILY.entities(tasks(tmp_path)[1]) == ["Boat", "src/moor.py", "tie_1", "tie_3"]


def test_changed_file_changes_only_the_hashes_of_its_pairs(tmp_path: Path) -> None:
    folder = make(tmp_path)
    before = [t.content_hash for t in tasks(tmp_path)]
    (folder / "feature3/tests.patch").write_text("+ more\n")
    assert [a == b.content_hash for a, b in zip(before, tasks(tmp_path), strict=True)] == [True, False, False]


def test_listed_pairs_are_loaded_and_missing_ones_are_refused(tmp_path: Path) -> None:
    make(tmp_path)
    wanted = {
        "tasks": [
            {"repo": "harbor_task", "task_id": 7, "pairs": [[2, 3]]},
            {"repo": "gone_task", "task_id": 1, "pairs": [[1, 2]]},
        ]
    }
    (tmp_path / "subsets").mkdir()
    (tmp_path / "subsets/few.json").write_text(json.dumps(wanted))
    result = load(tmp_path, subset="subsets/few.json", pairs=["harbor_task/7/f9_f1"])
    assert [(type(i).__name__, i.task_id if isinstance(i, Task) else i.source) for i in result] == [
        ("RejectedInput", "gone_task/1/f1_f2"),
        ("RejectedInput", "harbor_task/7/f1_f9"),
        ("Task", "harbor_task/7/f2_f3"),
    ]  # fmt: skip
    assert {i.reason for i in result if isinstance(i, RejectedInput)} == {"missing_feature"}
    with pytest.raises(FileNotFoundError, match=r": subsets/few\.json"):
        load(tmp_path, subset="subsets/many.json")
    with pytest.raises(ValueError, match=r"params\.pairs: "):
        load(tmp_path, pairs=["harbor_task f1 f2"])


@pytest.mark.parametrize("damage", ["missing", "empty", "binary"])
def test_each_pair_of_a_feature_that_cannot_be_read_is_refused(tmp_path: Path, damage: str) -> None:
    file = make(tmp_path) / "feature2/feature.md"
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(b"" if damage == "empty" else b"\xff\xfe")
    result = load(tmp_path)
    refusals = [item for item in result if isinstance(item, RejectedInput)]
    lost = ["harbor_task/7/f1_f2", "harbor_task/7/f2_f3"]
    assert [(r.source, r.reason) for r in refusals] == [(name, "unreadable_feature") for name in lost]
    assert all("feature2" in refusal.detail for refusal in refusals)
    assert not [i for i in load(tmp_path, pairs=["harbor_task/7/f1_f3"]) if isinstance(i, RejectedInput)]
    assert [item.task_id for item in result if isinstance(item, Task)] == ["harbor_task/7/f1_f3"]


@pytest.mark.parametrize(
    "name", ["feature2", "feature2/feature.md", "feature2/tests.patch", "runner.sh", "combined.patch"]
)
def test_file_behind_a_link_out_of_the_folder_is_in_no_task(tmp_path: Path, name: str) -> None:
    folder, outside = make(tmp_path / "pairs"), make(tmp_path / "outside")
    for file in outside.glob("*/*"):
        file.write_text("hunter2")
    (outside / name).exists() or (outside / name).write_text("hunter2")
    (folder / name).exists() and (folder / name).rename(tmp_path / "old")
    (folder / name).symlink_to(outside / name)
    result = load(tmp_path / "pairs", sandbox="bubblewrap", checkouts=str(tmp_path))
    refused = [item for item in result if isinstance(item, RejectedInput)]
    assert {item.reason for item in refused} <= {"unreadable_feature", "unreadable_patch"} and refused
    assert all("2" not in t.payload["features"] for t in result if isinstance(t, Task)) and "hunter2" not in str(result)


@pytest.mark.parametrize("subset", ["../few.json", "linked.json"])
def test_subset_and_pairs_lead_to_nothing_outside(tmp_path: Path, subset: str) -> None:
    make(tmp_path / "pairs")
    make(tmp_path / "pairs", "..")
    (tmp_path / "few.json").write_text('{"tasks": []}')
    (tmp_path / "pairs/linked.json").symlink_to(tmp_path / "few.json")
    with pytest.raises(FileNotFoundError, match="subset"):
        load(tmp_path / "pairs", subset=subset)
    assert not [item for item in load(tmp_path / "pairs", pairs=["../7/f1_f2"]) if isinstance(item, Task)]


def test_a_lone_feature_makes_no_pair(tmp_path: Path) -> None:
    make(tmp_path, features=1)
    (refusal,) = load(tmp_path)
    assert isinstance(refusal, RejectedInput) and refusal.reason == "too_few_features"


def test_whole_repositories_are_held_out_or_excluded(tmp_path: Path) -> None:
    make(tmp_path, "a_task")
    make(tmp_path, "b_task")
    result = tasks(tmp_path, heldout_repos=["b_task"])
    assert {t.split for t in result if t.repo == "b_task"} == {"heldout"}
    assert {t.repo for t in tasks(tmp_path, repos=["a_task"])} == {"a_task"}
    with pytest.raises(ValueError, match="'b_task'"):
        tasks(tmp_path, heldout_repos=["B-Task"])


def test_params_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\['subsets'\]"):
        load(tmp_path, subsets="x")
    with pytest.raises(ValueError, match=r"params\.path"):
        load(Path(""), path="")
    with pytest.raises(FileNotFoundError, match="absent"):
        load(tmp_path / "absent")


def test_tasks_without_sandbox_cannot_run(tmp_path: Path) -> None:
    make(tmp_path)
    task = tasks(tmp_path)[0]
    assert load_family("cooperbench") is FAMILY and FAMILY.sandbox({}) is None
    for call in (FAMILY.solve, lambda task, role: FAMILY.needs(task)):
        with pytest.raises(RuntimeError, match=f"{task.task_id}: "):
            call(task, FAMILY.roles(task)[0])


def test_the_shipped_specs_of_recorded_runs_are_valid() -> None:
    specs = load_specs()
    for name in ("cooperbench_import", "cooperbench_import_passed", "solo_import"):
        experiment = specs.get("experiment", name)
        assert (experiment.evaluate, experiment.train.method, experiment.base.kind) == (None, "none", "none")
        assert (experiment.pairs.capture, experiment.base.chat_template) == ("retokenised", "qwen3")
        assert experiment.select.min_reward == (1.0 if name.endswith("passed") else None)
        for rollout_set in experiment.rollout_sets:
            imported = specs.get("rollout_set", rollout_set)
            assert imported.kind == "imported"


@pytest.mark.skipif("ETPI_COOPERBENCH" not in os.environ, reason="ETPI_COOPERBENCH names no folder of tasks")
def test_real_dataset_folder_loads() -> None:
    spec = load_specs().get("suite", "cooperbench")
    result = list(FAMILY.load("cooperbench", 0, spec.params))
    loaded = [item for item in result if isinstance(item, Task)]
    assert len(loaded) > 400 and len({t.task_id for t in loaded}) == len(loaded)
    assert all(FAMILY.entities(task) for task in loaded)


def test_tasks_and_recorded_runs_meet_in_the_lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped specs, from folders to tables: a run knows its task where the suite's folder holds it."""
    make(tmp_path / "bench")
    logs = tmp_path / "runs/cooperbench-logs"
    pair_run(logs, verdict=verdict(merge="conflicts", passed=(False, False)))
    pair_run(logs, where="run_a/coop/other_task/7/f1_f3", messages=[[], []], statuses=("Error", "Error"))
    of_another_task = [
        [{"role": "user", "content": "**Title**: furl the sail"}, *flattened_messages(*names)[1:]]
        for names in (("agent1", "agent2"), ("agent2", "agent1"))
    ]
    pair_run(logs, where="run_b/coop/absent_task/7/f1_f3", messages=of_another_task)
    monkeypatch.setenv("ETPI_COOPERBENCH", str(tmp_path / "bench"))
    monkeypatch.setenv("ETPI_TRAJECTORIES", str(tmp_path / "runs"))
    resources = Resources(lake=Lake(tmp_path / "lake"))
    suite = tasks_asset.execute("cooperbench", resources).manifest
    assert suite.rows == {"tasks": 3, "quarantined": 0} and not suite.blocked
    runs = raw_rollouts.execute("cooperbench_logs", resources).manifest
    assert not runs.blocked and (runs.rows["rollouts"], runs.rows["quarantined"]) == (2, 1)
    by_repo = {r["repo"]: r for r in resources.lake.read(RUNS, "rollouts").to_pylist()}
    hashes = {t["task_id"]: t["content_hash"] for t in resources.lake.read(TASKS, "tasks").to_pylist()}
    assert by_repo["harbor_task"]["task_hash"] == hashes["harbor_task/7/f1_f3"]
    assert by_repo["absent_task"]["task_hash"] is None
    assert {row["suite"] for row in by_repo.values()} == {"cooperbench"}
    assert json.loads(by_repo["harbor_task"]["outcome"])["verdict"] == "merge_conflict"
    for definition in (scored_rollouts, selected_trajectories, tito_pairs):
        key = "cooperbench_import" if definition.node.set == "experiment" else "cooperbench_logs"
        manifest = definition.execute(key, resources).manifest
        assert not manifest.blocked, manifest.failures
    assert manifest.rows == {"pairs": len(resources.lake.read(RUNS, "turns")), "dropped": 0}
