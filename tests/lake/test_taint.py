"""Flipped verdicts are followed to data sets, checkpoints, evaluations and reports, until it is kept or mended."""

from __future__ import annotations

import json
import re
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from etpi.cli import main
from etpi_assets.asset import asset_definitions
from etpi_assets.graph import GRAPH
from etpi_assets.reports.leaderboard import EvaluatedExperiment, board, leaderboard
from etpi_assets.reports.tainted import checkpoint_lines
from etpi_assets.resources import Resources
from etpi_resources import links
from etpi_resources.lake import catalog, taint
from etpi_resources.lake.lake import Lake, LakeError
from etpi_resources.lake.schemas import from_rows
from tests.support import small_lake, viewed_lake
from tests.support.graph import write_spec

LATER = datetime(2100, 1, 1, tzinfo=UTC)


def verdict(rollout_id: str, judge: str, reward: float | None, at: datetime | None = None) -> dict[str, Any]:
    code = {1.0: "passed", 0.0: "failed_tests", None: "unknown"}[reward]
    row = {"rollout_id": rollout_id, "task_id": "t1", "judge": judge, "reward": reward, "verdict": code}
    return row | {"judged_at": at, "reason": f"why {judge}" if at else None}


def flip(lake: Lake, rollout_id: str, asset: str, key: str, *rewards: float | None, at: datetime = LATER) -> None:
    """Publish verdicts of judges 1, 2, ..., of which the first is the recorded one."""
    rows = [
        verdict(rollout_id, f"judge {n}", reward, at + timedelta(days=n) if n > 1 else None)
        for n, reward in enumerate(rewards, 1)
    ]
    small_lake.put(lake, asset, key, {"verdicts": rows}, notes={"later_verdicts": len(rewards) - 1})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_lake.make(tmp_path_factory.mktemp("small") / "data").root


@pytest.fixture
def lake(made: Path, tmp_path: Path) -> Lake:
    return Lake(shutil.copytree(made, tmp_path / "data"))


