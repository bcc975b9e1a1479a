"""Whether turns think in the structure asked for: measured on what they wrote, however it came about.

Belongs here: holding a turn's text against a think block of named lines, and the `turn_scores` table. Does not belong
here: the structure itself (`etpi_resources.chat.grammars`), or making a model keep to it.
"""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa

from etpi_assets.specs.rollout_set import AgentSection, ScoringSection
from etpi_resources.chat.grammars import OPENING, ThinkGrammar
from etpi_resources.lake.schemas import from_rows


def adheres(content: str, reasoning: str | None, grammar: ThinkGrammar) -> bool:
    """Whether a turn begins with the grammar's think block.

    The block's opening may stand in the prompt instead, and a server may have kept the block's inside apart from the
    text. What follows the block is free. A block that is cut, or that a turn leaves out, does not adhere.
    """
    text = content if reasoning is None else OPENING + reasoning.strip("\n") + "\n</think>" + content
    inside = ThinkGrammar(grammar.slots, grammar.bounds, given=OPENING).pattern()
    return re.match(f"(?:{OPENING}|\n)?{inside}", text) is not None


def structure_of(scoring: ScoringSection, agent: AgentSection) -> ThinkGrammar | None:
    """What turns are held against: the scoring section's structure, or the grammar that bound the agent."""
    section = scoring.structure or agent.grammar
    return section.grammar() if section else None


def score_turns(turns: pa.Table, grammar: ThinkGrammar | None) -> pa.Table:
    """A row of `turn_scores` for every turn, in order; none without a grammar.

    Args:
        turns: columns rollout_id, agent_id, turn, think_tokens and post_think_tokens; with a grammar content and
            reasoning too.
    """
    rows: list[dict[str, Any]] = []
    if grammar is not None:
        names = ["rollout_id", "agent_id", "turn", "think_tokens", "post_think_tokens", "content", "reasoning"]
        for row in turns.select(names).to_pylist():
            row["adheres"] = adheres(row.pop("content") or "", row.pop("reasoning"), grammar)
            rows.append(row)
    return from_rows("turn_scores", rows)
