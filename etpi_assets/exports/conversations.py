"""Rows of messages for the supervised trainers of TRL and verl: one row per agent's conversation.

The messages are the ones the student's chat template renders. If that template writes tool calls, messages have
`tool_calls` and rows have `tools`, with arguments and schemas as JSON text, because parquet gives all rows the same
columns. Calls of a template that does not take JSON text (calls in XML) are part of the content, as it writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from etpi_assets.curation.student_form import calls_of
from etpi_assets.exports.experiment_data import ExportSource, StudentConversation
from etpi_assets.exports.format import Export, Written, write_splits
from etpi_resources.chat.format import ChatFormat
from etpi_resources.chat.tool_forms import Call, message_calls

_MESSAGE = [("role", pa.string()), ("content", pa.string())]
_FUNCTION = pa.struct([("name", pa.string()), ("arguments", pa.string())])
_CALLS = pa.list_(pa.struct([("id", pa.string()), ("type", pa.string()), ("function", _FUNCTION)]))
MESSAGES = pa.list_(pa.struct(_MESSAGE))
_FACTS = ("rollout_id", "agent_id", "task_id", "repo", "teacher")
_EMPTY_BLOCK = re.compile(r"\A\s*(?:<think>\s*)?</think>\s*")
"""An empty think block, also one that the prompt opens."""
_LEFT = "the messages include turns that the data set dropped, and every turn counts once"


def message_columns(source: ExportSource, *more: tuple[str, pa.DataType]) -> list[tuple[str, pa.DataType]]:
    """Return the column `messages`, and `tools` if the student's template writes tool calls.

    Args:
        more: further fields of a message.
    """
    if source.chat.calls_in_content:
        return [("messages", pa.list_(pa.struct([*_MESSAGE, *more])))]
    thoughts = [(key, pa.string())] if (key := source.chat.words.thinking or source.chat.words.think_key) else []
    message = pa.struct([*_MESSAGE, *thoughts, ("tool_calls", _CALLS), *more])
    return [("messages", pa.list_(message)), ("tools", pa.string())]


def message_fields(source: ExportSource, conversation: StudentConversation) -> dict[str, Any]:
    """Return the values of `message_columns`."""
    if source.chat.calls_in_content:
        return {"messages": conversation.messages}
    tools = None if conversation.tools is None else json.dumps(conversation.tools, ensure_ascii=False)
    messages = [_as_columns(message, source.chat, conversation.tools) for message in conversation.messages]
    return {"messages": messages, "tools": tools}


def _as_columns(message: dict[str, Any], chat: ChatFormat, tools: Sequence[Any] | None) -> dict[str, Any]:
    """Return a message whose calls a table of messages can have."""
    if "tool_calls" not in message:
        return message
    if not _takes_text(chat):
        plain = chat.template_form.message(message["content"], calls_of(message))
        (label,) = chat.label_texts([plain], tools=tools)
        content = _EMPTY_BLOCK.sub("", label.plain)
        return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls}


@cache
def _takes_text(chat: ChatFormat) -> bool:
    """Return whether the template writes a call alike if its arguments are JSON text, as tables have them."""
    labels = []
    for as_text in (chat.template_form.as_text, True):
        calls = message_calls([Call("run", {"command": "ls"})], as_text=as_text)
        try:
            labels += chat.label_texts([{"role": "assistant", "content": "", "tool_calls": calls}])
        except Exception:  # templates raise various errors for arguments in the wrong form
            return False
    return labels[0] == labels[1]


def facts_of(conversation: StudentConversation) -> dict[str, Any]:
    """Return the columns of a conversation besides its messages."""
    of_record = ("rollout_id", "task_id", "repo", "teacher")
    facts = {name: getattr(conversation.record, name) for name in of_record}
    return {**facts, "agent_id": conversation.agent.agent_id}


def _trl(source: ExportSource, folder: Path) -> Written:
    facts = [*((name, pa.string()) for name in _FACTS), ("reward", pa.float64())]
    schema = pa.schema([*message_columns(source), *facts])

    def rows(split: str) -> Iterator[dict[str, Any]]:
        for conversation in source.conversations():
            if conversation.split == split:
                reward = source.rewards.get(conversation.record.rollout_id)
                yield {**message_fields(source, conversation), **facts_of(conversation), "reward": reward}

    return Written(write_splits(folder, schema, rows), notes=(_LEFT,))


def _verl(source: ExportSource, folder: Path) -> Written:
    extra = pa.struct([("split", pa.string()), ("index", pa.int64()), *((name, pa.string()) for name in _FACTS)])

    columns = dict(message_columns(source))
    notes = [_LEFT]
    if "tools" in columns:
        columns["tools"] = _nested_tools(source)
        if columns["tools"] == pa.null():
            notes.append("`tools` is empty: verl reads schemas as columns, which would mix the fields of these schemas")

    def rows(split: str) -> Iterator[dict[str, Any]]:
        of_split = (c for c in source.conversations() if c.split == split)
        for index, conversation in enumerate(of_split):
            about = {"split": split, "index": index, **facts_of(conversation)}
            values = message_fields(source, conversation)
            if "tools" in values:
                values["tools"] = None if columns["tools"] == pa.null() else conversation.tools
            yield {**values, "data_source": source.experiment, "extra_info": about}

    schema = pa.schema([*columns.items(), ("data_source", pa.string()), ("extra_info", extra)])
    return Written(write_splits(folder, schema, rows), notes=tuple(notes))


def _nested_tools(source: ExportSource) -> pa.DataType:
    """Return the type of the tool schemas as nested columns, which verl passes to the template unchanged.

    The type is null if Arrow would pad one schema with the fields of another.
    """
    distinct = {
        json.dumps(conversation.tools): conversation.tools
        for conversation in source.conversations()
        if conversation.tools
    }
    schemas = list(distinct.values())
    try:
        nested = pa.array(schemas)
    except (pa.ArrowInvalid, pa.ArrowTypeError):  # a field is text in one schema and an object in another
        return pa.null()
    return nested.type if schemas and nested.to_pylist() == schemas else pa.null()


TRL = Export(
    "trl_messages",
    title="TRL's conversational rows: `messages`",
    files="`data/train.parquet`, `data/val.parquet`, one row per agent",
    keeps="the messages that the student's template renders, with `tool_calls` and `tools` (JSON text) if it writes "
    "tool calls, without steering; task, repository, teacher, reward; the split",
    loses="token ids, weights, which turns were dropped, that think blocks were stripped (messages still have them)",
    read_by="trl.SFTTrainer",
    importer="messages",
    write=_trl,
)
VERL = Export(
    "verl_sft",
    title="verl's multi-turn supervised rows: `messages`",
    files="`data/train.parquet`, `data/val.parquet`, one row per agent",
    keeps="what `trl_messages` keeps, except the reward; ids of the rollout in `extra_info`",
    loses="what `trl_messages` loses, and the reward",
    read_by="verl.utils.dataset.multiturn_sft_dataset.MultiTurnSFTDataset",
    importer="messages",
    write=_verl,
)
