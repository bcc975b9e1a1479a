"""Rows of messages, as supervised trainers read them: TRL's and verl's.

Belongs here: one row an agent's conversation, as the student's chat template is given it. Does not belong here: token
ids (`token_ids`).

Under a template that writes tool calls, messages have `tool_calls` and rows have `tools`; arguments and schemas are
JSON text, because parquet gives every row the same columns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from etpi_assets.exports.format import Export, Written, write_splits
from etpi_assets.exports.source import Conversation, ExportSource

_MESSAGE = [("role", pa.string()), ("content", pa.string())]
_FUNCTION = pa.struct([("name", pa.string()), ("arguments", pa.string())])
_CALLS = pa.list_(pa.struct([("id", pa.string()), ("type", pa.string()), ("function", _FUNCTION)]))
MESSAGES = pa.list_(pa.struct(_MESSAGE))
_FACTS = ("rollout_id", "agent_id", "task_id", "repo", "teacher")
_LEFT = "turns that the data set dropped are among the messages, and every turn counts once"


def message_columns(source: ExportSource, *more: tuple[str, pa.DataType]) -> list[tuple[str, pa.DataType]]:
    """The columns `messages`, and `tools` where the student's template writes tool calls.

    Args:
        more: further fields of a message.
    """
    if source.chat.calls_in_content:
        return [("messages", pa.list_(pa.struct([*_MESSAGE, *more])))]
    message = pa.struct([*_MESSAGE, ("tool_calls", _CALLS), *more])
    return [("messages", pa.list_(message)), ("tools", pa.string())]


def message_fields(source: ExportSource, told: Conversation) -> dict[str, Any]:
    """The values of `message_columns`."""
    if source.chat.calls_in_content:
        return {"messages": told.messages}
    tools = None if told.tools is None else json.dumps(told.tools, ensure_ascii=False)
    return {"messages": [_with_text_arguments(message) for message in told.messages], "tools": tools}


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls}


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
    facts = [*((name, pa.string()) for name in _FACTS), ("reward", pa.float64())]
    schema = pa.schema([*message_columns(source), *facts])

    def rows(split: str) -> Iterator[dict[str, Any]]:
        for told in source.conversations():
            if told.split == split:
                reward = source.rewards.get(told.record.rollout_id)
                yield {**message_fields(source, told), **facts_of(told), "reward": reward}

    return Written(write_splits(folder, schema, rows), notes=(_LEFT,))


def _verl(source: ExportSource, folder: Path) -> Written:
    extra = pa.struct([("split", pa.string()), ("index", pa.int64()), *((name, pa.string()) for name in _FACTS)])

    columns = dict(message_columns(source))
    notes = [_LEFT]
    if "tools" in columns:
        columns["tools"] = _nested_tools(source)
        if columns["tools"] == pa.null():
            notes.append("`tools` is empty: verl reads schemas as columns, and these would get each other's fields")

    def rows(split: str) -> Iterator[dict[str, Any]]:
        told = (t for t in source.conversations() if t.split == split)
        for index, one in enumerate(told):
            about = {"split": split, "index": index, **facts_of(one)}
            given = message_fields(source, one)
            if "tools" in given:
                given["tools"] = None if columns["tools"] == pa.null() else one.tools
            yield {**given, "data_source": source.experiment, "extra_info": about}

    schema = pa.schema([*columns.items(), ("data_source", pa.string()), ("extra_info", extra)])
    return Written(write_splits(folder, schema, rows), notes=tuple(notes))


def _nested_tools(source: ExportSource) -> pa.DataType:
    """The type of the tool schemas as nested columns, which verl hands to the template as they are; null where Arrow
    would pad one schema with the fields of another."""
    distinct = {json.dumps(told.tools): told.tools for told in source.conversations() if told.tools}
    given = list(distinct.values())
    try:
        nested = pa.array(given)
    except (pa.ArrowInvalid, pa.ArrowTypeError):  # a field that is text in one schema and an object in another
        return pa.null()
    return nested.type if given and nested.to_pylist() == given else pa.null()


TRL = Export(
    "trl_messages",
    title="TRL's conversational rows: `messages`",
    files="`data/train.parquet`, `data/val.parquet`, a row an agent",
    keeps="the conversation as the student's template is given it, with `tool_calls` and `tools` (JSON text) where the "
    "template writes calls, steering taken out; task, repository, teacher, reward; the split",
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
