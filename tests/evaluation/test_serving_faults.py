"""Faults of serving in real runs of the evaluation assets: each fails its own check, which blocks later assets and
names the remedy; a run without a fault fails no check."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from etpi_assets.asset import Outcome, asset_definitions
from etpi_assets.evaluation import assets as evaluation
from etpi_assets.resources import Resources
from etpi_assets.specs.experiment import ServingSection
from etpi_assets.specs.rollout_set import TinySection
from etpi_assets.tiny_bases import find
from etpi_resources.chat.format import ChatFormat, load_chat_format
from etpi_resources.engines import Completion, Engine, Request
from etpi_resources.engines.serving import Checkpoint, Serving, TransformersServing
from etpi_resources.lake.lake import BlockedInput, Lake, Ref, folder_hash
from tests.support.docs_pages import stopped
from tests.support.graph import write_spec

ASSETS = asset_definitions()
SUITE = 'title = "s"\nfamily = "coop_tiny_shared"\n[params]\ntrain = 96\nheldout = 24\n'
SET = """title = "t"
kind = "live"
suite = "small"
engine = {kind = "scripted", teacher = "made", skill = {plan_first = 1.0}}
"""
EXPERIMENT = """title = "e"
rollout_sets = ["planned"]
preset = "plan_first"
select = {min_reward = "none", shortest_correct = false}
[base]
kind = "path"
path = "BASE"
sha256 = "HASH"
tokenizer = "tiny"
chat_template = "tiny"
[gates]
format_exposure = 20
[train]
epochs = 1
learning_rate = 2e-3
batch_tokens = 4096
save_steps = 10
[probe]
prompts = 8
[evaluate]
suite = "small"
tasks = 2
decodings = [{name = "greedy"}]
"""
TEMPLATE = Path(evaluation.__file__).parents[2] / "etpi_resources" / "chat" / "tokenizers" / "tiny" / "tiny.jinja"
MADE = ("base_checkpoint", "selected_trajectories", "tito_pairs", "upweighted_dataset", "sft_checkpoint")


def copy_base(folder: Path, chat: ChatFormat) -> Path:
    """Copy the shipped base of the world, which acts before it is trained here, so that training is short."""
    recipe = find(TinySection(world="coop_tiny_shared", conversations=1200, exercises=2400), chat)
    assert recipe
    shutil.copytree(recipe.folder, folder)
    chat.save(folder)
    return folder


class ChangedCompletions:
    """An engine that changes another engine's completions."""

    def __init__(self, engine: Engine, change: Callable[[Completion], Completion], name: str | None = None) -> None:
        self._engine, self._change, self.name = engine, change, name or engine.name

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        return [self._change(completion) for completion in self._engine.complete(requests)]

    def fingerprint(self) -> Any:
        return self._engine.fingerprint()

    def close(self) -> None:
        self._engine.close()


class FaultyServing(TransformersServing):
    """Serves the base correctly, and trained checkpoints with one fault."""

    def __init__(self, chat: ChatFormat, fault: str) -> None:
        super().__init__(chat)
        self._fault = fault

    @contextmanager
    def engine(self, checkpoint: Checkpoint) -> Iterator[Engine]:
        trained = checkpoint.role != "base"
        if trained and self._fault == "an adapter that never loaded":
            assert checkpoint.base
            checkpoint = replace(checkpoint, folder=checkpoint.base)
        with super().engine(checkpoint) as engine:
            if trained and self._fault == "an adapter name reused":
                yield ChangedCompletions(engine, lambda c: c, name="plan-first")
            elif trained and self._fault == "a reasoning parser that eats the output":
                yield ChangedCompletions(engine, lambda c: replace(c, text=""))
            elif trained and self._fault == "a server that returns no ids":
                yield ChangedCompletions(engine, lambda c: replace(c, output_ids=[]))
            else:
                yield engine


@dataclass
class FaultyResources(Resources):
    """Resources whose serving has a fault."""

    fault: str = ""

    def serving(
        self, section: ServingSection, chat: ChatFormat, checkpoints: Sequence[Checkpoint], context: int | None = None
    ) -> Serving:
        return FaultyServing(chat, self.fault)


class ServingLake:
    """A lake with a base and the rollouts that its students train on; writes experiments and materializes them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lake = folder, Lake(folder / "lake")
        self.base = copy_base(folder / "base", load_chat_format("tiny"))
        write_spec(folder / "specs", "suites", "small", SUITE)
        write_spec(folder / "specs", "rollout_sets", "planned", SET)
        self.experiment("clean")
        for asset, key in (("tasks", "small"), ("raw_rollouts", "planned"), ("scored_rollouts", "planned")):
            self.make(asset, key)

    def experiment(self, name: str, more: str = "") -> None:
        text = EXPERIMENT.replace("BASE", str(self.base)).replace("HASH", folder_hash(self.base))
        write_spec(self.folder / "specs", "experiments", name, text + more)

    def make(self, asset: str, key: str, fault: str = "") -> Outcome:
        resources = FaultyResources(lake=self.lake, specs_folder=self.folder / "specs", fault=fault)
        return ASSETS[asset].execute(key, resources, lambda line: None)

    def probe(self, name: str, fault: str = "") -> dict[str, str]:
        """Materialize an experiment up to serving_probe; return the probe's failed checks."""
        for asset in (*MADE, "rl_checkpoint"):
            assert not self.make(asset, name).manifest.blocked
        return {c["name"]: c["message"] for c in self.make("serving_probe", name, fault).manifest.failures}


