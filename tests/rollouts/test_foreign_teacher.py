"""A foreign teacher's structured calls become the student's own ids in one go; native capture by the same asset."""

from __future__ import annotations

import json
import logging
from collections import Counter
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from etpi_assets.agent.actions import format_action, read_actions
from etpi_assets.agent.loop import Identity, RolloutJob, RolloutRuntime, run_rollout
from etpi_assets.agent.prompts import render_prompts
from etpi_assets.definitions import build_defs
from etpi_assets.resources import Resources
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.family import Task
from etpi_assets.worlds.coop_tiny_shared import CoopTinyShared
from etpi_assets.worlds.coop_tiny_shared.policy import SharedSkill
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines import Request
from etpi_resources.engines.scripted import ScriptedEngine
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory
from tests.support.graph import failures, write_spec
from tests.support.hosted_teacher import HostedTeacher
from tests.support.rollouts import prompts_of

pytestmark = pytest.mark.slow

KEY = "sk-planted-0815"
CHAT, FAMILY = load_chat_format("tiny"), CoopTinyShared()
SIZES = {"train": 8, "heldout": 24}
TASKS = {task.task_id: task for task in FAMILY.load("little", 0, SIZES) if isinstance(task, Task)}
STUDENT = AgentSection(max_steps=12)

SUITE = 'extends = "coop_tiny_shared"\n[params]\n' + "".join(f"{split} = {n}\n" for split, n in SIZES.items())
HOSTED = """
title = "A hosted teacher, told to plan first"
kind = "live"
suite = "little"

[engine]
kind = "openai"
teacher = "hosted"
model = "teacher"
urls = ["{url}/v1"]
api_key_env = "TEACHER_KEY"

[agent]
steering = true
tools = ["bash"]
"""
NATIVE = 'extends = "coop_tiny_shared_strong"\nsuite = "little"\ntasks = 8\nk = 1\n[engine]\nnoncanonical = 0.1\n'
EXPERIMENT = """
extends = "plan_first_tiny"
rollout_sets = ["{set}"]

[pairs]
capture = "{capture}"

# Eight pairs are too few to learn a format from; what is looked at here comes before any training.
[gates]
format_exposure = 1

[evaluate]
suite = "little"
"""


@pytest.fixture(scope="module")
def created(tmp_path_factory) -> SimpleNamespace:
    """Both phases through Dagster's jobs, from suite to dataset: the lake, and all that was printed or logged."""
    root = tmp_path_factory.mktemp("phases")
    log_lines, log = list[str](), logging.getLogger()
    handler = logging.Handler()
    handler.emit = lambda record: log_lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    skill = SharedSkill(plan_first=1.0, markdown=0.1, malformed=0.1, wrong_edit=0.0, look_around=1.0)
    with pytest.MonkeyPatch.context() as patch, HostedTeacher(TASKS.values(), skill) as server:
        patch.setenv("TEACHER_KEY", KEY)
        write_spec(root / "specs", "suites", "little", SUITE)
        write_spec(root / "specs", "rollout_sets", "hosted", HOSTED.replace("{url}", server.url))
        write_spec(root / "specs", "rollout_sets", "native", NATIVE)
        write_spec(root / "specs", "experiments", "phase_a", EXPERIMENT.format(set="hosted", capture="retokenised"))
        write_spec(root / "specs", "experiments", "phase_b", EXPERIMENT.format(set="native", capture="native"))
        resources = Resources(lake=Lake(root / "lake"), specs_folder=root / "specs")
        definitions = build_defs(resources.specs, {"etpi": resources})
        (root / "dagster").mkdir()
        instance = dg.DagsterInstance.local_temp(str(root / "dagster"))
        for job, *keys in (
            ("prepare_suite", "little"),
            ("collect_rollouts", "hosted", "native"),
            ("build_dataset", "phase_a", "phase_b"),
        ):
            for key in keys:
                done = definitions.resolve_job_def(job).execute_in_process(
                    instance=instance, partition_key=key, raise_on_error=False
                )
                assert done.success, failures(done)
                log_lines += [str(event) for event in done.all_events]
        instance.dispose()
    log.removeHandler(handler)
    return SimpleNamespace(root=root, lake=resources.lake, said=log_lines, seen=server.seen)


