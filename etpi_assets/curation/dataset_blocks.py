"""Divide the pairs into blocks, and build rows and sequences of each with the figures that checks need."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.curation import gates, integrity, lengths, merge, upweight
from etpi_assets.curation.upweight import RowRule, validation_units
from etpi_resources.lake.parquet import RowRanges
from etpi_resources.lake.stored import Rows, Stored, batches

BLOCK_ROWS = 4096
"""Minimum pairs of a block; it ends with the next agent that leaves no task open."""
OPEN_TOKENS = 1 << 25
"""Tokens of a block's trees, about, beyond which it ends whatever tasks are open, so that its memory is bounded."""
_COLUMNS = ["rollout_id", "agent_id", "metadata", "input_tokens", "output_ids"]


@dataclass(frozen=True)
class DatasetPlan:
    """Settings that all blocks of a data set share.

    Attributes:
        blocks: the numbers of the pairs of each.
        longest: tokens of the longest row.
        validate: the repositories or conversations to validate on.
    """

    blocks: Sequence[range]
    longest: int
    validate: frozenset[str | None]


@dataclass
class _Agent:
    """The pairs of one agent: their number, their tokens (each stored once), and the facts that decide their group."""

    rollout_id: str
    agent_id: str
    pairs: int = 0
    longest: int = 0
    outputs: int = 0
    kept: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def group(self) -> tuple[str, str]:
        """Task and agent; agents of one group may share a tree, see `merge`."""
        return self.facts.get("task_id") or self.rollout_id, self.agent_id

    @property
    def tokens(self) -> int:
        """About the size of the agent's tree: its longest row, which has most of the shorter ones, and all outputs."""
        return self.longest + self.outputs


def plan(pairs: Rows, rule: RowRule) -> DatasetPlan:
    """Return the plan of the data set of all pairs."""
    agents = list(_agents(pairs, rule))
    kept = [agent for agent in agents if agent.kept]
    by_conversation = rule.section.val_by == "conversation"
    units = [f"{a.rollout_id}/{a.agent_id}" if by_conversation else a.facts.get("repo") for a in kept]
    return DatasetPlan(
        blocks=list(_blocks(agents, rule.section.merge)),
        longest=max((agent.longest for agent in kept), default=0),
        validate=frozenset(validation_units(units, rule.section.val_fraction)),
    )


def _agents(pairs: Rows, rule: RowRule) -> Iterator[_Agent]:
    """Yield the agents in order; `longest` and `outputs` are of the pairs that become rows."""
    for (rollout_id, agent_id), rows in groupby(_rows(pairs), key=lambda row: row[:2]):
        agent = _Agent(rollout_id, agent_id)
        for _, _, metadata, prompt, output in rows:
            agent.pairs += 1
            facts = json.loads(metadata)
            if rule.drop(facts, prompt + output) is None:
                agent.kept, agent.facts = True, {name: facts.get(name) for name in ("task_id", "repo")}
                agent.longest = max(agent.longest, prompt + output)
                agent.outputs += output
        yield agent


def _rows(pairs: Rows) -> Iterator[tuple[str, str, str, int, int]]:
    """Yield rollout, agent, metadata, and the numbers of input and of output tokens, of each pair."""
    for batch in batches(pairs, _COLUMNS):
        outputs = pc.list_value_length(batch["output_ids"])  # pyright: ignore[reportAttributeAccessIssue]
        yield from zip(*(column.to_pylist() for column in (*batch.columns[:4], outputs)), strict=True)


def _blocks(agents: Sequence[_Agent], merged: bool) -> Iterator[range]:
    """Yield the blocks: the fewest agents that have `BLOCK_ROWS` pairs and end between two groups.

    If the samples of many tasks alternate, a block ends at `OPEN_TOKENS` tokens; samples in different blocks share no
    tree.
    """
    last = {agent.group: at for at, agent in enumerate(agents)} if merged else {}
    start = stop = tokens = reach = 0
    for at, agent in enumerate(agents):
        stop += agent.pairs
        tokens += agent.tokens
        reach = max(reach, last.get(agent.group, at))
        if (stop - start >= BLOCK_ROWS and reach <= at) or tokens > OPEN_TOKENS:
            yield range(start, stop)
            start, tokens = stop, 0
    if stop > start or not agents:
        yield range(start, stop)


COLUMNS = [*upweight.COLUMNS, "input_tokens", "format_tokens"]
"""The columns of pairs that a data set is built from."""


def dataset_builder(
    pairs: Stored, rule: RowRule, validate: frozenset[str | None], max_tokens: int
) -> Callable[[range], dict[str, pa.Table]]:
    """Return the function that builds a block in a worker process; it reads the block's pairs itself.

    It returns {"dataset_rows", "sequences", "dropped", "figures"}.

    Args:
        validate: the units to validate on, of `DatasetPlan`.
        max_tokens: the longest sequence.
    """
    ranges, section = RowRanges(pairs.name, pairs.paths, COLUMNS), rule.section

    def build(block: range) -> dict[str, pa.Table]:
        of_block = ranges.read(block.start, block.stop)
        weighed = upweight.weigh_pairs(of_block, rule)
        rows = upweight.with_split(weighed["dataset_rows"], section, validate)
        rows, sequences = merge.merge(rows, of_block, max_tokens, merged=section.merge)
        tables = {"dataset_rows": rows, "sequences": sequences, "dropped": weighed["dropped"]}
        figures = _figures(of_block, block.start, **tables)
        return {**tables, "figures": pa.table({"json": [json.dumps(figures)]})}

    return build


def _figures(
    pairs: pa.Table, first: int, dataset_rows: pa.Table, sequences: pa.Table, dropped: pa.Table
) -> dict[str, Any]:
    """Return the figures of the checks by name, and:

    first_turns: the numbers of the pairs of turn 0 that are trained on; used: the rollouts that are not lost, because
    they have rows or are held out.
    """
    rows = dataset_rows
    heldout = dropped.filter(pc.field("reason").isin(gates.HELD_OUT))
    opening = rows.filter((pc.field("split") == "train") & (pc.field("turn") == 0))["pair_id"]
    at = pc.index_in(opening, value_set=pairs["pair_id"])  # pyright: ignore[reportAttributeAccessIssue]
    return {
        "reconcile": integrity.reconcile_figures(pairs, rows, dropped),
        "labels": integrity.label_figures(rows, pairs, sequences),
        "heldout": integrity.heldout_figures(rows),
        "loss": upweight.loss_by_turn(rows),
        "exposure": gates.exposure_figures(rows, pairs),
        "roles": gates.role_figures(rows, pairs),
        "lost": gates.lost_figures(dropped),
        "lengths": lengths.length_figures(rows, pairs, sequences),
        "splits": _counted(rows["split"]),
        "sequence_tokens": len(pc.list_flatten(sequences["input_ids"])),  # pyright: ignore[reportAttributeAccessIssue]
        "first_turns": [first + number for number in at.to_pylist()],
        "used": pa.concat_tables([rows.select(["rollout_id"]), heldout.select(["rollout_id"])])["rollout_id"]
        .unique()
        .to_pylist(),
    }


def _counted(column: pa.ChunkedArray) -> Mapping[str, int]:
    return {row["values"]: row["counts"] for row in column.value_counts().to_pylist()}
