"""Adherence to a structured think block: of a turn's text, in the tables and in the metrics."""

from __future__ import annotations

from dataclasses import replace

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etpi_assets.evaluation.metrics import measure
from etpi_assets.scoring.behaviours import ScoringOptions, score
from etpi_assets.scoring.structure import adheres, score_turns, structure_of
from etpi_assets.specs.load import load_shipped
from etpi_assets.specs.rollout_set import AgentSection, GrammarSection, ScoringSection
from etpi_resources.chat.format import load_chat_format
from etpi_resources.chat.grammars import ThinkGrammar
from etpi_resources.lake.schemas import empty, from_rows
from tests.support.grammars import GRAMMARS, blocks, vocabulary

GRAMMAR = ThinkGrammar.of()
BLOCK = "<think>\nSTATE: tests fail\nACTION: read a.py\nEXPECT: a bug\n</think>"
CALL = "\n<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize("grammar", GRAMMARS, ids=str)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_text_adheres_exactly_if_the_engine_may_write_it(grammar: ThinkGrammar, data: st.DataObject) -> None:
    """llguidance over the vocabulary's ids says whether the block may be written; the text says whether it adheres."""
    chat = load_chat_format("tiny")
    block, rest = data.draw(blocks(grammar)), data.draw(st.sampled_from(["", CALL, "\n\n", "<", "</think>"]))
    ids = chat.encode(block + rest)
    # The opening may stand in the prompt, whole or in part; a text alone does not say.
    written = [may_write(replace(grammar, opened=opened), ids) for opened in ("", "<think>", "<think>\n")]
    assert adheres(block + rest, None, grammar) is any(written)


def may_write(grammar: ThinkGrammar, ids: list[int]) -> bool:
    """Whether the block may be written as these ids begin."""
    text = llguidance.LLMatcher.grammar_from_lark(grammar.lark())
    matcher = llguidance.LLMatcher(vocabulary("tiny"), text, log_level=0)
    for token in ids:
        if matcher.is_accepting() or not matcher.consume_token(token):
            break
    return matcher.is_accepting()


@pytest.mark.parametrize(
    ("content", "reasoning", "expected"),
    [
        (BLOCK + CALL, None, True),
        (BLOCK.removeprefix("<think>\n") + CALL, None, True),  # the prompt opened the block
        (CALL, "STATE: a\nACTION: b\nEXPECT: c", True),  # a server kept the inside apart
        (CALL, "\nSTATE: a\nACTION: b\nEXPECT: c\n", True),
        (CALL, "STATE: a\nACTION: b", False),
        (CALL, None, False),
        ("Well. " + BLOCK, None, False),
        (BLOCK[:-8], None, False),
        (BLOCK.replace("ACTION", "STEP"), None, False),
        (BLOCK.replace("tests fail", "tests\nfail"), None, False),
        ("<think>\n\n</think>\n\n" + BLOCK, None, False),
    ],
)
def test_which_blocks_adhere(content: str, reasoning: str | None, expected: bool) -> None:
    assert adheres(content, reasoning, GRAMMAR) is expected


def test_structure_is_that_of_the_scoring_section_or_of_the_agents_grammar() -> None:
    bound, named = AgentSection(grammar=GrammarSection(slots=("A",))), ScoringSection(structure=GrammarSection())
    assert structure_of(ScoringSection(), [AgentSection()]) is None
    assert structure_of(ScoringSection(), [AgentSection(), bound]) == ThinkGrammar.of(("A",))
    assert structure_of(named, [bound]) == GRAMMAR


def _scored(structure: ThinkGrammar | None) -> dict:
    rollouts = [
        {
            "rollout_id": "r",
            "task_id": "t",
            "repo": "x",
            "exit_status": "Submitted",
            "checkpoint_role": "sft",
            "seed": 0,
        }
    ]
    agents = [{"rollout_id": "r", "agent_id": a, "exit_status": "Submitted", "output_tokens": 60} for a in ("a1", "a2")]
    texts = {"a1": [BLOCK + CALL, CALL, BLOCK + CALL], "a2": [CALL, CALL, CALL]}
    turns = [
        {"rollout_id": "r", "agent_id": agent, "turn": n, "content": text, "actions": "[]", "inbox": "[]",
         "think_tokens": 10 if text.startswith("<think>") else 0, "post_think_tokens": 8}
        for agent, said in texts.items()
        for n, text in enumerate(said)
    ]  # fmt: skip
    tables = from_rows("rollouts", rollouts), from_rows("agents", agents), from_rows("turns", turns)
    return {
        "rollouts": tables[0],
        **score(*tables, empty("tasks"), ScoringOptions(ScoringSection(), structure=structure)),
    }


def test_shipped_experiments_measure_and_export_the_grammar_of_their_rollouts() -> None:
    specs, found = load_shipped(), {}
    for name, spec in specs.experiments.items():
        agents = [specs.rollout_sets[key].agent for key in spec.rollout_sets]
        found[name] = structure_of(spec.metrics.scoring, agents)
        assert found[name] == (structure_of(ScoringSection(), agents) or found[name]), name
    assert found["etpi_phase1_public"] == found["etpi_phase1"] and found["etpi_phase1_tiny"]


def test_turn_scores_agent_scores_and_metrics_count_adherence() -> None:
    scored = _scored(GRAMMAR)
    assert scored["turn_scores"]["adheres"].to_pylist() == [True, False, True, False, False, False]
    assert scored["agent_scores"]["adherent_turns"].to_pylist() == [2, 0]
    assert scored["agent_scores"]["post_think_tokens"].to_pylist() == [24, 24]
    metrics = measure(scored["rollouts"], scored["scores"], scored["agent_scores"], experiment="e").to_pylist()
    by_metric = {row["metric"]: row for row in metrics if row["seed"] == 0}
    assert by_metric["adherence"]["value"] == pytest.approx(2 / 6) and by_metric["adherence"]["n"] == 6
    assert by_metric["post_think_tokens_per_turn"]["value"] == pytest.approx(8)


def test_without_a_structure_there_is_no_adherence() -> None:
    scored = _scored(None)
    assert scored["turn_scores"].num_rows == 0
    assert scored["agent_scores"]["adherent_turns"].to_pylist() == [None, None]
    metrics = measure(scored["rollouts"], scored["scores"], scored["agent_scores"], experiment="e")
    assert "adherence" not in metrics["metric"].to_pylist()
    assert score_turns(from_rows("turns", []), None).num_rows == 0