@pytest.fixture(scope="module")
def serving_lake(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serving")
    yield ServingLake(folder)
    shutil.rmtree(folder)


def test_serving_without_a_fault_fails_no_check_and_is_evaluated(serving_lake):
    assert serving_lake.probe("clean") == {}
    probes = serving_lake.lake.read(Ref("serving_probe", "experiment", "clean"), "probes").to_pylist()
    curve = {(r["step"], r["probe"]) for r in probes if r["step"] is not None}
    assert curve == {(step, probe) for step in (10,) for probe in ("first_turn_parses", "first_turn_message")}
    rollouts = serving_lake.make("eval_rollouts", "clean")
    assert not rollouts.manifest.blocked
    assert not serving_lake.make("eval_metrics", "clean").manifest.blocked
    rows = serving_lake.lake.read(Ref("eval_rollouts", "experiment", "clean"), "rollouts").to_pylist()
    assert [(r["checkpoint_role"], r["seed"]) for r in rows] == [("base", None)] * 2 + [("sft", 0)] * 2
    assert len({r["rollout_id"] for r in rows}) == 4 and {r["origin"] for r in rows} == {"eval"}


@pytest.mark.slow
def test_experiment_with_the_same_checkpoints_has_its_own_rows_and_no_new_rollouts(serving_lake):
    assert serving_lake.probe("clean") == {}
    serving_lake.make("eval_rollouts", "clean")
    rows = serving_lake.lake.read(Ref("eval_rollouts", "experiment", "clean"), "rollouts").to_pylist()
    serving_lake.experiment("same", "agent = {max_steps = 12}\n[metrics]\nthresholds = {plan_first = 0.9}\n")
    assert serving_lake.probe("same") == {}
    serving_lake.make("eval_rollouts", "same")
    same = serving_lake.lake.read(Ref("eval_rollouts", "experiment", "same"), "rollouts").to_pylist()
    assert [r["started_at"] for r in same] == [r["started_at"] for r in rows]
    assert {r["rollout_id"] for r in same}.isdisjoint(r["rollout_id"] for r in rows)


@pytest.mark.parametrize(
    ("fault", "checks", "words"),
    [
        ("an adapter name reused", ["served_name"], "a name that embeds its hash"),
        ("a reasoning parser that eats the output", ["first_turn_parses"], "compare a failing turn"),
        ("a server that returns no ids", ["ids_returned"], "a capture without ids is a failure"),
        ("an adapter that never loaded", ["differs_from_base"], "other weights were served"),
    ],
)
def test_server_fault_fails_its_own_check_and_blocks_evaluation(serving_lake, fault, checks, words):
    name = f"faulty_{checks[0]}"
    serving_lake.experiment(name)
    failed = serving_lake.probe(name, fault)
    assert sorted(failed) == checks
    stopped(fault, "serving_probe", failed, checks[0], words)
    with pytest.raises(BlockedInput, match=checks[0]):
        serving_lake.make("eval_rollouts", name)
    # Without the fault it passes.
    assert serving_lake.probe(name) == {}
    assert not serving_lake.make("eval_rollouts", name).manifest.blocked


def test_steering_only_at_serving_fails_prompt_parity(serving_lake):
    # Curation removes the steering section from training prompts.
    serving_lake.experiment("steered", "agent = {steering = true}\n")
    failed = serving_lake.probe("steered")
    assert set(failed) == {"prompt_parity"}
    stopped(
        "a system prompt that only serving has", "serving_probe", failed, "prompt_parity",
        "give serving and training the same messages, tools, template",
    )  # fmt: skip
    serving_lake.experiment("excused", 'agent = {steering = true}\n[gates.override]\nprompt_parity = "studied"\n')
    assert serving_lake.probe("excused") == {}


def test_training_without_a_task_of_the_suite_is_probed_with_its_own_prompts(serving_lake, monkeypatch):
    write_spec(serving_lake.folder / "specs", "suites", "elsewhere", SUITE.replace("title", "seed = 7\ntitle", 1))
    serving_lake.make("tasks", "elsewhere")
    serving_lake.experiment("elsewhere")
    path = serving_lake.folder / "specs" / "experiments" / "elsewhere.toml"
    path.write_text(path.read_text().replace('suite = "small"', 'suite = "elsewhere"'))
    every = evaluation.read_tasks
    # As for imported rollouts, whose tasks are in no suite.
    monkeypatch.setattr(
        evaluation, "read_tasks", lambda table, *more: [t for t in every(table, *more) if t.suite == "elsewhere"]
    )
    assert serving_lake.probe("elsewhere") == {}
    ref = Ref("serving_probe", "experiment", "elsewhere")
    sets = {(row["probe"], row["prompt_set"]): row["n"] for row in serving_lake.lake.read(ref, "probes").to_pylist()}
    assert sets["first_turn_parses", "train"] and sets["first_turn_parses", "heldout"]
    (parity,) = [c for c in serving_lake.lake.require(ref).checks if c["name"] == "prompt_parity"]
    assert not parity["applicable"] and "no task of the training data" in parity["message"]


def test_template_argument_only_at_serving_fails_prompt_parity(serving_lake, monkeypatch):
    # As in most templates, a switch adds an empty, closed think block to the prompt.
    template = TEMPLATE.read_text() + "{%- if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n' }}{%- endif %}"
    chat = ChatFormat("tiny", load_chat_format("tiny").tokenizer, template)
    monkeypatch.setattr(evaluation, "load_chat_format", lambda *names: chat)
    serving_lake.experiment("unthinking", "[serving]\nuntrained_kwargs = {enable_thinking = false}\n")
    stopped(
        "an empty think block in the prompts of serving only", "serving_probe", serving_lake.probe("unthinking"),
        "prompt_parity", "give serving and training the same messages, tools, template",
    )  # fmt: skip
    serving_lake.experiment("thinking")
    assert serving_lake.probe("thinking") == {}