@pytest.fixture
def command(lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs etpi on the lake, and returns its exit code and output."""
    monkeypatch.setenv("ETPI_DATA", str(lake.root))
    monkeypatch.setenv("ETPI_SPECS", str(tmp_path / "specs"))
    for name in ("strong", "follow_up", "reinforced"):
        write_spec(tmp_path / "specs", "experiments", name, 'extends = "plan_first_tiny"\n')
    return lambda *arguments: (main([*arguments]), capsys.readouterr().out)


def tainted(lake: Lake, *names: str) -> set[tuple[str, str, str, float]]:
    with catalog.in_memory(lake, GRAPH.values()) as connection:
        rows = taint.walk(connection, taint.roots_of(connection, names or [taint.FLIPS]))
    shown = {"dataset": "experiment", "evaluation": "role"}
    return {
        (row["kind"], row["experiment"], row[shown.get(row["kind"], "name")], round(row["share"], 3)) for row in rows
    }


def test_nothing_is_tainted_while_no_verdict_flipped(lake: Lake) -> None:
    flip(lake, "r1", "scored_rollouts", "strong_set", 1.0, 1.0)
    assert tainted(lake) == set()


def test_flip_of_a_selected_rollout_taints_its_checkpoints_and_what_started_from_them(lake: Lake) -> None:
    flip(lake, "r1", "scored_rollouts", "strong_set", 1.0, 0.0)
    assert tainted(lake) == {
        ("dataset", "strong", "strong", 1.0),
        ("checkpoint", "strong", "sft1-100", 1.0),
        ("checkpoint", "strong", "sft1", 1.0),
        ("report", "strong", "reports/strong/report.html", 1.0),
        ("checkpoint", "follow_up", "sft2", 1.0),  # of the tokens that trained its ancestor
        ("checkpoint", "reinforced", "rl1", 1.0),
    }


def test_flip_before_the_data_set_was_built_and_flip_back_taint_nothing(lake: Lake) -> None:
    flip(lake, "r1", "scored_rollouts", "strong_set", 0.0, 1.0, at=datetime(2020, 1, 1, tzinfo=UTC))
    assert tainted(lake) == set()
    flip(lake, "r1", "scored_rollouts", "strong_set", 1.0, 0.0, 1.0)
    assert tainted(lake) == set()


def test_earlier_version_of_a_data_set_is_listed_for_other_roots_alone(lake: Lake) -> None:
    flip(lake, "r1", "scored_rollouts", "strong_set", 1.0, 0.0)
    small_lake.put(
        lake, "upweighted_dataset", "strong", small_lake.dataset("r3"), inputs={"tito_pairs/strong": "later"}
    )
    assert not any(kind == "dataset" for kind, *_ in tainted(lake))
    assert ("dataset", "strong", "strong", 1.0) in tainted(lake, "rollout:r1")


def test_verdict_without_a_reward_is_no_flip(lake: Lake) -> None:
    flip(lake, "r1", "scored_rollouts", "strong_set", None, 1.0)
    assert tainted(lake) == set()


def test_rollout_that_trained_nothing_taints_nothing(lake: Lake) -> None:
    flip(lake, "r2", "scored_rollouts", "strong_set", 0.0, 1.0)
    assert tainted(lake) == {("dataset", "follow_up", "follow_up", 1.0)}


def test_flipped_reward_taints_every_advantage_of_its_group(lake: Lake) -> None:
    flip(lake, "s-1", "rl_rewards", "reinforced", 0.0, 1.0)
    assert tainted(lake) == {("checkpoint", "reinforced", "rl1", 1.0)}


def test_kept_flip_taints_nothing_until_the_next(lake: Lake) -> None:
    flip(lake, "r1", "scored_rollouts", "strong_set", 1.0, 0.0)
    with catalog.in_memory(lake, GRAPH.values()) as connection:
        rows = connection.sql("SELECT rollout_id, new_judge FROM flips").fetchall()
    taint.keep(lake, [{"rollout_id": a, "new_judge": b} for a, b in rows], "a test that was too strict")
    assert tainted(lake) == set()
    flip(lake, "r1", "scored_rollouts", "strong_set", 1.0, 0.0, 1.0, 0.0)
    assert ("checkpoint", "strong", "sft1", 1.0) in tainted(lake)


@pytest.mark.parametrize(
    ("root", "reached"),
    [
        ("rollout:r1", {"sft1", "sft1-100", "sft2", "rl1"}),
        ("rollout:r3", {"sft2"}),
        ("teacher:weak", {"sft2"}),
        ("task:t1", {"sft1", "sft1-100", "sft2", "rl1"}),
        ("rollout:s-1", {"rl1"}),
    ],
)
def test_roots_are_rollouts_by_name(lake: Lake, root: str, reached: set[str]) -> None:
    assert {name for kind, _, name, _ in tainted(lake, root) if kind == "checkpoint"} == reached


def test_evaluations_and_several_roots_are_walked_together(lake: Lake) -> None:
    found = tainted(lake, "rollout:e-sft", "rollout:r3")
    assert ("evaluation", "strong", "sft", 1.0) in found and ("dataset", "follow_up", "follow_up", 1.0) in found


@pytest.mark.parametrize("root", ["rollout:nobody", "colour:red", "task:", "flip"])
def test_unknown_roots_are_refused(lake: Lake, root: str) -> None:
    with pytest.raises(LakeError, match=root.partition(":")[0]):
        tainted(lake, root)


def test_lines_name_share_rollouts_and_the_command_that_mends(lake: Lake) -> None:
    flip(lake, "r1", "scored_rollouts", "strong_set", 1.0, 0.0)
    flip(lake, "s-1", "rl_rewards", "reinforced", 0.0, 1.0)
    with catalog.in_memory(lake, GRAPH.values()) as connection:
        lines = checkpoint_lines(taint.walk(connection))
    mended = {re.findall(r"etpi run (\w+) --rebuild (\w+)", line)[0] for line in lines}
    assert mended >= {("strong", "sft_checkpoint"), ("follow_up", "sft_checkpoint"), ("reinforced", "rl_checkpoint")}
    assert all("100 %" in line and "1 rollout" in line for line in lines if "strong" in line)


def test_board_has_the_share_of_tainted_checkpoints() -> None:
    metrics = from_rows("metrics", [{"experiment": "a", "checkpoint_role": role, "decoding": "t1", "metric": "solved",
                                     "value": 0.5, "n": 4, "ci_low": 0.1, "ci_high": 0.9, "unit": "pair"}
                                    for role in ("base", "sft")])  # fmt: skip
    table = leaderboard([EvaluatedExperiment("a", "A", metrics)], {("a", "sft"): 0.25})
    assert {row["checkpoint_role"]: row["tainted"] for row in table.to_pylist()} == {"base": None, "sft": 0.25}
    assert "tainted: 25 %" in board(table)


def test_tainted_checkpoints_are_shown_by_status_taint_page_and_board(lake: Lake, command: Any, tmp_path: Path) -> None:
    page = links.experiment_page("strong")

    def shown(file: str) -> list[bool]:
        texts = [command("status", "strong")[1], command("taint")[1]]
        path = viewed_lake.build(lake, tmp_path / file)
        texts.append(viewed_lake.client(lake, path).get(page).text)
        return ["etpi run strong --rebuild sft_checkpoint" in text for text in texts]

    assert shown("before.duckdb") == [False] * 3
    flip(lake, "r1", "scored_rollouts", "strong_set", 1.0, 0.0)
    assert shown("after.duckdb") == [True] * 3
    code, text = command("taint", "--json")
    (walked,) = [row for row in json.loads(text)["tainted"] if row["name"] == "sft1"]
    (flipped,) = json.loads(text)["flips"]
    assert (code, walked["share"], walked["rollouts"]) == (0, 1.0, 1)
    assert (flipped["rollout_id"], flipped["old_judge"], flipped["new_judge"]) == ("r1", "judge 1", "judge 2")
    (status,) = json.loads(command("status", "strong", "--json")[1])
    assert {row["name"] for row in status["tainted"] if row["kind"] == "checkpoint"} == {"sft1-100", "sft1"}
    pooled = [small_lake.metric("strong", role, "solved", 0.5) | {"seed": None} for role in ("base", "sft")]
    small_lake.put(lake, "eval_metrics", "strong", {"metrics": pooled})
    resources = Resources(lake=lake, specs_folder=tmp_path / "specs")
    board = asset_definitions()["leaderboard"].execute("all", resources, again=True).manifest
    rows = lake.read(board.ref, "leaderboard").to_pylist()
    shares = {row["checkpoint_role"]: row["tainted"] for row in rows if row["experiment"] == "strong"}
    assert shares == {"base": None, "sft": 1.0}


def test_kept_flips_leave_status_and_catalog_at_once_with_their_reason(lake: Lake, command: Any) -> None:
    flip(lake, "s-1", "rl_rewards", "reinforced", 0.0, 1.0)
    assert "--rebuild rl_checkpoint" in command("status", "reinforced")[1]
    assert command("taint", "--keep", "a test that was too strict")[0] == 0
    assert "--rebuild rl_checkpoint" not in command("status", "reinforced")[1]
    assert json.loads(command("taint", "--json")[1]) == {"flips": [], "tainted": []}
    with catalog.connect() as connection:
        assert connection.sql("SELECT kept FROM flips").fetchall() == [("a test that was too strict",)]
    assert command("taint", "--keep", "again")[0] == 1, "there is none left to keep"


def test_query_of_the_docs_names_the_checkpoints_that_were_trained_on_flipped_verdicts(lake: Lake) -> None:
    flip(lake, "r1", "scored_rollouts", "strong_set", 1.0, 0.0)
    text = (Path(__file__).parents[2] / "docs/queries.md").read_text()
    (query,) = re.findall(r"```sql\n(.*?)```", text, re.DOTALL)
    with catalog.in_memory(lake, GRAPH.values()) as connection:
        rows = connection.sql(query).fetchall()
    trained = {("strong", "sft1-100"), ("strong", "sft1"), ("follow_up", "sft2"), ("reinforced", "rl1")}
    assert {row[:2] for row in rows} == trained and {row[-1] for row in rows} == {1}
