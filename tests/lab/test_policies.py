"""Scripted agents: as good as their skill says, and the emulated workspace answers them as the real one does."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from functools import cache
from typing import Any

import pytest

from etpi_assets.agent.loop import Identity, RolloutJob, RolloutRuntime, run_rollout
from etpi_assets.specs.rollout_set import AgentSection, ScoringSection
from etpi_assets.tasks.family import Task, Verdict
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord
from etpi_lab.worlds.coop_tiny import FAMILY, CoopTiny
from etpi_lab.worlds.coop_tiny.emulated import EmulatedFactory, EmulatedSandbox, UnknownCommand
from etpi_lab.worlds.coop_tiny.generate import generate_tasks
from etpi_lab.worlds.coop_tiny.policy import CoopTinyPolicy, CoopTinySkill
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines.scripted import ScriptedEngine
from etpi_resources.sandboxes import SandboxFactory
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory

AGENT = AgentSection()
RECKLESS = CoopTinySkill(
    plan_first=0.5, follow_through=0.8, verbose_think=0.5, wrong_edit=0.7, notice=0.7, run_check=0.9, look_around=0.5,
    ack=0.5, report=0.7, markdown=0.3, malformed=0.15,
)  # fmt: skip


class RecordsFinalFiles(CoopTiny):
    def judge(self, task: Task, final: Any, sandboxes: SandboxFactory) -> Verdict:
        return Verdict(0.0, "unknown", {"final": final})


@cache
def tasks(count: int, split: str = "train") -> tuple[Task, ...]:
    return tuple(itertools.islice(generate_tasks("coop_tiny", 0, split), count))


def roll(
    task: Task, skill: CoopTinySkill, sandboxes: SandboxFactory | None = None, seed: int = 0, **options: Any
) -> RolloutRecord:
    """One rollout: emulated and unjudged, unless told otherwise."""
    chat = load_chat_format("tiny")
    engine = ScriptedEngine(CoopTinyPolicy(skill, seed), chat, "scripted")
    identity = Identity(spec_key=f"test/{seed}", origin="set", engine="scripted")
    return run_rollout(
        RolloutJob(task, options.get("agent", AGENT), identity, options.get("sample", 0)),
        RolloutRuntime(options.get("family", RecordsFinalFiles()), engine, sandboxes or EmulatedFactory(), chat),
    )


def plain(value: Any) -> Any:
    """A record without what is measured by a clock."""
    record = dataclasses.asdict(value)

    def without_times(part: Any) -> Any:
        if isinstance(part, dict):
            return {k: without_times(v) for k, v in part.items() if k not in ("at", "started_at", "wall_seconds")}
        return [without_times(p) for p in part] if isinstance(part, list | tuple) else part

    return without_times(record)


def plans(agent: AgentRecord) -> bool:
    first = agent.turns[0].actions
    return bool(first) and all(a.kind == "send_message" and a.pure for a in first)


def within(hits: int, n: int, rate: float) -> bool:
    return abs(hits / n - rate) <= 4 * math.sqrt(rate * (1 - rate) / n) + 1e-9


# --- behaviour -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("plan_first", "follow_through"), [(0.13, 0.9), (0.5, 0.5), (0.826, 0.826), (1.0, 0.957)])
def test_pairs_plan_and_agents_follow_at_the_rates_of_their_skill(plan_first: float, follow_through: float):
    records = [roll(task, CoopTinySkill(plan_first=plan_first, follow_through=follow_through)) for task in tasks(200)]
    both = [all(map(plans, record.agents)) for record in records]
    either = [any(map(plans, record.agents)) for record in records]
    assert both == either  # drawn for the pair
    assert within(sum(both), len(records), plan_first)
    follows = 0
    for task, record in zip(tasks(200), records, strict=True):
        for agent in record.agents:
            commands = [a.command for turn in agent.turns for a in turn.actions if a.kind == "bash"]
            touched = any(entity in command for entity in FAMILY.entities(task) for command in commands)
            assert touched is bool(agent.patch)
            follows += touched
            assert agent.exit_status == "Submitted"
    assert within(follows, 2 * len(records), follow_through)


def test_a_plan_names_both_paths_and_reads_as_a_plan():
    keywords = ScoringSection().keywords
    for task in (*tasks(60), *tasks(20, "heldout")):
        record = roll(task, CoopTinySkill(plan_first=1, verbose_think=0.5))
        for agent in record.agents:
            (action,) = agent.turns[0].actions
            words = {
                k
                for k in keywords
                if re.search(rf"(?<!\w){re.escape(k.lower())}(?!\w)", (action.message or "").lower())
            }
            assert len(words) >= 2, action.message
            for feature in task.payload["features"].values():
                assert feature["path"] in (action.message or "") and feature["function"] in (action.message or "")
            assert agent.turns[0].inbox and agent.turns[0].inbox[0]["from"] != agent.agent_id


def test_every_form_of_a_message_occurs():
    commands = [a.command for t in tasks(80) for a in roll(t, CoopTinySkill(plan_first=1)).agents[0].turns[0].actions]
    heredoc = sum("<<'MSG'" in command for command in commands)
    assert 0.6 < heredoc / len(commands) < 0.95
    assert any("--wait" in command for command in commands)
    assert any(re.search(r'agent\d "', command) for command in commands)


def test_think_blocks_are_closed_and_moderate():
    chat = load_chat_format("tiny")
    record = roll(tasks(1)[0], CoopTinySkill(verbose_think=1, follow_through=1))
    for agent in record.agents:
        for turn in agent.turns:
            assert turn.content.startswith("<think>\n") and turn.content.count("</think>\n\n") == 1
            assert 25 <= len(chat.encode(turn.content.split("</think>")[0])) <= 150
    record = roll(tasks(1)[0], CoopTinySkill(verbose_think=0))
    assert not any("think" in turn.content for agent in record.agents for turn in agent.turns)


def test_policy_is_a_function_of_the_request():
    task = tasks(3)[2]
    again, other = roll(task, RECKLESS), roll(task, RECKLESS, seed=1)
    assert plain(roll(task, RECKLESS)) == plain(again)
    assert [t.content for t in other.agents[0].turns] != [t.content for t in again.agents[0].turns]
    assert {roll(task, RECKLESS, sample=k).rollout_id for k in range(3)} != {again.rollout_id}


def test_skill_is_read_from_a_spec_with_the_nearest_name_in_errors():
    assert CoopTinySkill.of({"plan_first": 0.13}).plan_first == 0.13
    with pytest.raises(ValueError, match=r"follow_thru: unknown, follow_through\?"):
        CoopTinySkill.of({"follow_thru": 0.5})
    with pytest.raises(ValueError, match=r"skill\.ack = 1\.5"):
        CoopTinySkill(ack=1.5)


# --- verdicts and real sandboxes -------------------------------------------------------------------------------------


def test_careful_agents_solve_their_tasks_and_careless_ones_fail_for_honest_reasons():
    careful = CoopTinySkill(plan_first=1, follow_through=1, wrong_edit=0)
    sandboxes = BubblewrapFactory()
    for task in (*tasks(4), *tasks(4, "heldout")):
        final = (roll(task, careful).outcome or {})["details"]["final"]
        assert FAMILY.judge(task, final, sandboxes).verdict == "passed"
    careless = CoopTinySkill(plan_first=1, follow_through=1, wrong_edit=0.8, notice=0.5)
    verdicts: Counter[str] = Counter()
    for task in tasks(60):
        final = (roll(task, careless).outcome or {})["details"]["final"]
        verdicts[FAMILY.judge(task, final, sandboxes).verdict] += 1
    assert set(verdicts) >= {"passed", "failed_tests", "merge_conflict"}
    assert verdicts["merge_conflict"] < verdicts["failed_tests"]


def test_the_emulated_workspace_and_the_real_one_give_the_same_records():
    real = BubblewrapFactory()
    commands: set[str] = set()
    for task in (*tasks(10), *tasks(4, "heldout")):
        emulated, actual = roll(task, RECKLESS), roll(task, RECKLESS, real)
        assert emulated.error is None and plain(emulated) == plain(actual)
        commands |= {
            a.command.split()[0] for g in actual.agents for t in g.turns for a in t.actions if a.kind == "bash"
        }
    assert commands == {"ls", "cat", "sed", "python3", "echo"}


def test_live_rollout_has_a_judged_record():
    record = roll(
        tasks(1)[0], CoopTinySkill(plan_first=1, follow_through=1, wrong_edit=0), BubblewrapFactory(), family=FAMILY
    )
    assert record.error is None and record.outcome is not None
    assert (record.outcome["reward"], record.outcome["verdict"]) == (1.0, "passed")
    assert all(agent.patch and agent.patch.startswith("diff --git") for agent in record.agents)


@pytest.mark.parametrize(
    "command",
    [
        "ls -l",
        "cat nothing.py",
        "rm -rf /",
        "echo $HOME",
        "echo a; ls",
        "python3 -c 'print(1)'",
        "sed -i 's/a/b/' a.py",
    ],
)
def test_emulated_sandbox_rejects_unknown_commands(command: str):
    with EmulatedSandbox({"a.py": "def f(x):\n    return x + 1\n"}) as sandbox, pytest.raises(UnknownCommand):
        sandbox.run(command)
