"""`evaluate.stop`: an evaluation adds tasks until an interval is narrow enough, records each look, and resumes."""

from __future__ import annotations

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from etpi_assets.agent.loop import RolloutJob, rollout_id
from etpi_assets.evaluation import assets, stopping
from etpi_assets.evaluation import rollouts as evaluation_rollouts
from etpi_assets.evaluation.metrics import measure, paired_changes
from etpi_assets.graph import GRAPH
from etpi_assets.planning.versioning.keys import code_of
from etpi_assets.resources import Resources
from etpi_assets.scoring.confidence import task_order
from etpi_assets.specs.experiment import EvaluateSection
from etpi_assets.specs.load import load_specs
from etpi_assets.tasks.table import task_table
from etpi_assets.worlds.coop_tiny import CoopTiny
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.lake.schemas import empty, from_rows
from tests.support.graph import write_spec
from tests.support.rollouts import planning_pair
from tests.support.small_lake import put

SPEC = """extends = "templated_tiny"
rollout_sets = ["coop_tiny_strong"]
[evaluate]
suite = "small"
tasks = 8
roles = ["base", "sft"]
decodings = [{ name = "greedy" }]
"""
STOP = """[evaluate.stop]
metric = "solved"
width = 0.5
batch = 8
"""
TASKS = [t for t in CoopTiny().load("small", 0, {"train": 2, "heldout": 60}) if hasattr(t, "task_id")]


def section(**stop) -> EvaluateSection:
    decodings = [{"name": "greedy"}]
    return EvaluateSection.model_validate({"suite": "s", "tasks": 8, "decodings": decodings, "stop": stop})


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        ({"width": 0.3, "decoding": "t1"}, r"evaluate.stop.decoding is 't1'; evaluate.decodings has \['greedy'\]"),
        ({"width": 0.3, "role": "rl"}, r"evaluate.roles lacks \['rl'\]"),
        ({"width": 0.3, "against": "sft"}, "compares sft with itself"),
        ({"width": 0.3, "max_tasks": 4}, "max_tasks is 4, below evaluate.tasks, 8"),
        ({"width": 0.3, "decided": True, "against": "none"}, "decided needs a change"),
        ({"width": 0.0}, "greater than 0"),
    ],
)
def test_rule_that_cannot_be_measured_is_refused(stop, words):
    with pytest.raises(ValidationError, match=words):
        section(**stop)


def test_batches_are_the_first_tasks_then_more_up_to_the_budget_in_a_mixed_order():
    held_out = [task for task in TASKS if task.split == "heldout"]
    batches = stopping.batches(held_out, section(width=0.3, batch=5, max_tasks=20), section(width=0.3, batch=5).stop)
    assert [len(batch) for batch in batches] == [8, *[5] * 10, 2], "without a budget: all of the split"
    chosen = section(width=0.3, batch=5, max_tasks=20)
    batches = stopping.batches(held_out, chosen, chosen.stop)
    assert [len(batch) for batch in batches] == [8, 5, 5, 2]
    names = [task.task_id for batch in batches for task in batch]
    assert names == sorted((t.task_id for t in held_out), key=task_order)[:20] != [t.task_id for t in held_out][:20]