def rows(created: SimpleNamespace, asset: str, key: str, table: str) -> list[dict[str, Any]]:
    set_name = "rollout_set" if asset in ("raw_rollouts", "scored_rollouts") else "experiment"
    return created.lake.read(Ref(asset, set_name, key), table).to_pylist()


def inputs(created: SimpleNamespace, experiment: str) -> dict[tuple[str, str, int], list[int]]:
    """The whole input of every pair."""
    return prompts_of(created.lake.read(Ref("tito_pairs", "experiment", experiment), "pairs"))


def conversations(created: SimpleNamespace, rollout_set: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    told = sorted(
        rows(created, "raw_rollouts", rollout_set, "messages"),
        key=lambda m: (m["rollout_id"], m["agent_id"], m["index"]),
    )
    return {key: list(of) for key, of in groupby(told, key=lambda m: (m["rollout_id"], m["agent_id"]))}


def inline(message: dict[str, Any]) -> str:
    """An assistant's message as the student writes it, each structured call spelled by the loop's own writer."""
    calls = [json.loads(call["function"]["arguments"])["command"] for call in json.loads(message["tool_calls"] or "[]")]
    return "\n".join(filter(None, [message["content"], *(str(format_action(command)) for command in calls)]))


def test_the_endpoint_gives_text_and_the_rollouts_are_scored(created):
    turns = rows(created, "raw_rollouts", "hosted", "turns")
    assert {t["capture"] for t in turns} == {"none"} and not any(t["suffix_ids"] or t["output_ids"] for t in turns)
    assert len(turns) == len(created.seen) and {path for path, _ in created.seen} == {"/v1/chat/completions"}
    assert any(t["reasoning"] for t in turns) and "<think>" not in "".join(t["content"] for t in turns)
    scores = rows(created, "scored_rollouts", "hosted", "scores")
    assert len(scores) == SIZES["train"] and not any(s["infrastructure_error"] for s in scores)
    assert min(sum(s["plan_first"] for s in scores), sum(s["reward"] for s in scores)) >= SIZES["train"] / 2
    calls = [
        len(json.loads(m["tool_calls"])) for m in rows(created, "raw_rollouts", "hosted", "messages") if m["tool_calls"]
    ]
    assert Counter(calls).keys() == {1, 2}


def test_every_prompt_is_the_students_rendering_of_its_history(created):
    told, result = conversations(created, "hosted"), inputs(created, "phase_a")
    tasks = {r["rollout_id"]: TASKS[r["task_id"]] for r in rows(created, "raw_rollouts", "hosted", "rollouts")}
    for (rollout_id, agent_id, turn), ids in result.items():
        task = tasks[rollout_id]
        role = next(role for role in FAMILY.roles(task) if role.agent_id == agent_id)
        history: list[dict[str, str]] = list(render_prompts(STUDENT, task, role))
        for message in told[rollout_id, agent_id]:
            if message["kind"] != "prompt" and message["turn"] < turn:
                learnt = message["role"] == "assistant"
                text = inline(message) if learnt else message["content"]
                # The student is offered no tools, so the loop answers it as the user.
                history.append({"role": "assistant" if learnt else "user", "content": text})
        rendered = CHAT.tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True)
        assert ids == CHAT.tokenizer(rendered, add_special_tokens=False)["input_ids"], (rollout_id, agent_id, turn)
    assert {turn for _, _, turn in result} >= set(range(5))


def test_every_output_has_inline_calls_that_parse_back_to_the_actions(created):
    turns = {(t["rollout_id"], t["agent_id"], t["turn"]): t for t in rows(created, "raw_rollouts", "hosted", "turns")}
    log_lines = {
        (m["rollout_id"], m["agent_id"], m["turn"]): m
        for m in rows(created, "raw_rollouts", "hosted", "messages")
        if m["kind"] == "action"
    }
    pairs = rows(created, "tito_pairs", "phase_a", "pairs")
    assert {pair["capture"] for pair in pairs} == {"retokenised"}
    for pair in pairs:
        key = pair["rollout_id"], pair["agent_id"], pair["turn"]
        *ids, end = pair["output_ids"]
        assert end == CHAT.end_id and CHAT.think_open_id not in ids and CHAT.think_close_id not in ids
        text = CHAT.decode(ids)
        assert text == inline(log_lines[key])
        loaded, error = read_actions(text)
        done = json.loads(turns[key]["actions"])
        assert error is None and [(a.kind, a.command, a.to, a.message) for a in loaded] == [
            (a["kind"], a["command"], a["to"], a["message"]) for a in done
        ]
        thought = turns[key]["reasoning"]
        assert thought is None or thought not in text
    assert any(turns[p["rollout_id"], p["agent_id"], p["turn"]]["reasoning"] for p in pairs)
    assert sum(pair["format_tokens"] > 0 for pair in pairs) > len(pairs) / 2


