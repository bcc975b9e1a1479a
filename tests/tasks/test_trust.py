"""The trust of tasks before any rollout: what a suite's run prints, and the tasks that reinforcement leaves out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from etpi_assets.resources import Resources
from etpi_assets.tasks.assets import tasks as tasks_asset
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import CALIBRATIONS, Task
from etpi_assets.training.assets import trusted_tasks
from etpi_resources.lake.lake import Lake, LakeError

CHECKS = {
    "blind": "def check(candidate):\n    assert candidate(3) == 61\n    assert candidate(4) == 68\n",
    "reversed": "def check(candidate):\n    assert candidate(3) != candidate(4)\n",
    "unchallenged": "def check(candidate):\n    for n in range(3):\n        assert candidate(n) >= 40\n",
}
SOLUTION = "def f(n):\n    return 7 * n + 40\n"


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, int]]:
    """The lines that the run of a suite of one question and three programs prints, and its metadata."""
    folder: Path = tmp_path_factory.mktemp("trust")
    rows: list[dict[str, object]] = [{"source": "sums", "license": "MIT", "prompt": "What is 3 + 4?", "answer": "7"}]
    for name, check in CHECKS.items():
        truth = {"test": check, "entry_point": "f"}
        row = {"source": name, "license": "MIT", "prompt": f"Write f ({name}).", "solution": SOLUTION}
        rows.append({**row, "reward_model": {"ground_truth": json.dumps(truth)}})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "specs" / "suites").mkdir(parents=True)
    spec = f'title = "x"\nfamily = "answers"\n[params]\npath = "{folder / "rows.jsonl"}"\n'
    (folder / "specs" / "suites" / "own.toml").write_text(spec)
    lines: list[str] = []
    resources = Resources(lake=Lake(folder / "lake"), specs_folder=folder / "specs")
    outcome = tasks_asset.execute("own", resources, log=lines.append)
    assert outcome.manifest.rows == {"tasks": 4, "quarantined": 0}
    return lines, dict(outcome.metadata["trust"])


def test_run_of_a_suite_prints_tasks_and_tests_by_trust(printed: tuple[list[str], dict[str, int]]) -> None:
    lines, metadata = printed
    assert metadata == {"blind": 2, "reversed": 1, "unchallenged": 1}
    counted = "2 blind, 1 reversed, 1 unchallenged"
    (line,) = [line for line in lines if "have to turn" in line]
    assert line.count(counted) == 2


@pytest.mark.parametrize(
    ("least", "kept"), [(None, "abcd"), ("unchallenged", "abc"), ("reversed", "ab"), ("blind", "a")]
)
def test_reinforcement_leaves_out_tasks_of_which_a_test_is_trusted_less(least: str | None, kept: str) -> None:
    levels = {"a": ["blind"], "b": ["blind", "reversed"], "c": ["blind", "unchallenged"], "d": []}
    tasks = [
        Task(name, "s", "r", "train", "x", {CALIBRATIONS: {"t": {"trust": dict(enumerate(trusts))}}}, name)
        for name, trusts in levels.items()
    ]
    family = load_family("swe_bench")
    assert "".join(task.task_id for task in trusted_tasks("e", family, tasks, least)) == kept
    if least == "blind":
        with pytest.raises(LakeError, match=r"rl\.min_trust = blind"):
            trusted_tasks("e", family, tasks[1:], least)