class SequentialLake:
    """A lake with tasks and two checkpoints; an engine without a model "solves" a task as `solves` says."""

    def __init__(self, folder, monkeypatch) -> None:
        self.folder, self.lake, self.jobs = folder, Lake(folder / "lake"), []
        self.solves = lambda role, task: role == "sft"
        self.fails_at: int | None = None
        write_spec(folder / "specs", "suites", "small", 'extends = "coop_tiny"\n')
        tables = {"tasks": task_table(TASKS), "quarantined": empty("quarantined")}
        made = {"input_key": "made", "inputs": {}, "spec_hash": "s", "checks": ()}
        self.lake.publish(Ref("tasks", "suite", "small"), tables, **made)
        self.lake.publish(Ref("tasks", "suite", "coop_tiny"), tables, **made)
        monkeypatch.setattr(evaluation_rollouts, "run_rollout", self.roll_out)
        monkeypatch.setattr(assets, "_serving", self.serving)

    def experiment(self, name: str, more: str) -> None:
        write_spec(self.folder / "specs", "experiments", name, SPEC + more)
        row = {"experiment": name, "final": True, "step": 1, "path": "p", "method": "full"}
        base = row | {"checkpoint_id": "b", "role": "base", "seed": None}
        trained = [row | {"checkpoint_id": f"s{seed}", "role": "sft", "seed": seed} for seed in (0, 1)]
        put(self.lake, "base_checkpoint", name, {"checkpoints": [base]})
        put(self.lake, "sft_checkpoint", name, {"checkpoints": trained})
        put(self.lake, "rl_checkpoint", name, {})
        put(self.lake, "serving_probe", name, {})

    @contextmanager
    def serving(self, run, spec):
        @contextmanager
        def engine(checkpoint):
            yield SimpleNamespace(name="none", fingerprint=lambda: {"engine": "none"})

        checkpoints = assets._checkpoints(run)
        yield SimpleNamespace(engine=engine), {checkpoint: checkpoint for checkpoint in checkpoints}

    def roll_out(self, job: RolloutJob, runtime):
        self.jobs.append((job.identity.checkpoint_id, job.task.task_id))
        if self.fails_at is not None and len(self.jobs) > self.fails_at:
            raise RuntimeError("the machine went away")
        role = job.identity.checkpoint_role
        return planning_pair(
            rollout_id(job.task, job.sample, job.identity.spec_key),
            origin="eval", suite=job.task.suite, task_id=job.task.task_id, task_hash=job.task.content_hash,
            repo=job.task.repo, checkpoint_role=role, checkpoint_id=job.identity.checkpoint_id, seed=job.identity.seed,
            sample_seed=job.sample_seed, decoding=job.identity.decoding, sample=job.sample,
            outcome={"reward": float(self.solves(role, job.task)), "verdict": "passed"},
        )  # fmt: skip

    def make(self, name: str):
        resources = Resources(lake=self.lake, specs_folder=self.folder / "specs")
        return assets.eval_rollouts.execute(name, resources, log=lambda line: None).manifest


@pytest.fixture
def sequential_lake(tmp_path, monkeypatch):
    return SequentialLake(tmp_path, monkeypatch)


def test_evaluation_stops_at_the_first_narrow_look_and_says_so(sequential_lake):
    sequential_lake.experiment("e", STOP)
    manifest = sequential_lake.make("e")
    assert not manifest.blocked
    stop = manifest.notes["stop"]
    widths = [look["ci_high"] - look["ci_low"] for look in stop["looks"]]
    assert [look["tasks"] for look in stop["looks"]] == list(range(8, stop["tasks"] + 1, 8))
    assert all(width > 0.5 for width in widths[:-1]) and widths[-1] <= 0.5 and 8 < stop["tasks"] < stop["budget"] == 60
    rollouts = sequential_lake.lake.read(Ref("eval_rollouts", "experiment", "e"), "rollouts")
    assert rollouts.num_rows == 3 * stop["tasks"], "base and two seeds, each on every task so far"
    (sentence,) = stopping.sentences(manifest.notes)
    assert sentence.startswith(f"Stopped after {stop['tasks']} of 60 tasks ({len(widths)} looks): interval narrower")
    assert "change from base to sft" in sentence and "+1.00" in sentence
    assert not list(stopping.sentences({}))


def test_budget_ends_an_evaluation_that_stays_uncertain(sequential_lake):
    sequential_lake.solves = lambda role, task: int(task_order(f"{role}{task.task_id}"), 16) % 2 == 0
    sequential_lake.experiment("e", STOP.replace("0.5", "0.05") + "max_tasks = 20\n")
    stop = sequential_lake.make("e").notes["stop"]
    assert (stop["tasks"], len(stop["looks"])) == (20, 3)
    assert stop["reason"] == "all 20 tasks used, interval still wider than 0.05"


