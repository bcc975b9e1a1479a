"""Histories compacted on the way: their prompts, and the check that finds prompts that no model received."""

from __future__ import annotations

import re

import pyarrow as pa
import pytest

from etpi_assets.curation.captured import captured_agents
from etpi_assets.curation.pairs import make_pairs
from etpi_assets.specs.experiment import PairsSection
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.trajectories.records import RolloutRecord
from etpi_assets.trajectories.tables import to_tables
from etpi_resources.engines import Request
from tests.support import whole_checks
from tests.support.agent_loop import CHAT, SUBMITS, Pair, bash, roll

TURNS = 10


def counts(request: Request) -> str:
    """Echo the next number, which only the conversation tells; submit after the last one."""
    echoed = re.findall(r"echo (\d+)", "\n".join(message["content"] for message in request.messages))
    number = max(map(int, echoed), default=-1) + 1
    return bash(f"echo {number}") if number < TURNS - 1 else SUBMITS


def rolled(**section: int) -> RolloutRecord:
    return roll(counts, Pair(agents=("agent1",)), noncanonical=0.5, prompt="solo", **section)


@pytest.fixture(scope="module")
def whole() -> RolloutRecord:
    return rolled()


@pytest.fixture(scope="module")
def compacted() -> RolloutRecord:
    return rolled(compact_after=3)


def pairs_of(record: RolloutRecord, capture: str) -> pa.Table:
    section = PairsSection.model_validate({"capture": capture})
    captured = captured_agents(to_tables([record]), section, CHAT, lambda t, a: None, {})
    return make_pairs(captured, section, CHAT)["pairs"]


def test_compacted_prompt_is_first_messages_and_summary_and_messages_are_kept(whole, compacted):
    (first,), (agent,) = whole.agents, compacted.agents
    assert [message.content for message in agent.messages] == [message.content for message in first.messages]
    assert len(agent.turns) == TURNS
    for number, turn in enumerate(agent.turns):
        before = agent.turns[number - 1]
        text = CHAT.decode(turn.prompt_ids or [])
        commands = [action.command for past in agent.turns[:number] for action in past.actions]
        if number % 3 or not number:
            extended = [*(before.prompt_ids or []), *(before.output_ids or [])] if number else []
            assert (turn.prompt_ids or [])[: len(extended)] == extended
        else:
            assert text.startswith(CHAT.decode((agent.turns[0].prompt_ids or [])[:-3]))
            assert "".join(f"$ {command}\n" for command in commands) + (before.observation or "") in text
    drifts = [row["turn"] for row in to_tables([compacted], CHAT.decode)["turns"].to_pylist() if row["drift_at"]]
    assert drifts == [3, 6, 9]


def test_other_spellings_of_a_whole_history_pass(whole):
    native, again = pairs_of(whole, "native"), pairs_of(whole, "retokenised")
    assert native["output_ids"] != again["output_ids"]
    assert whole_checks.history_as_captured(native, native, CHAT).passed
    outcome = whole_checks.history_as_captured(again, native, CHAT)
    assert outcome.passed and outcome.figures["compared"] == len(again) == TURNS


def test_compacted_history_rebuilt_from_messages_blocks(compacted):
    native, again = pairs_of(compacted, "native"), pairs_of(compacted, "retokenised")
    assert whole_checks.history_as_captured(native, native, CHAT).passed
    outcome = whole_checks.history_as_captured(again, native, CHAT)
    assert not outcome.passed and outcome.blocking
    assert "'user\\nDone so far" in outcome.message and 'set pairs.capture = "native"' in outcome.message
    assert outcome.figures["differing"] == TURNS - 3


def test_without_captured_ids_nothing_is_decided():
    pairs = make_pairs([], PairsSection(capture="native"), CHAT)["pairs"]
    assert not whole_checks.history_as_captured(pairs, pairs, CHAT).applicable


def test_only_an_agent_that_compacts_says_so_in_its_identity():
    assert "compact_after" not in AgentSection().identity()
    assert AgentSection(compact_after=3).identity()["compact_after"] == 3
