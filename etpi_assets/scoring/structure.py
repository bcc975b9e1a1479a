"""Check of a turn's think block against the structure of a grammar, and the `turn_scores` table.

Adherence is measured on the text of a turn, whether or not a grammar constrained its sampling
(`etpi_resources.chat.grammars`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from etpi_assets.specs.rollout_set import AgentSection, ScoringSection
from etpi_resources.chat.grammars import CLOSING, OPENING, ThinkGrammar
from etpi_resources.lake.schemas import from_rows


def adheres(content: str, reasoning: str | None, grammar: ThinkGrammar) -> bool:
    """Return whether a turn begins with the grammar's think block.

    The prompt may already hold the opening tag, and a server may return the inside of the block as `reasoning`. Any
    text may follow the block. A truncated or missing block does not adhere.
    """
    text = content if reasoning is None else OPENING + reasoning.strip("\n") + f"\n{CLOSING}" + content
    inside = ThinkGrammar(grammar.slots, grammar.bounds, opened=OPENING).pattern()
    return re.match(f"(?:{OPENING}|\n)?{inside}", text) is not None


def structure_of(scoring: ScoringSection, agents: Iterable[AgentSection]) -> ThinkGrammar | None:
    """Return the structure of the scoring section or, without one, the first grammar that constrains an agent.

    Args:
        agents: of a rollout set, or of an evaluation and then of the rollout sets that trained the student.
    """
    section = scoring.structure or next((agent.grammar for agent in agents if agent.grammar), None)
    return section.grammar() if section else None


def score_turns(turns: pa.Table, grammar: ThinkGrammar | None) -> pa.Table:
    """Return a row of `turn_scores` per turn, in order; an empty table without a grammar.

    Args:
        turns: columns rollout_id, agent_id, turn, think_tokens and post_think_tokens; with a grammar also content and
            reasoning.
    """
    rows: list[dict[str, Any]] = []
    if grammar is not None:
        names = ["rollout_id", "agent_id", "turn", "think_tokens", "post_think_tokens", "content", "reasoning"]
        for row in turns.select(names).to_pylist():
            row["adheres"] = adheres(row.pop("content") or "", row.pop("reasoning"), grammar)
            rows.append(row)
    return from_rows("turn_scores", rows)
