"""An experiment's prompts in full: of the teacher with its steering, as trained on, and as served in evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow as pa

from etpi_resources.frames import to_frame
from etpi_resources.lake.lake import Lake, Ref

MOST_CHARACTERS = 12_000
"""Characters of a prompt that a report prints; longer ones are cut in the middle, and the number of them is named."""


@dataclass(frozen=True)
class Prompt:
    """A first prompt of an agent.

    Attributes:
        stage: collected, trained or served.
        where: the rollout it is of.
    """

    stage: str
    where: str
    text: str


def first_prompts(
    stage: str, lake: Lake, ref: Ref, rollout_id: str, decode: Callable[[Sequence[int]], str] | None
) -> list[Prompt]:
    """Return the first prompt of each agent of a recorded rollout, from its ids, or from its messages without them.

    Args:
        ref: a partition of raw_rollouts or eval_rollouts.
        decode: of the tokenizer of the ids; None if they are of an unknown one.
    """
    ids = "SELECT rollout_id, agent_id, suffix_ids FROM turns WHERE rollout_id = '{}' AND turn = 0 ORDER BY agent_id"
    if decode and (
        shown := from_ids(stage, lake.query(_of(ids, rollout_id), turns=(ref, "turns")).to_pylist(), decode)
    ):
        return shown
    spoken = (
        "SELECT rollout_id, agent_id, role, content FROM messages WHERE rollout_id = '{}' AND turn IS NULL "
        "ORDER BY agent_id, index"
    )
    return from_messages(stage, lake.query(_of(spoken, rollout_id), messages=(ref, "messages")).to_pylist())


def _of(query: str, rollout_id: str) -> str:
    return query.format(rollout_id.replace("'", "''"))


def trained_prompts(pairs: pa.Table, dataset_rows: pa.Table, decode: Callable[[Sequence[int]], str]) -> list[Prompt]:
    """Return the first prompts of the first training rollout, one for each of its agents, as they are trained on."""
    first = to_frame(dataset_rows, ["rollout_id", "split"]).filter(split="train").head(1)
    if first.is_empty():
        return []
    turns = to_frame(pairs, ["rollout_id", "agent_id", "turn", "prefix_turn", "suffix_ids"])
    whole = turns.filter(pl.col("rollout_id") == first["rollout_id"][0], pl.col("prefix_turn").is_null())
    return from_ids(
        "trained",
        whole.sort("agent_id", "turn").unique("agent_id", keep="first", maintain_order=True).to_dicts(),
        decode,
    )


def from_ids(stage: str, turns: Iterable[Mapping[str, Any]], decode: Callable[[Sequence[int]], str]) -> list[Prompt]:
    """Return the prompts of turns with ids.

    Args:
        turns: rows with rollout_id, agent_id and suffix_ids, of turns that extend no other turn.
    """
    return [
        Prompt(stage, f"{row['rollout_id'][:12]} {row['agent_id']}", shortened(decode(row["suffix_ids"])))
        for row in turns
        if row["suffix_ids"]
    ]


def from_messages(stage: str, messages: Iterable[Mapping[str, Any]]) -> list[Prompt]:
    """Return the prompts of agents from their messages before the first turn, for rollouts without ids.

    Args:
        messages: rows with rollout_id, agent_id, role and content, in order.
    """
    texts: dict[str, list[str]] = {}
    for row in messages:
        where = f"{row['rollout_id'][:12]} {row['agent_id']}"
        texts.setdefault(where, []).append(f"[{row['role']}]\n{row['content'] or ''}")
    return [Prompt(stage, where, shortened("\n\n".join(parts))) for where, parts in texts.items()]


def shortened(text: str) -> str:
    """Cut the middle of a text that is longer than MOST_CHARACTERS."""
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n\n[… {len(text) - 2 * half:,} characters are left out here …]\n\n{text[-half:]}"
