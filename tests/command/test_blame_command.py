"""`etpi blame`: groups, the worst and best rollouts, what they have in common, retrainings, and specs without them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest

from etpi import cli
from etpi_assets.graph import GRAPH
from etpi_resources.lake import catalog
from etpi_resources.lake.lake import Lake
from tests.support.small_lake import checkpoint, put, rollout, spec

NAMES = [f"r{i:02d}" for i in range(20)]
BAD = NAMES[::5]
TASKS = [f"h{i}" for i in range(12)]


def influence(name: str, seed: int) -> list[dict]:
    low = -3.0 if name in BAD else 1.0
    figures = {0: low + 0.01 * int(name[1:]) + seed, 1: 0.5 - seed}  # seeds differ, and their mean does not
    return [
        {"seed": seed, "step": 5, "objective": "solved", "dataset_row_id": f"{name}-{turn}", "rollout_id": name,
         "agent_id": "agent1", "turn": turn, "influence": value, "influences": [value]}
        for turn, value in figures.items()
    ]  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    lake = Lake(tmp_path_factory.mktemp("blamed") / "data")
    put(lake, "rollout_set_spec", "runs", spec("rollout_set", "runs", "Runs", format="trl", license="mit"))
    facts = {name: {"task_id": f"t{i % 10}", "repo": "harbor"} for i, name in enumerate(NAMES)}
    teacher = {name: "weak" if name in BAD else "strong" for name in NAMES}
    rollouts = [rollout(name, teacher[name], rollout_set="runs", **facts[name]) for name in NAMES]
    put(lake, "raw_rollouts", "runs", {"rollouts": rollouts})
    selected = [{"rollout_id": n, "rollout_set": "runs", "teacher": teacher[n], **facts[n]} for n in NAMES]
    put(lake, "selected_trajectories", "first", {"selected": selected})
    rows = [
        {"dataset_row_id": f"{n}-{turn}", "rollout_id": n, "agent_id": "agent1", "turn": turn, "split": "train",
         "teacher": teacher[n], "weight": 1.0, "copies": 1, "output_tokens": 1, **facts[n]}
        for n in NAMES for turn in range(2)
    ]  # fmt: skip
    version = put(lake, "upweighted_dataset", "first", {"dataset_rows": rows}).version
    sft = [checkpoint(f"c{s}", "first", "sft", seed=s, step=5, dataset_version=version) for s in (0, 1)]
    put(lake, "sft_checkpoint", "first", {"checkpoints": sft})
    seen = [
        {"seed": 0, "step": 5, "objective": "solved", "task_id": task, "rollout_id": NAMES[0], "influence": -0.1}
        for task in TASKS[:6]
    ]
    blamed = [row for name in NAMES for seed in (0, 1) for row in influence(name, seed)]
    put(lake, "blame", "first", {"blame": blamed, "blame_tasks": seen})
    for name, solved in (("first", 2), ("first_without_worst_20", 5), ("first_without_random_20", 2)):
        held = [
            {"rollout_id": f"{name}-{task}", "origin": "eval", "experiment": name, "checkpoint_role": "sft", "seed": 0,
             "task_id": task}
            for task in TASKS
        ]  # fmt: skip
        scores = [
            {"rollout_id": f"{name}-{task}", "task_id": task, "reward": float(i < 6 or i - 6 < solved),
             "infrastructure_error": False}
            for i, task in enumerate(TASKS)
        ]  # fmt: skip
        put(lake, "eval_rollouts", name, {"rollouts": held})
        put(lake, "eval_metrics", name, {"scores": scores})
    return catalog.build(lake, GRAPH.values(), lake.root.parent / "etpi.duckdb")


@pytest.fixture
def blamed(built, tmp_path, monkeypatch, capsys):
    """Return a function that runs `etpi blame first ...` and returns its exit code and output."""
    monkeypatch.setenv("ETPI_CATALOG", str(built))
    monkeypatch.setenv("ETPI_SPECS", str(tmp_path / "specs"))
    experiments = tmp_path / "specs" / "experiments"
    experiments.mkdir(parents=True)
    (experiments / "first.toml").write_text('extends = "plan_first_tiny"\ntitle = "First"\n[blame]\n')

    def run(*arguments: str) -> tuple[int, str]:
        code = cli.main(["blame", "first", *arguments])
        said = capsys.readouterr()
        return code, said.out + said.err

    run.specs = experiments
    return run


def test_groups_have_means_over_checkpoints_with_intervals_and_a_permutation_test(blamed):
    code, text = blamed()
    lines = [line.split() for line in text.splitlines()]
    groups = [line for line in lines if line[:1] in (["weak"], ["strong"])]
    assert code == 0 and [line[:2] for line in groups[:2]] == [["weak", "4"], ["strong", "16"]]
    assert float(groups[0][2]) == pytest.approx(-2.5 + 0.5 - 0.5 + 0.075, abs=0.01), "the mean over seeds"
    assert float(groups[0][4].strip("]")) < 0 < float(groups[1][3].strip("[,"))
    assert float(groups[0][5]) == pytest.approx(np.mean([0, 1, 2, 3]) / 19, abs=0.01), "the worst four"
    (p,) = [float(line[2]) for line in lines if line[:2] == ["p", "="]]
    assert p < 0.05


def test_worst_rollouts_are_listed_with_their_worst_turn_and_what_they_share(blamed):
    _, text = blamed("--by", "task", "--share", "0.2")
    worst = text.split("worst rollouts\n")[1].split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in worst[1:5]] == BAD and worst[1].split()[-2] == "0"
    shared = text.split("In common")[1]
    assert "weak" in shared and "100%" in shared and "of all 20%" in shared


def test_retrainings_are_compared_on_the_tasks_that_blame_did_not_read(blamed):
    _, text = blamed()
    lines = [line.split() for line in text.split("Retrained")[1].splitlines() if "against" in line]
    changes = {(name, other): (tasks, change) for name, _, other, tasks, _, _, change, *_ in lines}
    worst, chance = "first_without_worst_20", "first_without_random_20"
    assert changes == {
        (chance, "first"): ("6", "0.00"), (worst, "first"): ("6", "+0.50"), (worst, chance): ("6", "+0.50"),
    }  # fmt: skip


def test_retrain_writes_a_spec_without_the_worst_and_one_without_as_many_at_random(blamed):
    code, text = blamed("--retrain", "--share", "0.2")
    assert code == 0, text
    worst, chance = (
        tomllib.loads((blamed.specs / f"first_without_{name}_20.toml").read_text()) for name in ("worst", "random")
    )
    assert worst["select"]["exclude_rollouts"] == BAD and worst["extends"] == "first" and worst["blame"] == "none"
    assert len(chance["select"]["exclude_rollouts"]) == 4 and chance["select"] != worst["select"]
    assert chance["train"] == worst["train"] == {"epochs": 3.0 * 20 / 16}, "as many steps as with all"
    assert blamed("--retrain", "--share", "0.2")[0] == 1, "specs that exist are not replaced"
    assert blamed("--retrain", "--share", "0.1")[0] == 0, "another share has specs of its own"
    assert blamed("--retrain", "--share", "0")[0] == 1, "nothing would be left out"


def test_without_a_root_writes_the_spec_that_trains_without_its_rollouts(blamed):
    assert blamed("--without", "teacher:weak", "--without", "task:t1")[0] == 0
    (file,) = blamed.specs.glob("first_without_*.toml")
    left_out = tomllib.loads(file.read_text())["select"]["exclude_rollouts"]
    assert left_out == sorted({*BAD, "r01", "r11"})


@pytest.mark.parametrize("root", ["teacher:nobody", "colour:red", "licence:mit"])
def test_roots_that_name_nothing_or_everything_are_refused(blamed, root):
    code, text = blamed("--without", root)
    assert code == 1 and root.partition(":")[0] in text and not list(blamed.specs.glob("first_without_*"))


@pytest.mark.parametrize(("root", "left_out"), [("teacher:weak", BAD), ("blamed:first", BAD[:2])])
def test_taint_of_a_root_writes_the_specs_that_train_without_its_rollouts(blamed, built, monkeypatch, root, left_out):
    monkeypatch.setenv("ETPI_DATA", str(built.parent / "data"))
    assert cli.main(["taint", "--from", root, "--retrain"]) == 0
    (file,) = blamed.specs.glob("first_without_*.toml")
    assert tomllib.loads(file.read_text())["select"]["exclude_rollouts"] == left_out
    assert cli.main(["taint", "--from", "licence:mit", "--retrain"]) == 1, "nothing would be left"
    assert cli.main(["taint", "--retrain"]) == 1, "no verdict flipped"


def test_experiment_without_blame_is_refused_with_the_remedy(blamed, capsys):
    assert cli.main(["blame", "other"]) == 1
    assert "[blame]" in capsys.readouterr().err


def test_one_extreme_rollout_does_not_hide_a_group():
    from etpi.blame import _groups

    rows = [{"teacher": "strong", "task_id": "t0", "influence": -500.0}]
    rows += [{"teacher": "weak", "task_id": f"t{i}", "influence": -3.0} for i in range(10)]
    rows += [{"teacher": "strong", "task_id": f"t{i}", "influence": 1.0} for i in range(1, 30)]
    text = _groups(rows, "teacher", "teacher")
    assert float(text.rpartition("p = ")[2].split()[0]) < 0.01 and text.splitlines()[1].startswith("weak")


def test_permutation_test_keeps_tasks_apart():
    from etpi_assets.scoring.intervals import permutation_p

    tasks = [f"t{i // 4}" for i in range(40)]
    easy = [float(i // 4 % 2) for i in range(40)]  # a value of the task alone
    assert permutation_p(easy, ["a", "b"] * 20, tasks) == 1.0, "both groups have every task"
    assert permutation_p([v + (i % 2) for i, v in enumerate(easy)], ["a", "b"] * 20, tasks) < 0.01
    by_task = ["a" if i < 20 else "b" for i in range(40)]
    assert permutation_p(easy, by_task, tasks) > 0.1, "ten tasks are ten units, not forty"
    assert permutation_p([0, 0, 1, 1], ["a", "a", "b", "b"], ["t"] * 4) == pytest.approx(1 / 3, abs=0.05)
    assert permutation_p(easy, ["a"] * 40, tasks) is None
