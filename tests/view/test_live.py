"""Work under way: a journal that grows, and a rollout that is in no table yet."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from etpi.view import journals
from etpi.view.journals import Journals
from etpi_assets.rollouts.journal import Journal
from etpi_assets.trajectories.records import RolloutRecord
from etpi_resources.lake.lake import Lake
from tests.support import viewed_lake
from tests.support.rollouts import planning_pair
from tests.support.small_lake import put, spec

KEY = "0123456789abcdef"
NAME = f"rollouts/teacher_set/code1/journal-{KEY}.jsonl"


def finished(number: int, verdict: str = "passed") -> RolloutRecord:
    record = planning_pair(f"journaled{number}", outcome={"reward": 1.0, "verdict": verdict}, sample=number)
    record.task_id = f"task{number}"
    return record


@pytest.fixture(scope="module")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Lake, TestClient]:
    root = tmp_path_factory.mktemp("live")
    lake = viewed_lake.make(root / "data")
    return lake, viewed_lake.client(lake, viewed_lake.build(lake, root / "etpi.duckdb"))


@pytest.fixture
def lake(_shared: tuple[Lake, TestClient]) -> Iterator[Lake]:
    """A lake with nothing under way."""
    yield _shared[0]
    shutil.rmtree(_shared[0].root / "scratch", ignore_errors=True)


@pytest.fixture
def client(_shared: tuple[Lake, TestClient]) -> TestClient:
    return _shared[1]


def folder(lake: Lake) -> Path:
    return lake.root / "scratch" / "rollouts" / "teacher_set" / "code1"


def test_page_follows_a_growing_journal(lake: Lake, client) -> None:
    assert "No unfinished journal was written" in client.get("/live").text
    with Journal(folder(lake), KEY) as journal:
        journal.append(finished(0))
        journal.append(finished(1, "failed_tests"))
        text = client.get("/live").text
        assert 'http-equiv="refresh"' in text and 'http-equiv="refresh"' not in client.get("/live?pause=1").text
        assert "complete, 2 rollouts" in text and "of 2 rollouts" not in text, "the set has two tasks, a sample of each"
        assert "passed</span> 1" in text and "failed_tests</span> 1" in text
        assert text.index("task1") < text.index("task0"), "the newest first"
        journal.append(finished(2))
        text = client.get("/live").text
        assert "complete, 3 rollouts" in text and text.index("task2") < text.index("task1")


def test_evaluation_has_a_name_its_tasks_and_the_time_left_before_a_catalog_knows_it(lake: Lake, client) -> None:
    tasks = [{"suite": "held", "task_id": f"task{n}", "repo": "dock", "split": "heldout"} for n in range(3)]
    put(lake, "tasks", "held", {"tasks": [*tasks, tasks[0] | {"task_id": "other", "split": "train"}]})
    put(lake, "experiment_spec", "new", spec("experiment", "new", "N", evaluate={"suite": "held", "split": "heldout"}))
    now = datetime.now(UTC)

    def evaluated(number: int) -> RolloutRecord:
        record = finished(number)
        record.suite, record.experiment, record.checkpoint_role, record.decoding = "held", "new", "sft", "greedy"
        record.started_at, record.wall_seconds = now - timedelta(seconds=30 - number), 1.0
        return record

    with Journal(lake.root / "scratch/evaluations/code1", KEY) as journal:
        journal.append(evaluated(0))
        journal.append(evaluated(1))
        text = client.get("/live").text
        assert "Evaluation of new: sft greedy sample 0" in text
        assert "<b>2</b> of 3 rollouts finished" in text and re.search(r"about 1\d s left", text)
        journal.append(evaluated(2))
        text = client.get("/live").text
    assert "of 3 rollouts" not in text and "Evaluation of new: sft greedy sample 0: complete, 3 rollouts" in text


def test_evaluation_that_several_experiments_share_names_none(lake: Lake, client) -> None:
    """An evaluation's journal has no experiment: every experiment with this checkpoint uses it."""
    with Journal(lake.root / "scratch/evaluations/code1", KEY) as journal:
        record = finished(0)
        record.suite, record.experiment, record.checkpoint_role, record.decoding = "held", None, "sft", "greedy"
        journal.append(record)
        response = client.get("/live")
        assert response.status_code == 200 and "<b>1</b> rollout" in response.text, response.text
        assert client.get(f"/live/rollout?journal=evaluations/code1/journal-{KEY}.jsonl&offset=0").status_code == 200


@pytest.mark.parametrize(("split", "limit", "planned"), [("all", None, 8), ("train", 1, 2), ("heldout", None, 6)])
def test_rollout_set_is_counted_in_its_split(lake: Lake, client, split: str, limit: int | None, planned: int) -> None:
    rows = [{"suite": "s", "task_id": str(n), "repo": "dock", "split": "heldout" if n else "train"} for n in range(4)]
    put(lake, "tasks", "s", {"tasks": rows})
    put(lake, "rollout_set_spec", "mine", spec("rollout_set", "mine", "M", suite="s", split=split, tasks=limit, k=2))
    with Journal(lake.root / "scratch/rollouts/mine/code1", KEY) as journal:
        journal.append(finished(0))
        assert f"<b>1</b> of {planned} rollouts finished" in client.get("/live").text


