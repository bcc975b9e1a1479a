"""The surveying agent of `coop_tiny`: the other policy's turns with reading in between, in a real sandbox."""

from __future__ import annotations

import itertools

import pytest

from etpi_assets.agent.loop import Identity, RolloutJob, RolloutRuntime, run_rollout
from etpi_assets.specs.load import load_installed
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.family import Task
from etpi_assets.trajectories.records import RolloutRecord
from etpi_lab.worlds.coop_tiny import FAMILY
from etpi_lab.worlds.coop_tiny.emulated import UnjudgedCoopTiny
from etpi_lab.worlds.coop_tiny.generate import generate_tasks
from etpi_lab.worlds.coop_tiny.policy import CoopTinyPolicy, CoopTinySkill
from etpi_lab.worlds.coop_tiny.surveys import SurveyingSkill
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines.scripted import Policy, ScriptedEngine
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory

SKILL = {"plan_first": 1.0, "follow_through": 1.0, "verbose_think": 0.3, "wrong_edit": 0.5, "ack": 0.3}
TASKS = list(itertools.islice(generate_tasks("coop_tiny", 0, "train"), 6))


def roll(task: Task, policy: Policy) -> RolloutRecord:
    chat = load_chat_format("tiny")
    return run_rollout(
        RolloutJob(task, AgentSection(max_steps=48, max_model_len=4096), Identity("test", "set", "scripted"), 0),
        RolloutRuntime(UnjudgedCoopTiny(), ScriptedEngine(policy, chat, "scripted"), BubblewrapFactory(), chat),
    )


def texts(record: RolloutRecord) -> list[list[str]]:
    return [[turn.content for turn in agent.turns] for agent in record.agents]


def policy(**skill: float) -> Policy:
    return FAMILY.scripted_policy({**SKILL, **skill}, 7)


def test_agent_without_a_survey_is_the_policy_that_existed_before():
    for task in TASKS:
        assert texts(roll(task, policy())) == texts(roll(task, CoopTinyPolicy(CoopTinySkill.of(SKILL), 7)))


def test_survey_follows_the_first_turn_and_changes_no_other_turn():
    for task in TASKS[:3]:
        plain, long = roll(task, policy()), roll(task, policy(survey_turns=9))
        for short_agent, agent in zip(plain.agents, long.agents, strict=True):
            contents = [turn.content for turn in agent.turns]
            assert contents[:1] + contents[10:] == [turn.content for turn in short_agent.turns]
            assert agent.patch == short_agent.patch and agent.exit_status == "Submitted"
            reads = [action for turn in agent.turns[1:10] for action in turn.actions]
            assert [action.kind for action in reads] == ["bash"] * 9
            assert {action.command.split()[0] for action in reads} <= {"ls", "head", "grep", "wc"}
            assert len({action.command for action in reads}) > 3
            observations = [m.content for m in agent.messages if m.role == "user"][2:11]
            assert all("[exit 0]" in text for text in observations), "every command works in a real sandbox"


@pytest.mark.parametrize("turns", [-1, 2.5])
def test_survey_of_half_a_turn_is_refused(turns: float):
    with pytest.raises(ValueError, match="survey_turns"):
        SurveyingSkill.of({"survey_turns": turns})
    with pytest.raises(ValueError, match=r"skill\.ack"):
        SurveyingSkill.of({"ack": 1.5})


def test_conversation_with_a_long_survey_fits_4096_tokens():
    spec = load_installed().rollout_sets["coop_tiny_strong"]
    assert spec.engine
    record = roll(TASKS[0], policy(**{**spec.engine.skill, "survey_turns": 28}))
    for agent in record.agents:
        last = agent.turns[-1]
        assert len(agent.turns) > 30 and agent.exit_status == "Submitted"
        assert len(last.prompt_ids or ()) + spec.agent.max_tokens < 4096