def test_prompt_ids_equal_those_at_inference(created):
    """The turns, said again by an agent as evaluation has it, in real sandboxes: the loop's prompts are the pairs'."""
    told, result = conversations(created, "hosted"), inputs(created, "phase_a")
    compared = 0
    for row in rows(created, "selected_trajectories", "phase_a", "selected")[:3]:
        mine = {
            agent: [inline(m) for m in of if m["kind"] == "action"]
            for (of_id, agent), of in told.items()
            if of_id == row["rollout_id"]
        }

        def policy(request: Request, mine=mine) -> str:
            return mine[request.privileged["role"].agent_id][sum(m["role"] == "assistant" for m in request.messages)]

        engine = ScriptedEngine(policy, CHAT, "again", noncanonical=0.0)
        again = run_rollout(
            RolloutJob(TASKS[row["task_id"]], STUDENT, Identity("k", "eval", "scripted")),
            RolloutRuntime(FAMILY, engine, BubblewrapFactory(), CHAT),
        )
        for agent in again.agents:
            for turn in agent.turns:
                ids = result.get((row["rollout_id"], agent.agent_id, turn.turn))
                assert ids in (None, turn.prompt_ids), (row["task_id"], agent.agent_id, turn.turn)
                compared += ids is not None
    assert compared > 10


@pytest.mark.parametrize(("experiment", "rollout_set"), [("phase_a", "hosted"), ("phase_b", "native")])
def test_every_turn_is_accounted_for_between_stages(created, experiment, rollout_set):
    scores = rows(created, "scored_rollouts", rollout_set, "scores")
    selected, unselected = (
        rows(created, "selected_trajectories", experiment, table) for table in ("selected", "dropped")
    )
    assert len(selected) + len(unselected) == len(scores)
    pairs, dropped = (rows(created, "tito_pairs", experiment, table) for table in ("pairs", "dropped"))
    chosen = {row["rollout_id"] for row in selected}
    turns = [t for t in rows(created, "raw_rollouts", rollout_set, "turns") if t["rollout_id"] in chosen]
    assert len(pairs) + len(dropped) == len(turns) and {d["reason"] for d in dropped} <= {"unparseable"}
    assert len(dropped) == sum(t["parse_error"] is not None for t in turns)
    learnt, left = (rows(created, "upweighted_dataset", experiment, table) for table in ("dataset_rows", "dropped"))
    assert len(learnt) + len(left) == len(pairs) and all(d["reason"] for d in (*unselected, *dropped, *left))


def test_both_phases_pass_the_same_checks_of_the_same_asset(created):
    manifests = [created.lake.current(Ref("tito_pairs", "experiment", name)) for name in ("phase_a", "phase_b")]
    outcomes = [{check["name"]: check["passed"] for check in manifest.checks} for manifest in manifests]
    assert outcomes[0] == outcomes[1] and all(outcomes[0].values()) and len(outcomes[0]) >= 6
    native = rows(created, "tito_pairs", "phase_b", "pairs")
    assert {pair["capture"] for pair in native} == {"native"}
    taught = {(t["rollout_id"], t["agent_id"], t["turn"]): t for t in rows(created, "raw_rollouts", "native", "turns")}
    stripped = 0
    for pair in native:
        captured = taught[pair["rollout_id"], pair["agent_id"], pair["turn"]]["output_ids"]
        assert pair["output_ids"] == captured[len(captured) - len(pair["output_ids"]) :]
        stripped += len(captured) > len(pair["output_ids"])
    assert 0 < stripped < len(native)
    assert any(CHAT.encode(CHAT.decode(p["output_ids"][:-1])) != p["output_ids"][:-1] for p in native), (
        "not the teacher's own"
    )


def test_the_key_is_written_nowhere(created, capsys):
    assert KEY not in "".join([*created.said, *capsys.readouterr()])
    files = [path for path in Path(created.root).rglob("*") if path.is_file()]
    assert len(files) > 20 and not [path for path in files if KEY.encode() in path.read_bytes()]
