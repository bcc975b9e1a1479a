"""Provide data to the other benchmarks: recorded runs with ids, curated, in any number of varied copies."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from retokenise import MESSAGE_COMMANDS

from etpi_assets.curation.captured import captured_agents
from etpi_assets.curation.merge import merge
from etpi_assets.curation.pairs import make_pairs
from etpi_assets.curation.retokenise import retokenise
from etpi_assets.curation.select import select
from etpi_assets.curation.upweight import RowRule, units_of, validation_units, weigh_pairs, with_split
from etpi_assets.exports.token_ids import IDS
from etpi_assets.importers import import_runs
from etpi_assets.scoring.behaviours import ScoringOptions, score
from etpi_assets.specs.experiment import DatasetSection, PairsSection, SelectSection
from etpi_assets.specs.rollout_set import ScoringSection
from etpi_assets.trajectories.records import RolloutRecord
from etpi_assets.trajectories.tables import named_rows, to_rows, to_tables
from etpi_resources.chat.format import ChatFormat, load_chat_format
from etpi_resources.lake.schemas import empty

SET = "recorded"
LONGEST = 40_960
"""Positions of Qwen3; no row of the recorded runs is longer, so none is dropped."""
CONTROL = 151_643
"""The first of Qwen3's control ids; lower ids are text."""

Tables = Mapping[str, pa.Table]


def runs_folder() -> Path:
    """Return the folder of recorded CooperBench runs; exit if none is named."""
    root = os.environ.get("ETPI_TRAJECTORIES")
    if not root:
        sys.exit("ETPI_TRAJECTORIES names no folder of recorded runs")
    return Path(root) / "cooperbench-logs"


def qwen3() -> ChatFormat:
    """Return Qwen3's vocabulary and template."""
    return load_chat_format("qwen3", "qwen3")


def recorded_rollouts() -> list[RolloutRecord]:
    """Return the recorded runs as rollouts of the set, without ids."""
    records = [item for item in import_runs("auto", runs_folder(), MESSAGE_COMMANDS) if isinstance(item, RolloutRecord)]
    for record in records:
        record.rollout_set = SET
    return records


def captured(chat: ChatFormat) -> dict[str, pa.Table]:
    """Return `rollouts`, `agents`, `turns` and `messages` of the runs, with ids as if a server had returned them."""
    records = recorded_rollouts()
    for record in records:
        messages = named_rows(to_rows(record))["messages"]
        for agent in record.agents:
            retokenised = retokenise([row for row in messages if row["agent_id"] == agent.agent_id], chat)
            ids = {turn.turn: turn for turn in retokenised}
            for turn in agent.turns:
                if match := ids.get(turn.turn):
                    turn.prompt_ids, turn.output_ids, turn.capture = match.prompt_ids, match.output_ids, "native"
                    turn.post_think_tokens, turn.think_tokens = len(match.output_ids), 0
    return to_tables(records)


def curate(tables: Tables, chat: ChatFormat) -> Iterator[tuple[str, dict[str, pa.Table]]]:
    """Curate a rollout set without dropping anything; yield (name, tables) per stage."""
    scoring = ScoringSection(message_commands=tuple(MESSAGE_COMMANDS["message_commands"]))
    scored = score(
        tables["rollouts"],
        tables["agents"],
        tables["turns"],
        empty("tasks"),
        ScoringOptions(scoring),
        tables["messages"],
    )
    yield "score", scored
    section = SelectSection(min_reward=None, require=(), shortest_correct=False)
    chosen = select(tables["rollouts"], scored["scores"], section)
    yield "select", chosen
    native = PairsSection(capture="native", drop_unparseable=False)
    agents = captured_agents(tables, native, chat, lambda task, agent: None, {})
    pairs = make_pairs(agents, native, chat)
    yield "pairs", pairs
    dataset = DatasetSection(upweight_factor=4, max_length=LONGEST)
    weighed = weigh_pairs(pairs["pairs"], RowRule(dataset))
    yield "weights", weighed
    weighted = weighed["dataset_rows"]
    validate = validation_units(units_of(weighted, dataset).to_pylist(), dataset.val_fraction)
    rows, sequences = merge(with_split(weighted, dataset, validate), pairs["pairs"], LONGEST)
    yield "merged", {"dataset_rows": rows, "sequences": sequences}


def varied(
    table: pa.Table, copies: int, columns: tuple[str, ...] = ("rollout_id", "task_id")
) -> Iterator[pa.RecordBatch]:
    """Yield a table's rows `copies` times.

    The named columns get the copy's number as a suffix. Ids of text are shifted by an offset that no other copy has, so
    a copy keeps its repetitions and shares none with another copy."""
    for copy in range(copies):
        shifted = table
        for place, field in enumerate(table.schema):
            column: Any = table.column(place)
            if field.name in columns:
                column = renamed(column, f"{copy:06d}")
            elif field.type == IDS:
                column = _moved(column, 7919 * copy)
            else:
                continue
            shifted = shifted.set_column(place, field, column)
        yield from shifted.to_batches()


def renamed(column: pa.ChunkedArray, word: str) -> pa.Array:
    """Return the names with a suffix; nulls stay null."""
    return pa.array([None if name is None else f"{name}-{word}" for name in column.to_pylist()], pa.string())


def _moved(column: pa.ChunkedArray, by: int) -> pa.Array:
    lists: Any = column.combine_chunks()
    lists = pa.concat_arrays(lists.chunks) if isinstance(lists, pa.ChunkedArray) else lists
    ids = lists.values.to_numpy()
    moved = np.where(ids < CONTROL, (ids + by) % CONTROL, ids).astype(np.int32)
    return pa.ListArray.from_arrays(lists.offsets, pa.array(moved), mask=lists.is_null())
