"""Proofs are kept one by one, shared between suites, and made ahead of the rollouts that need them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from etpi_assets.asset import AssetRun
from etpi_assets.graph import GRAPH
from etpi_assets.planning import versions
from etpi_assets.planning.planner import plan
from etpi_assets.rollouts.assets import raw_rollouts
from etpi_assets.tasks import proofs
from etpi_assets.tasks.assets import tasks
from etpi_assets.tasks.family import CALIBRATIONS, Family, RejectedInput, Task, Verdict
from etpi_assets.tasks.proofs import Prover, Proving
from etpi_assets.tasks.table import read_tasks
from etpi_resources.lake.lake import Ref
from tests.support import swe_suite
from tests.support.repositories import Repository


class Counting(Family):
    """Proves tasks by their names, and notes which it was asked for."""

    keeps_proofs = True
    params: Mapping[str, Any] = MappingProxyType({})

    def load(self, suite: str, seed: int, params: Mapping[str, Any]) -> Iterator[Task | RejectedInput]:
        return iter(())

    def judge(self, task: Task, final: Any, sandboxes: Any) -> Verdict:
        raise AssertionError

    def __init__(self, stop_after: int | None = None) -> None:
        self.asked: list[str] = []
        self.stop_after = stop_after

    def validate(self, tasks: Sequence[Task], sandboxes: Any) -> Iterator[RejectedInput | Task]:
        for task in tasks:
            if len(self.asked) == self.stop_after:
                raise KeyboardInterrupt
            self.asked.append(task.task_id)
            if task.task_id.startswith("bad"):
                yield RejectedInput(task.task_id, "null_passes", "x")
            elif task.task_id.startswith("lost"):
                yield RejectedInput(task.task_id, "no_environment", "no image")
            else:
                yield Task(
                    **{**vars(task), "payload": {**task.payload, CALIBRATIONS: {"tests": {"trust": {"t": "blind"}}}}}
                )


def made(*names: str, suite: str = "a") -> list[Task]:
    return [Task.hashed(name, suite, "r", "train", "do", {"n": name}) for name in names]


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "worker_count", lambda: 1)


def names(outcomes: Sequence[Task | RejectedInput]) -> list[str]:
    return [o.task_id if isinstance(o, Task) else o.reason for o in outcomes]


def test_killed_proofs_continue_and_suites_share_them(tmp_path: Path) -> None:
    first = Prover(Counting(stop_after=2), None, tmp_path)  # pyright: ignore[reportArgumentType]
    with pytest.raises(KeyboardInterrupt):
        first.prove(made("one", "bad", "two"))
    second = Prover(Counting(), None, tmp_path)  # pyright: ignore[reportArgumentType]
    outcomes = second.prove(made("one", "bad", "two", suite="b"))
    assert names(outcomes) == ["one", "null_passes", "two"]
    assert second.family.asked == ["two"]  # pyright: ignore[reportAttributeAccessIssue]
    assert all(o.suite == "b" and o.payload[CALIBRATIONS]["tests"] for o in outcomes if isinstance(o, Task))


def test_lack_of_an_image_is_asked_for_again(tmp_path: Path) -> None:
    prover = Prover(Counting(), None, tmp_path)  # pyright: ignore[reportArgumentType]
    assert names(prover.prove(made("lost")) + prover.prove(made("lost"))) == ["no_environment"] * 2
    assert prover.family.asked == ["lost", "lost"]  # pyright: ignore[reportAttributeAccessIssue]


def test_rejections_of_a_blocked_suite_are_proved_again(tmp_path: Path) -> None:
    prover = Prover(Counting(), None, tmp_path)  # pyright: ignore[reportArgumentType]
    prover.prove(made("one", "bad"))
    prover.forget_rejections(made("one", "bad", "new"))
    prover.prove(made("one", "bad"))
    assert prover.family.asked == ["one", "bad", "bad"]  # pyright: ignore[reportAttributeAccessIssue]


def test_changed_task_is_proved_again(tmp_path: Path) -> None:
    prover = Prover(Counting(), None, tmp_path)  # pyright: ignore[reportArgumentType]
    (task,) = made("one")
    prover.prove([task])
    prover.prove([Task.hashed("one", "a", "r", "train", "do something else", {"n": 1})])
    assert prover.family.asked == ["one", "one"]  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(scope="module")
def repository() -> Iterator[Repository]:
    with tempfile.TemporaryDirectory() as folder:
        yield Repository(Path(folder))


@pytest.mark.slow
def test_only_used_tasks_are_proved_ahead_and_more_of_them_keep_the_rollouts(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_process: None
) -> None:
    resources = swe_suite.make(tmp_path, repository, tasks=4, used=2)
    assert tasks.execute("suite", resources).manifest.rows == {"tasks": 4, "quarantined": 0}
    folder = resources.lake.scratch("proofs")
    assert not list(folder.glob("*/*.json"))
    manifest = raw_rollouts.execute("set_reference", resources).manifest
    assert not manifest.blocked and manifest.rows["rollouts"] == 2
    assert 2 <= len(list(folder.glob("*/*.json"))) < 4
    rows = resources.lake.read(manifest.ref, "rollouts").to_pylist()
    assert {json.loads(row["outcome"])["reward"] for row in rows} == {1.0}
    assert {json.loads(row["outcome"])["judge"] for row in rows} == {versions.judge_of("swe_bench")}
    run = AssetRun(GRAPH["tasks"], "suite", resources)
    assert len(list(Proving(run, "suite", _read(resources), 4))) == 4  # proving more later ...
    state = {step.asset: step.state for step in plan("set_reference", resources.specs, resources.lake)}
    assert state["raw_rollouts"] == "ok"  # ... makes no rollout stale
    monkeypatch.setitem(versions.COMPONENTS["judge.swe_bench"], 99, "a mended judge")  # pyright: ignore[reportArgumentType]
    state = {step.asset: step.state for step in plan("set_reference", resources.specs, resources.lake)}
    assert (state["tasks"], state["raw_rollouts"]) == ("ok", "ok")


@pytest.mark.slow
def test_tasks_that_cannot_be_proved_ahead_are_set_aside_and_the_rest_is_rolled_out(
    repository: Repository, tmp_path: Path, one_process: None
) -> None:
    resources = swe_suite.make(tmp_path, repository, tasks=3, used=2, broken=1)
    tasks.execute("suite", resources)
    manifest = raw_rollouts.execute("set_reference", resources).manifest
    assert not manifest.blocked and manifest.rows["rollouts"] == 2 and manifest.rows["quarantined"] == 1
    (row,) = resources.lake.read(manifest.ref, "quarantined").to_pylist()
    assert (row["asset"], row["source"], row["reason"]) == ("tasks", "moor__moor-0", "reference_fails")


_RUN = """
import sys
from pathlib import Path
from etpi_assets.resources import Resources
from etpi_assets.rollouts.assets import raw_rollouts
from etpi_resources.lake.lake import Lake
folder = Path(sys.argv[1])
resources = Resources(lake=Lake(folder / "lake"), specs_folder=folder / "specs", concurrency=2)
raw_rollouts.execute("set_reference", resources)
"""


@pytest.mark.long
def test_killed_process_continues_after_its_proofs(repository: Repository, tmp_path: Path) -> None:
    resources = swe_suite.make(tmp_path, repository, tasks=6)
    tasks.execute("suite", resources)
    folder = resources.lake.scratch("proofs")
    process = subprocess.Popen([sys.executable, "-c", _RUN, str(tmp_path)], start_new_session=True)
    while len(list(folder.glob("*/*.json"))) < 3 and process.poll() is None:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    proved = {file: file.stat().st_mtime_ns for file in folder.glob("*/*.json")}
    manifest = raw_rollouts.execute("set_reference", resources).manifest
    assert not manifest.blocked and manifest.rows["rollouts"] == 6
    now = {file: file.stat().st_mtime_ns for file in folder.glob("*/*.json")}
    assert 3 <= len(proved) < 6 == len(now) and proved.items() <= now.items()


def _read(resources: Any) -> list[Task]:
    return read_tasks(resources.lake.read(Ref("tasks", "suite", "suite"), "tasks"))
