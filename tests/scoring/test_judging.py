"""Stored work is judged again when the number of its judge rises: no model runs, and every verdict is kept."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from etpi.verdicts import rejudge
from etpi_assets.planning import versions
from etpi_assets.planning.planner import plan
from etpi_assets.resources import Resources
from etpi_assets.rollouts.assets import raw_rollouts
from etpi_assets.scoring.assets import scored_rollouts
from etpi_assets.scoring.judging import RECORDED, Bench, Judged, Judging, planned, with_verdicts
from etpi_assets.tasks.assets import tasks
from etpi_assets.tasks.family import Family, RejectedInput, Role, Task, Verdict
from etpi_assets.worlds.coop_tiny_shared import FAMILY
from etpi_resources.lake import catalog
from etpi_resources.lake.lake import Lake, Manifest, Ref
from etpi_resources.lake.schemas import from_rows
from tests.support import swe_suite
from tests.support.graph import write_spec
from tests.support.recorded_runs import pair_run
from tests.support.recorded_runs import verdict as recorded_verdict
from tests.support.repositories import FILES, OFFLINE, Repository, solved
from tests.support.rows import r2e_row, write_lines
from tests.support.small_lake import put

SUITE = 'extends = "coop_tiny_shared"\n[params]\ntrain = 4\nheldout = 24\n'
SET = 'extends = "coop_tiny_shared_strong"\nsuite = "little"\ntasks = 3\nk = 1\n'
JUDGE = type(FAMILY).judge
REF = Ref("scored_rollouts", "rollout_set", "little")
EXPERIMENT = """\
extends = "plan_first_rl_tiny"
rollout_sets = ["little"]
[rl]
suite = "little"
[evaluate]
suite = "little"
"""


@pytest.fixture
def resources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Resources:
    for name, text in {"suites": SUITE, "rollout_sets": SET}.items():
        (tmp_path / "specs" / name).mkdir(parents=True)
        (tmp_path / "specs" / name / "little.toml").write_text(text)
    monkeypatch.setenv("ETPI_DATA", str(tmp_path / "lake"))
    monkeypatch.setenv("ETPI_SPECS", str(tmp_path / "specs"))
    resources = Resources(lake=Lake(tmp_path / "lake"), specs_folder=tmp_path / "specs", concurrency=2)
    tasks.execute("little", resources)
    raw_rollouts.execute("little", resources)
    scored_rollouts.execute("little", resources)
    return resources


def raise_judge(monkeypatch: pytest.MonkeyPatch, number: int, failing: str | None = None) -> list[str]:
    """Raise the number of the world's judge, which now fails one task; return the tasks that it was asked for."""
    monkeypatch.setitem(versions.COMPONENTS["judge.coop_tiny_shared"], number, f"reason {number}")  # pyright: ignore
    judged_ids = list[str]()

    def mended(self: Any, task: Task, final: Any, sandboxes: Any) -> Verdict:
        judged_ids.append(task.task_id)
        verdict = JUDGE(self, task, final, sandboxes)
        return replace(verdict, reward=0.0, verdict="failed_tests") if task.task_id == failing else verdict

    monkeypatch.setattr(type(FAMILY), "judge", mended)
    return judged_ids


def verdicts(resources: Resources, ref: Ref = REF) -> list[dict[str, Any]]:
    return resources.lake.read(ref, "verdicts").to_pylist()