@pytest.mark.parametrize(
    ("section", "left"),
    [({"rl": {"steps": 4}}, 20.0), ({"train": {"epochs": 2.0}}, 30.0), ({"train": {"max_steps": 6}}, 60.0), ({}, None)],
)
def test_training_under_way_has_its_curves_and_the_time_left(lake: Lake, client, section: dict, left) -> None:
    folder = lake.root / "scratch/reinforce/key1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"label": "rl of study, seed 3", **section}))
    rows = [{"step": n, "epoch": n / 2, "loss": 0.5, "reward": n / 4, "seconds": 30.0 * n} for n in (1, 2)]
    rows[-1] |= {"seconds": 20.0} if "rl" in section else {"seconds": 30.0}
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"step": 4, "lo')
    text = client.get("/live").text
    assert text.count("<polyline") == 2 and "rl of study, seed 3" in text and "Mean reward" in text
    assert Journals(lake).trainings()[0].seconds_left == left
    assert (f"about {left:.0f} s left" if left else "step 2") in text
    os.utime(folder / "metrics.jsonl", (0, 0))
    assert "<polyline" not in client.get("/live").text


def test_rollout_of_a_journal_can_be_opened(lake: Lake, client) -> None:
    with Journal(folder(lake), KEY) as journal:
        for number in range(2):
            journal.append(finished(number))
        links = re.findall(r'href="(/live/rollout[^"]+)"', client.get("/live").text)
        assert len(links) == 2
        text = client.get(links[0].replace("&amp;", "&")).text
    assert "<h1>task1</h1>" in text and "not in the lake" in text
    assert "fold_lantern in src/harbor/tides.py first" in text and "cat src/harbor/quay.py" in text
    assert "/tokens?" not in text, "there is no page of its tokens yet"
    for wrong in ("offset=3", "offset=999999999", "offset=0&journal=rollouts/../../../etc/passwd"):
        address = f"/live/rollout?{wrong}" if "journal" in wrong else f"/live/rollout?journal={NAME}&{wrong}"
        assert client.get(address).status_code == 404


def test_partial_and_damaged_lines_are_passed_over(lake: Lake) -> None:
    with Journal(folder(lake), KEY) as journal:
        journal.append(finished(0))
        path = journal.path
    whole = path.read_bytes()
    reader = Journals(lake)
    with path.open("ab") as file:
        file.write(b"no json\n" + whole[: len(whole) // 2])
    (state,) = reader.states()
    assert (state.n, state.unreadable, state.name) == (1, 1, NAME) and state.read < 1
    with path.open("ab") as file:
        file.write(whole[len(whole) // 2 :])
    (state,) = reader.states()
    assert (state.n, state.unreadable, state.read) == (2, 1, 1.0)
    path.write_bytes(whole)
    assert reader.states()[0].n == 1, "a journal that became shorter is read from its beginning"


@pytest.mark.parametrize(
    "line",
    [
        {"rows": 5},
        {"rows": {"rollouts": [], "turns": []}},
        {"rows": {"rollouts": [5], "turns": []}},
        {"rows": {"rollouts": [{"rollout_id": "x", "started_at": "yesterday"}], "turns": []}},
        {"rows": {"rollouts": [{"rollout_id": "x", "outcome": "[" * 100_000}], "turns": []}},
    ],
    ids=["no rows", "no rollout", "a number", "no time", "nested"],
)
def test_line_that_is_no_rollout_breaks_no_page(lake: Lake, client, line: dict) -> None:
    with Journal(folder(lake), KEY) as journal:
        journal.append(finished(0))
        path, place = journal.path, journal.size
    with path.open("ab") as file:
        file.write(json.dumps(line).encode() + b"\n")
    assert client.get("/live").status_code == 200
    assert client.get(f"/live/rollout?journal={NAME}&offset={place}").status_code == 404


def test_large_journal_is_read_in_parts(lake: Lake, monkeypatch) -> None:
    with Journal(folder(lake), KEY) as journal:
        for number in range(4):
            journal.append(finished(number))
        size = journal.size
    monkeypatch.setattr(journals, "READ_BYTES", size // 4)
    reader = Journals(lake)
    counts = [reader.states()[0].n for _ in range(4)]
    assert counts == sorted(counts) and counts[0] < 4 and counts[-1] == 4


def test_journal_that_rests_is_not_shown(lake: Lake, client) -> None:
    with Journal(folder(lake), KEY) as journal:
        journal.append(finished(0))
        path = journal.path
    os.utime(path, (0, 0))
    assert Journals(lake).states() == []
    assert "No unfinished journal was written" in client.get("/live").text