def test_decided_stops_as_soon_as_the_change_excludes_0(sequential_lake):
    sequential_lake.experiment("e", STOP.replace("0.5", "0.05") + "decided = true\n")
    stop = sequential_lake.make("e").notes["stop"]
    assert stop["reason"] == "interval excludes 0" and stop["tasks"] < 60 and stop["looks"][-1]["ci_low"] > 0


def test_killed_evaluation_resumes_without_repeating_a_rollout(sequential_lake):
    sequential_lake.experiment("e", STOP)
    sequential_lake.fails_at = 40
    with pytest.raises(RuntimeError, match="the machine went away"):
        sequential_lake.make("e")
    done, sequential_lake.fails_at = list(sequential_lake.jobs[:40]), None
    sequential_lake.jobs.clear()
    resumed = sequential_lake.make("e")
    assert (
        not set(done) & set(sequential_lake.jobs) and len(done) + len(sequential_lake.jobs) == resumed.rows["rollouts"]
    )
    before = len(sequential_lake.jobs)
    assert sequential_lake.make("e").version == resumed.version and len(sequential_lake.jobs) == before


def test_intervals_of_a_stopped_evaluation_are_sequences_and_wider(sequential_lake):
    sequential_lake.solves = lambda role, task: role == "sft" and int(task_order(task.task_id)[-4:], 16) % 3 > 0
    sequential_lake.experiment("e", STOP)
    sequential_lake.make("e")
    rollouts = sequential_lake.lake.read(Ref("eval_rollouts", "experiment", "e"), "rollouts")
    rows = [
        {"rollout_id": row["rollout_id"], "task_id": row["task_id"], "infrastructure_error": False,
         "reward": json.loads(row["outcome"])["reward"]}
        for row in rollouts.to_pylist()
    ]  # fmt: skip
    scores, agents = from_rows("scores", rows), empty("agent_scores")
    fixed, stopped = (
        {c.metric: c for c in paired_changes(rollouts, scores, agents, "base", "sft", sequential=flag)}
        for flag in (False, True)
    )
    assert stopped["solved"].change.interval == "betting_sequence"
    assert stopped["solved"].change.value == pytest.approx(fixed["solved"].change.value)
    look = sequential_lake.lake.current(Ref("eval_rollouts", "experiment", "e")).notes["stop"]["looks"][-1]
    assert (stopped["solved"].change.ci_low, stopped["solved"].change.ci_high) == (look["ci_low"], look["ci_high"])
    width = {name: of["solved"].change.ci_high - of["solved"].change.ci_low for name, of in
             (("fixed", fixed), ("stopped", stopped))}  # fmt: skip
    assert width["stopped"] > 1.2 * width["fixed"]
    for row in measure(rollouts, scores, agents, experiment="e", sequential=True).to_pylist():
        assert row["interval"] == "betting_sequence" and row["ci_low"] <= row["value"] <= row["ci_high"]


def test_only_experiments_with_a_rule_depend_on_its_code_and_on_scoring(tmp_path):
    write_spec(tmp_path, "experiments", "stops", 'extends = "plan_first_tiny"\n' + STOP.replace("[ev", "\n[ev"))
    specs, node = load_specs(tmp_path), GRAPH["eval_rollouts"]
    reached = {name: set(code_of(node, name, specs).whole.modules) for name in ("plan_first_tiny", "stops")}
    rule = {"etpi_assets.evaluation.stopping", "etpi_assets.scoring.confidence", "etpi_assets.scoring.behaviours"}
    assert rule <= reached["stops"] and not rule & reached["plan_first_tiny"]
    resolved = specs.experiments["stops"].model_dump(mode="json")
    assert resolved["evaluate"]["stop"]["scoring"] == resolved["metrics"]["scoring"], "part of eval_rollouts' key"
    plain = specs.experiments["plan_first_tiny"].model_dump(mode="json")
    assert "stop" not in plain["evaluate"], "specs without the rule keep their hashes"