def test_raised_judge_judges_stored_work_again_and_keeps_both_verdicts(
    resources: Resources, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = resources.lake.read(REF, "scores").to_pylist()
    old = versions.judge_of("coop_tiny_shared")
    assert {row["judge"] for row in before} == {old} and len(before) == 3
    failing = next(row["task_id"] for row in before if row["reward"] == 1.0)
    judged_ids = raise_judge(monkeypatch, 98, failing)
    tasks.execute("little", resources)
    judged_ids.clear()
    assert raw_rollouts.execute("little", resources).skipped
    outcome = scored_rollouts.execute("little", resources)
    assert not outcome.skipped and sorted(judged_ids) == sorted(row["task_id"] for row in before)
    new = versions.judge_of("coop_tiny_shared")
    rows = verdicts(resources)
    recorded = {row["task_id"]: row["reward"] for row in before}
    given = {(row["task_id"], row["judge"]): row["reward"] for row in rows}
    assert given == {(task, old): reward for task, reward in recorded.items()} | {
        (task, new): reward * (task != failing) for task, reward in recorded.items()
    }
    assert all(("reason 98" in (row["reason"] or "")) == (row["judge"] == new) for row in rows)
    scores = {row["task_id"]: row for row in resources.lake.read(REF, "scores").to_pylist()}
    assert (scores[failing]["reward"], scores[failing]["verdict"], scores[failing]["judge"]) == (
        0.0,
        "failed_tests",
        new,
    )
    assert {row["verdict_trust"] for row in scores.values()} == {"blind"}
    assert outcome.manifest.notes == {"judged_again": 3, "later_verdicts": 3, "not_judged": {}}
    # Another number judges again and forgets neither; equal numbers judge nothing.
    judged_ids = raise_judge(monkeypatch, 99)
    tasks.execute("little", resources)
    scored_rollouts.execute("little", resources)
    assert [row["reward"] for row in verdicts(resources) if row["task_id"] == failing] == [1.0, 0.0, 1.0]
    judged_ids.clear()
    scored_rollouts.execute("little", resources, again=True)
    assert judged_ids == [] and len(verdicts(resources)) == 9


def test_killed_judging_continues(resources: Resources, monkeypatch: pytest.MonkeyPatch) -> None:
    judged_ids = raise_judge(monkeypatch, 98)
    tasks.execute("little", resources)
    judged_ids.clear()
    monkeypatch.setattr("etpi_assets.scoring.assets.with_verdicts", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        scored_rollouts.execute("little", resources)
    assert len(judged_ids) == 3
    monkeypatch.setattr("etpi_assets.scoring.assets.with_verdicts", with_verdicts)
    scored_rollouts.execute("little", resources)
    assert len(judged_ids) == 3 and len(verdicts(resources)) == 6


def test_dry_run_says_what_would_be_judged_and_judges_nothing(
    resources: Resources, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    judged_ids = raise_judge(monkeypatch, 98)
    assert rejudge("little", (), dry_run=True, as_json=True) == 0
    (figures,) = json.loads(capsys.readouterr().out)
    assert (figures["asset"], figures["to_judge"], figures["cannot"], judged_ids) == ("scored_rollouts", 3, {}, [])
    task_id = verdicts(resources)[0]["task_id"]
    rejudge("little", (task_id,), dry_run=False, as_json=False)
    assert judged_ids == [task_id]
    rejudge("little", (), dry_run=True, as_json=True)
    (figures,) = json.loads(capsys.readouterr().out.split("\n", 2)[2])
    assert figures["seconds"] > 0  # one verdict was measured


def test_rollouts_of_evaluation_and_reinforcement_are_judged_again_and_share_verdicts(
    resources: Resources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_spec(tmp_path / "specs", "experiments", "own", EXPERIMENT)
    raw = Ref("raw_rollouts", "rollout_set", "little")
    read = {name: resources.lake.read(raw, name).to_pylist() for name in ("rollouts", "agents", "turns", "messages")}
    ids = [row["rollout_id"] for row in read["rollouts"]]
    samples = [{"rollout_id": rollout_id, "seed": 0, "step": n} for n, rollout_id in enumerate(ids)]
    trained = put(resources.lake, "rl_checkpoint", "own", {**read, "rl_samples": samples})
    labels = {"origin": "eval", "checkpoint_role": "base", "decoding": "t1"}
    put(resources.lake, "eval_rollouts", "own", {**read, "rollouts": [row | labels for row in read["rollouts"]]})
    old = versions.judge_of("coop_tiny_shared")
    failing = next(row["task_id"] for row in verdicts(resources) if row["reward"] == 1.0)
    judged_ids = raise_judge(monkeypatch, 98, failing)
    tasks.execute("little", resources)
    judged_ids.clear()
    capsys.readouterr()
    assert rejudge("own", (), dry_run=True, as_json=True) == 0 and not judged_ids
    figures = json.loads(capsys.readouterr().out)
    assert [(each["asset"], each["to_judge"]) for each in figures] == [("eval_metrics", 3), ("rl_rewards", 3)]
    assert rejudge("own", (), dry_run=False, as_json=True) == 0
    assert sorted(judged_ids) == sorted(row["task_id"] for row in read["rollouts"]), "once for both"
    for asset in ("eval_metrics", "rl_rewards"):
        rows = verdicts(resources, Ref(asset, "experiment", "own"))
        of_task = [(row["judge"], row["reward"]) for row in rows if row["task_id"] == failing]
        assert of_task == [(old, 1.0), (versions.judge_of("coop_tiny_shared"), 0.0)]
    rewards = resources.lake.read(Ref("rl_rewards", "experiment", "own"), "rewards").to_pylist()
    assert {row["value"] for row in rewards if row["task_id"] == failing} == {-1.0}
    assert resources.lake.require(trained.ref).version == trained.version
    with catalog.connect(resources.lake.root) as connection:
        flips = connection.sql("SELECT origin, count(*) FROM flips GROUP BY ALL").fetchall()
    assert {*flips} == {("eval", 1), ("rl", 1)}


def test_a_task_that_is_judged_by_itself_is_proved_by_the_same_judge(
    resources: Resources, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raise_judge(monkeypatch, 98)
    tasks.execute("little", resources)
    scored_rollouts.execute("little", resources)  # so that a verdict of an earlier judge is there
    judged_ids = raise_judge(monkeypatch, 99)
    unproved = {row["task_id"] for row in verdicts(resources)[:1]}

    def proved(self: Judging, bench: Bench, plan: Judged) -> Bench:
        refused = [work for work in plan.work if work.task_id in unproved]
        plan.refused += Counter({"task_unproved": len(refused)})
        plan.work = [work for work in plan.work if work not in refused]
        return bench

    monkeypatch.setattr(Judging, "_proved", proved)
    ids = [row["task_id"] for row in verdicts(resources)]
    rejudge("little", ids, dry_run=False, as_json=False)
    assert sorted(judged_ids) == sorted({*ids} - unproved)
    shown = capsys.readouterr().out
    assert "1 task_unproved" in shown and {task_id for task_id in ids if f" {task_id}: " in shown} == {*ids} - unproved


def test_state_of_a_raised_judge_is_outdated_and_runs_no_model(
    resources: Resources, monkeypatch: pytest.MonkeyPatch
) -> None:
    raise_judge(monkeypatch, 98)
    tasks.execute("little", resources)
    steps = {step.asset: step for step in plan("little", resources.specs, resources.lake)}
    assert (steps["raw_rollouts"].state, steps["scored_rollouts"].state) == ("ok", "outdated")
    assert not steps["scored_rollouts"].kept and "reason 98" in steps["scored_rollouts"].reason


class OneAgent(Family):
    params: Mapping[str, Any] = MappingProxyType({})

    def load(self, suite: str, seed: int, params: Mapping[str, Any]) -> Iterator[Task | RejectedInput]:
        return iter(())

    def judge(self, task: Task, final: Any, sandboxes: Any) -> Verdict:
        raise AssertionError

    def roles(self, task: Task) -> list[Role]:
        return [Role("agent1", "task", "do")]


class InPlace(OneAgent):
    def judge_in_place(self, task: Task, machines: Any, sandboxes: Any) -> Verdict:
        raise AssertionError


@pytest.mark.parametrize(
    ("changes", "family", "reason"),
    [
        ({"error": "judge: OSError"}, OneAgent(), "infrastructure"),
        ({"outcome": {"reward": 0.0, "verdict": "broken_by_agent"}}, OneAgent(), "sandbox_ended"),
        ({"task_id": "gone"}, OneAgent(), "task_gone"),
        ({"task_hash": "other"}, OneAgent(), "task_changed"),
        ({"final_files": {}}, OneAgent(), "patch_not_stored"),
        ({"final_files": {"agent2": ""}}, OneAgent(), "patch_not_stored"),
        ({}, InPlace(), "machine_not_stored"),
    ],
)
def test_work_that_was_not_stored_is_counted_with_its_reason(changes: Any, family: Family, reason: str) -> None:
    task = Task.hashed("t", "s", "r", "train", "do", {})
    row = {"rollout_id": "r1", "task_id": "t", "task_hash": task.content_hash, "error": None}
    row |= {"outcome": {"reward": 1.0, "verdict": "passed"}, "final_files": {"agent1": ""}} | changes
    row |= {name: json.dumps(row[name]) for name in ("outcome", "final_files")}
    bench = Bench("judge 2", family, {"t": task}, None, Path("/nowhere"), 1)  # pyright: ignore[reportArgumentType]
    found = planned([row], bench, "judge 1", {}, {})
    assert (found.work, dict(found.refused)) == ([], {reason: 1})


def test_verdict_without_a_later_one_keeps_its_recorded_judge() -> None:
    outcome = json.dumps({"reward": 1.0, "verdict": "passed"})
    rows = from_rows("rollouts", [{"rollout_id": "r1", "outcome": outcome}, {"rollout_id": "r2", "outcome": None}])
    replaced, table = with_verdicts(rows, {}, RECORDED)
    assert [row["judge"] for row in table.to_pylist()] == [RECORDED]
    assert json.loads(replaced["outcome"][0].as_py())["judge"] == RECORDED and replaced["outcome"][1].as_py() is None


Runs = list[tuple[str, str | None, float | None]]
"""(task, patch, our reward: None if it is not judged) of runs that another program recorded as solved."""
SPOKEN = [{"role": "user", "content": "Issue."}, {"role": "assistant", "content": "Done."}]


def swe_runs(repository: Repository, folder: Path) -> Runs:
    """Write `suite` and the runs' file."""
    swe_suite.make(folder, repository, tasks=3)
    right, wrong = repository.patch(FILES, solved("1")), repository.patch(FILES, solved("2"))
    runs: Runs = [("moor__moor-0", right, 1.0), ("moor__moor-1", wrong, 0.0), ("moor__moor-2", None, None)]
    runs.append(("elsewhere__x-1", right, None))
    rows = [{"instance_id": n, "messages": SPOKEN, "model_patch": patch, "resolved": True} for n, patch, _ in runs]
    write_lines(folder / "runs.jsonl", rows)
    return runs


def r2e_runs(repository: Repository, folder: Path) -> Runs:
    row, commit = repository.r2e_row(), repository.commit
    write_lines(folder / "rows.jsonl", [row])
    write_suite(folder, "r2e", folder / "rows.jsonl", repository.checkouts(f"moor/{commit}"))
    right, wrong = repository.patch(FILES, solved("1", "2")), repository.patch(FILES, solved("2"))
    task = f"moor/{commit[:12]}"
    runs: Runs = [(task, right, 1.0), (task, wrong, 0.0), (task, None, None)]
    recorded = [
        {**r2e_row(), "docker_image": f"owner/moor_final:{commit}", "output_patch": patch, "max_steps": number}
        for number, (_, patch, _) in enumerate(runs)
    ]
    elsewhere: Runs = [("harbor/0a1b2c", right, None)]
    write_lines(folder / "runs.jsonl", [*recorded, r2e_row()])
    return runs + elsewhere


def cooperbench_runs(repository: Repository, folder: Path) -> Runs:
    root = repository.cooperbench()
    (root / "moor_task/task7/feature2").rename(root / "moor_task/task7/feature3")
    write_suite(folder, "cooperbench", root, repository.checkouts("moor_task/task7"), OFFLINE)
    one, two = (repository.patch(FILES, solved(feature)) for feature in "12")
    runs: Runs = []
    for run, task, (mine, theirs), ours in (
        ("a", "moor_task/7/f1_f3", (one, two), 1.0),
        ("b", "moor_task/7/f1_f3", (one, ""), 0.0),
        ("c", "moor_task/7/f1_f3", (one, None), None),
        ("d", "harbor_task/7/f1_f3", (one, two), None),
    ):
        unit = pair_run(folder / "runs", where=f"{run}/coop/{task}", verdict=recorded_verdict())
        for feature, patch in ((1, mine), (3, theirs)):
            if patch is not None:
                (unit / f"agent{feature}.patch").write_text(patch)
        runs.append((task, mine, ours))
    return runs


def write_suite(folder: Path, family: str, path: Path, checkouts: Path, more: Mapping[str, Any] = {}) -> None:
    params = {"path": str(path), "checkouts": str(checkouts), "sandbox": "bubblewrap", "test_seconds": 60}
    text = f'title = "x"\nfamily = "{family}"\n[params]\nmemory_gib = 0.5\ndisk_gib = 0.0625\n'
    text += "".join(f"{key} = {json.dumps(value)}\n" for key, value in params.items())
    text += "".join(f"[params.{key}]\nnetwork = {json.dumps(value['network'])}\n" for key, value in more.items())
    (folder / "specs/suites").mkdir(parents=True)
    (folder / "specs/rollout_sets").mkdir()
    (folder / "specs/suites/suite.toml").write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "format", "write"),
    [
        ("swe_bench", "messages", swe_runs),
        ("r2e", "r2e_gym", r2e_runs),
        ("cooperbench", "cooperbench", cooperbench_runs),
    ],
)
def test_imported_patches_are_judged_where_their_suite_is_at_hand(
    family: str, format: str, write: Callable[[Repository, Path], Runs], tmp_path: Path
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = write(Repository(Path(folder)), tmp_path)
        path = next(path for path in (tmp_path / "runs.jsonl", tmp_path / "runs") if path.exists())
        spec = f'title = "x"\nkind = "imported"\nsuite = "suite"\npath = "{path}"\nformat = "{format}"\n'
        (tmp_path / "specs/rollout_sets/own.toml").write_text(spec)
        resources = Resources(lake=Lake(tmp_path / "lake"), specs_folder=tmp_path / "specs", concurrency=2)
        tasks.execute("suite", resources)
        raw_rollouts.execute("own", resources)
        manifest: Manifest = scored_rollouts.execute("own", resources).manifest
    ours = versions.judge_of(family)
    found = Counter((row["task_id"], row["judge"], row["reward"]) for row in verdicts(resources, manifest.ref))
    judged = Counter((name, ours, reward) for name, _, reward in runs if reward is not None)
    assert found == Counter((name, RECORDED, 1.0) for name, _, _ in runs) + judged
    assert manifest.notes["not_judged"] == {"patch_not_stored": 1, "task_gone": 1}
    (check,) = [check for check in manifest.checks if check["name"] == "one_judge"]
    assert not check["passed"] and not check["blocking"]
