"""Rows of messages, as supervised trainers read them: TRL's and verl's.

Belongs here: one row an agent's conversation, in the student's form. Does not belong here: token ids (`token_ids`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from etpi_assets.exports.format import Export, Written, write_splits
from etpi_assets.exports.source import Conversation, ExportSource

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_FACTS = ("rollout_id", "agent_id", "task_id", "repo", "teacher")
_LEFT = "turns that the data set dropped are among the messages, and every turn counts once"


def facts_of(told: Conversation) -> dict[str, Any]:
    """What a row says of its conversation besides the messages."""
    record = told.record
    return {
        "rollout_id": record.rollout_id,
        "agent_id": told.agent.agent_id,
        "task_id": record.task_id,
        "repo": record.repo,
        "teacher": record.teacher,
    }


def _trl(source: ExportSource, folder: Path) -> Written:
    schema = pa.schema([("messages", MESSAGES), *((name, pa.string()) for name in _FACTS), ("reward", pa.float64())])

    def rows(split: str) -> Iterator[dict[str, Any]]:
        for told in source.conversations():
            if told.split == split:
                reward = source.rewards.get(told.record.rollout_id)
                yield {"messages": told.messages, **facts_of(told), "reward": reward}

    return Written(write_splits(folder, schema, rows), notes=(_LEFT,))


def _verl(source: ExportSource, folder: Path) -> Written:
    extra = pa.struct([("split", pa.string()), ("index", pa.int64()), *((name, pa.string()) for name in _FACTS)])
    schema = pa.schema([("messages", MESSAGES), ("data_source", pa.string()), ("extra_info", extra)])

    def rows(split: str) -> Iterator[dict[str, Any]]:
        told = (t for t in source.conversations() if t.split == split)
        for index, one in enumerate(told):
            about = {"split": split, "index": index, **facts_of(one)}
            yield {"messages": one.messages, "data_source": source.experiment, "extra_info": about}

    return Written(write_splits(folder, schema, rows), notes=(_LEFT,))


TRL = Export(
    "trl_messages",
    title="TRL's conversational rows: `messages`",
    files="`data/train.parquet`, `data/val.parquet`, a row an agent",
    keeps="the conversation in the student's form, calls inline, steering taken out; task, repository, teacher, "
    "reward; the split",
    loses="token ids, weights, which turns were dropped, think that was stripped (it stands in the text), reasoning "
    "kept apart",
    read_by="trl.SFTTrainer",
    importer="messages",
    write=_trl,
)
VERL = Export(
    "verl_sft",
    title="verl's multi-turn supervised rows: `messages`",
    files="`data/train.parquet`, `data/val.parquet`, a row an agent",
    keeps="what `trl_messages` keeps, but for the reward; ids of the rollout in `extra_info`",
    loses="what `trl_messages` loses, and the reward",
    read_by="verl.utils.dataset.multiturn_sft_dataset.MultiTurnSFTDataset",
    importer="messages",
    write=_verl,
)
