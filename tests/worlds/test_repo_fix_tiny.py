"""The world of look-ups: its verdict is R2E-Gym's, its agent is right where both hops are, its slots are short."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from etpi_assets.agent.loop import Identity, RolloutJob, RolloutRuntime, run_rollout
from etpi_assets.scoring.structure import adheres
from etpi_assets.specs.load import load_specs
from etpi_assets.specs.rollout_set import AgentSection, EngineSection, TinySection
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import RejectedInput, Task
from etpi_assets.tasks.reports import equal_outcomes
from etpi_assets.tasks.task_checks import check_tasks
from etpi_assets.trajectories.records import RolloutRecord
from etpi_assets.worlds.repo_fix_tiny import solution
from etpi_assets.worlds.repo_fix_tiny.generate import generate_tasks
from etpi_assets.worlds.repo_fix_tiny.policy import RepoFixPolicy, RepoFixSkill
from etpi_resources.chat.format import load_chat_format
from etpi_resources.chat.grammars import ThinkGrammar
from etpi_resources.engines.scripted import ScriptedEngine
from etpi_resources.sandboxes import SandboxFactory
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory

FAMILY = load_family("repo_fix_tiny")
TASK, *OTHERS = islice(generate_tasks("s", 0, "train"), 4)
AGENT = AgentSection(prompt="repo_fix_tiny", max_steps=5)


def roll(skill: RepoFixSkill, task: Task = TASK, sandboxes: SandboxFactory | None = None) -> RolloutRecord:
    chat = load_chat_format("tiny")
    engine = ScriptedEngine(RepoFixPolicy(skill), chat, "t", noncanonical=0.0)
    identity = Identity("k", "set", "scripted", "t")
    runtime = RolloutRuntime(FAMILY, engine, sandboxes or BubblewrapFactory(), chat)
    return run_rollout(RolloutJob(task, AGENT, identity), runtime)


def verdict(**changes: str | None) -> Any:
    files = {**solution(TASK), **{path.replace("__", "/"): text for path, text in changes.items()}}
    left = {path: text for path, text in files.items() if text is not None}
    return FAMILY.judge(TASK, {"agent1": left}, BubblewrapFactory())


def test_every_task_is_proven_and_shares_no_name_across_the_split():
    result = [task for task in FAMILY.load("s", 0, {"train": 16, "heldout": 9}) if isinstance(task, Task)]
    assert list(FAMILY.validate(result, BubblewrapFactory())) == result
    assert all(check.passed for check in check_tasks(len(result), result, [], FAMILY))


def test_a_task_whose_reference_fails_or_that_passes_without_work_is_refused():
    broken = replace(TASK, payload={**TASK.payload, "value": TASK.payload["value"] + 1})
    idle = replace(OTHERS[0], payload={**OTHERS[0].payload, "files": solution(OTHERS[0])})
    reasons = [o.reason for o in FAMILY.validate([broken, idle], BubblewrapFactory()) if isinstance(o, RejectedInput)]
    assert reasons == ["reference_fails", "null_passes"]


def test_judge_requires_exactly_the_expected_outcomes():
    assert verdict().reward == 1.0
    other = next(name for name in TASK.payload["values"] if f"test_{name}_of_text" in TASK.payload["tests"])
    mended = f"def {other}(x):\n    return int(x) + {TASK.payload['values'][other]}\n"
    result = verdict(**{f"{other}.py": mended})
    assert result.verdict == "failed_tests" and result.details["wrong"] == [f"test_{other}_of_text"]
    assert verdict(**{f"{other}.py": None}).reward == 0.0
    assert verdict(**{f"{other}.py": "raise SystemExit"}).reward == 0.0
    assert not equal_outcomes({}, {})[0]


def test_judge_ignores_edited_tests_and_start_up_files():
    untouched = dict(TASK.payload["files"])
    cheat = f"def {TASK.payload['module']}(x):\n    return x + {TASK.payload['value']}\n"
    for path in ("tests/test_types.py", "conftest.py", "sitecustomize.py", "test_hidden.py"):
        left = {**untouched, path: cheat}
        assert FAMILY.judge(TASK, {"agent1": left}, BubblewrapFactory()).verdict == "no_patch", path


@pytest.mark.parametrize("compact", [0.0, 1.0])
def test_both_hops_solve_it_and_a_wrong_one_does_not(compact: float):
    record = roll(RepoFixSkill(compact=compact))
    assert record.outcome and record.outcome["verdict"] == "passed", record.outcome
    assert [turn.actions[0].command.split()[0] for turn in record.agents[0].turns] == ["cat", "sed", "echo"]
    wrong = roll(RepoFixSkill(compact=compact, wrong_look_up=1.0))
    assert wrong.outcome and wrong.outcome["verdict"] == "failed_tests"


def test_slots_keep_to_the_grammar_at_a_fifth_of_the_tokens():
    grammar = ThinkGrammar.of(max_chars=80)
    short, long = (roll(RepoFixSkill(compact=share)).agents[0].turns for share in (1.0, 0.0))
    assert all(adheres(turn.content, None, grammar) for turn in short)
    assert not any(adheres(turn.content, None, grammar) for turn in long)
    spent = [sum(turn.think_tokens or 0 for turn in turns) for turns in (short, long)]
    assert spent[1] > 5 * spent[0]


def test_the_base_that_rolls_out_is_the_one_that_is_trained():
    specs = load_specs()
    engine = specs.rollout_sets["repo_fix_tiny_base"].engine
    assert engine and engine.tiny == specs.experiments["etpi_phase1_tiny"].base.tiny


def test_a_tiny_engine_needs_its_section():
    with pytest.raises(ValueError, match=r"\[engine.tiny\]"):
        EngineSection(kind="transformers", teacher="t", model="tiny")
    with pytest.raises(ValueError, match=r"\[engine.tiny\]"):
        EngineSection(kind="transformers", teacher="t", model="checkpoint:1", tiny=TinySection())
