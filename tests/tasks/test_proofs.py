"""Proofs are kept one by one, shared between suites, and made ahead of the rollouts that need them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from etpi.commands import dry_run
from etpi.rehearsal.costs import costs
from etpi_assets.asset import AssetRun
from etpi_assets.evaluation.assets import eval_rollouts
from etpi_assets.graph import GRAPH
from etpi_assets.planning import versions
from etpi_assets.planning.planner import plan
from etpi_assets.resources import Resources
from etpi_assets.rollouts.assets import raw_rollouts
from etpi_assets.rollouts.teachers import reference_policy
from etpi_assets.tasks import proofs
from etpi_assets.tasks.assets import tasks
from etpi_assets.tasks.family import CALIBRATIONS, Family, RejectedInput, Task, Verdict
from etpi_assets.tasks.proofs import Prover, Proving
from etpi_assets.tasks.table import read_tasks
from etpi_assets.worlds.coop_tiny_shared import FAMILY as COOP
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines import Request
from etpi_resources.engines.scripted import ScriptedEngine
from etpi_resources.engines.serving import Checkpoint
from etpi_resources.lake.lake import Lake, Ref
from tests.support import swe_suite
from tests.support.graph import ROLLOUT_SET, write_spec
from tests.support.repositories import Repository
from tests.support.small_lake import put

SUITE = 'extends = "coop_tiny_shared"\nproof = "ahead"\n[params]\ntrain = 4\nheldout = 24\n'
EVALUATED = """\
title = "x"
rollout_sets = ["few"]
base = {kind = "tiny"}
evaluate = {suite = "little", roles = ["base"], decodings = [{name = "greedy"}], tasks = 2}
"""


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


def test_proofs_go_only_where_sandboxes_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed: list[bool] = []
    monkeypatch.setattr(proofs, "ordered_map", lambda *args, sandboxes, **more: needed.append(sandboxes) or ())
    prover = Prover(Counting(), None, tmp_path)  # pyright: ignore[reportArgumentType]
    assert not list(prover.outcomes(made("one"), 1, SimpleNamespace(log=None)))  # pyright: ignore[reportArgumentType]
    assert needed == [True]


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
    assert (row["asset"], row["source"], row["reason"]) == ("raw_rollouts", "moor__moor-0", "reference_fails")


@pytest.mark.parametrize(("sandbox", "images"), [("bubblewrap", "no images"), ("docker", "under 7 GiB")])
def test_dry_run_and_rehearsal_name_time_and_disk_of_the_proofs_that_are_missing(
    sandbox: str,
    images: str,
    repository: Repository,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ETPI_IMAGES_GIB", "7")
    monkeypatch.setenv("ETPI_DATA", str(tmp_path / "lake"))
    monkeypatch.setenv("ETPI_SPECS", str(tmp_path / "specs"))
    monkeypatch.setattr("etpi.rehearsal.costs.worker_count", lambda: 2)
    resources = swe_suite.make(tmp_path, repository, tasks=9, used=7)
    file = tmp_path / "specs/suites/suite.toml"
    file.write_text(file.read_text().replace("bubblewrap", sandbox))
    evaluated_on_suite = EVALUATED.replace('"few"', '"set_reference"').replace('"little"', '"suite"')
    write_spec(tmp_path / "specs", "experiments", "own", evaluated_on_suite)
    resources = replace(resources)  # reads the specs again
    prover = Prover.of(AssetRun(GRAPH["tasks"], "suite", resources), "suite")
    assert prover
    prover.folder.mkdir(parents=True)
    first = next(iter(prover.family.load("suite", 0, resources.specs.suites["suite"].params)))
    assert isinstance(first, Task)
    prover._file(first).write_text(json.dumps({"seconds": 20.0, "calibrations": None}))
    assert dry_run(["own"], ()) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("proofs of suite")]
    (cost,) = [cost for cost in costs("own", resources.specs) if cost.part == "proofs suite"]
    for text in (line, f"{cost.value}; {cost.formula}"):
        assert "6 of 7 tasks" in text and "about 1:00 on 2 cores" in text and images in text


class Served:
    """Serves a checkpoint whose policy is the reference; notes when the first turn is requested."""

    at_once = 1

    def __init__(self) -> None:
        self.started, self.requests, self.answer = threading.Event(), 0, reference_policy(COOP)

    def policy(self, request: Request) -> str:
        self.started.set()
        self.requests += 1
        return self.answer(request)

    def engine(self, checkpoint: Checkpoint) -> AbstractContextManager[ScriptedEngine]:
        return nullcontext(ScriptedEngine(self.policy, load_chat_format("tiny"), checkpoint.name))

    def close(self) -> None: ...


def test_evaluation_rolls_out_proved_tasks_while_others_are_proved_and_stores_the_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_process: None
) -> None:
    write_spec(tmp_path / "specs", "suites", "little", SUITE)
    write_spec(tmp_path / "specs", "rollout_sets", "few", ROLLOUT_SET.replace("small", "little"))
    write_spec(tmp_path / "specs", "experiments", "own", EVALUATED)
    resources = Resources(lake=Lake(tmp_path / "lake"), specs_folder=tmp_path / "specs")
    tasks.execute("little", resources)
    for asset in ("sft_checkpoint", "rl_checkpoint", "serving_probe"):
        put(resources.lake, asset, "own", {})
    base = {"checkpoint_id": "b" * 64, "role": "base", "path": str(tmp_path), "step": 0}
    put(resources.lake, "base_checkpoint", "own", {"checkpoints": [base]})
    served, outcomes = Served(), Prover.outcomes
    monkeypatch.setattr(Resources, "serving", lambda *_: served)

    def watched(*arguments: Any) -> Iterator[Task | RejectedInput]:
        rejected, first, *rest = outcomes(*arguments)
        yield RejectedInput(getattr(rejected, "task_id", ""), "reference_fails", "x")
        yield first
        assert served.started.wait(60), "no rollout started before the last proof"
        yield from rest

    monkeypatch.setattr(Prover, "outcomes", watched)
    manifest = eval_rollouts.execute("own", resources).manifest
    assert not manifest.blocked and manifest.rows["rollouts"] == 2
    offered = resources.lake.read(Ref("tasks", "suite", "little"), "tasks").to_pylist()
    first = next(task["task_id"] for task in offered if task["split"] == "heldout")
    (row,) = resources.lake.read(manifest.ref, "quarantined").to_pylist()
    assert (row["asset"], row["source"], row["reason"]) == ("eval_rollouts", first, "reference_fails")
    (figures,) = [check["figures"] for check in manifest.checks if check["name"] == "tasks_as_asked"]
    assert (figures["found"], figures["quarantined"], figures["had"]) == (3, 1, 2)
    before = served.requests
    again = eval_rollouts.execute("own", resources, again=True).manifest
    assert (again.version, served.requests) == (manifest.version, before), "journals have all rollouts"


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
