"""Rows of messages for the supervised trainers of TRL and verl, one per agent, and verl's prompts for reinforcement.

The messages are the ones the student's chat template renders, without thoughts if the data set has none. TRL reads
JSON columns, so its messages have the keys and arguments that the template reads. verl reads structs, in which every
message has the keys of all: arguments are JSON text there, and calls of a template that does not take JSON text (calls
in XML) are part of the content, as it writes them.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import cache, lru_cache
from itertools import chain, count
from pathlib import Path
from typing import Any

import pyarrow as pa

from etpi_assets.curation.student_form import calls_of
from etpi_assets.exports.experiment_data import ExportSource, StudentConversation
from etpi_assets.exports.format import SPLITS, Written, write_splits
from etpi_assets.exports.token_ids import truncation_note, weights_note
from etpi_assets.specs.load import SpecError
from etpi_resources.chat.bounds import TemplateUnbounded
from etpi_resources.chat.format import ChatFormat
from etpi_resources.chat.marks import THINK, THINK_END
from etpi_resources.chat.sources import render_template
from etpi_resources.chat.tool_forms import Call, message_calls

JSON_COLUMNS = [("messages", pa.json_()), ("tools", pa.json_())]
"""Columns that `datasets` reads as its type `Json`: values as they were, where a struct adds null keys."""
_FUNCTION = pa.struct([("name", pa.string()), ("arguments", pa.string())])
_CALLS = pa.list_(pa.struct([("id", pa.string()), ("type", pa.string()), ("function", _FUNCTION)]))
_FACTS = ("rollout_id", "agent_id", "task_id", "repo", "teacher")
_EMPTY_BLOCK = re.compile(rf"\A\s*(?:{THINK}\s*)?{THINK_END}\s*")
"""An empty think block, also one that the prompt opens."""
_NO_TURN = "agents without a turn in the data set"
_NUMBER = "conversations with a number that `datasets` does not read as it is (NaN, an infinity, or over 64 bits)"
_TOKENS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|(?P<number>-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)')
_LEAST, _MOST, _MOST_DECIMALS = -(2**63), 2**64 - 1, 15
"""Bounds of integers that `datasets` reads, and of the digits that it reads after a point."""
_EXPONENTS = sorted(range(-20, 21), key=abs)
"""Exponents that a fraction is written with; one of them was right for each of 90 000 random numbers, 1e-9 to 1e25."""
_COLUMNS = "conversations whose columns the template renders to another text, or refuses: export trl or trl_messages"
_TOOLS = "conversations whose tool schemas verl's columns cannot hold: export trl or trl_messages"


def write_conversations(
    source: ExportSource,
    folder: Path,
    schema: pa.Schema,
    row: Callable[[StudentConversation], dict[str, Any] | str],
    under: str = "data",
) -> tuple[dict[str, int], dict[str, int]]:
    """Write a row per conversation; return file -> rows, and reason -> number of agents that were left out.

    Args:
        row: returns the row, or why the conversation is left out.

    Raises SpecError: every conversation is left out.
    """
    left_out: Counter[str] = Counter()

    def rows(split: str) -> Iterator[dict[str, Any]]:
        for conversation in source.conversations():
            if conversation.split == split:
                result = row(conversation)
                if isinstance(result, str):
                    left_out[result] += 1
                else:
                    yield result

    files = write_splits(folder, schema, rows, under)
    if left_out and not sum(files.values()):
        raise SpecError(f"no row is left to export: {', '.join(f'{n} {reason}' for reason, n in left_out.items())}")
    left_out[_NO_TURN] = source.agents() - sum(files.values()) - left_out.total()
    return files, dict(+left_out)


def json_fields(
    messages: Sequence[Mapping[str, Any]], chat: ChatFormat, tools: Sequence[Any] | None
) -> dict[str, str | None] | str:
    """Return the values of `JSON_COLUMNS`, or why `datasets` cannot read them."""
    if _takes_text(chat):
        messages = [_with_text(message) for message in messages]
    try:
        offered = None if chat.calls_in_content or tools is None else _json(tools)
        return {"messages": _json(messages), "tools": offered}
    except ValueError:
        return _NUMBER


def _json(value: Any) -> str:
    """Return JSON that `datasets` reads as the value. Raises ValueError: it has a number that cannot be read so."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _TOKENS.sub(lambda token: _exact(token["number"]) if token["number"] else token[0], text)


@lru_cache(maxsize=4096)
def _exact(number: str) -> str:
    """Return a number in a spelling that `datasets` reads exactly. Raises ValueError: it has none."""
    if number.removeprefix("-").isdigit():
        spellings = iter([number] if _LEAST <= int(number) <= _MOST else [])
    else:
        shifted = (f"{Decimal(number).scaleb(-exponent):f}e{exponent}" for exponent in _EXPONENTS)
        spellings = (text for text in chain([number], shifted) if read_fraction(text) == float(number))
    if (spelling := next(spellings, None)) is None:
        raise ValueError(number)
    return spelling


def read_fraction(text: str) -> float | None:
    """Read a fraction in JSON as `datasets` does, which rounds some that other programs read exactly: 0.7 is
    0.7000000000000001 to it, but 0.0007e3 is 0.7. None: its digits before the point are over 64 bits.

    Source: `decode_numeric` in ultrajsondec.c of pandas 3.1.
    """
    sign = -1 if text[0] == "-" else 1
    digits, _, exponent = text.removeprefix("-").partition("e")
    whole, _, decimals = digits.partition(".")
    if not _LEAST <= sign * int(whole) <= _MOST:
        return None
    decimals, fraction = decimals[:_MOST_DECIMALS], 0.0
    for digit in decimals:
        fraction = fraction * 10 + int(digit)
    value = float(int(whole)) + fraction * float(f"1e-{len(decimals)}")
    return sign * value * math.pow(10, int(exponent or 0))


def _turns(conversation: StudentConversation) -> Counter[str]:
    """Count the assistant messages, and those of them that are no turns of the data set."""
    spoken = [at for at, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    return Counter(written=len(spoken), dropped=len({*spoken} - {*conversation.trained}))


def _message_notes(source: ExportSource, turns: Counter[str], trainer: str) -> tuple[str, ...]:
    """Return notes on the turns that the trainer trains otherwise than the data set."""
    if not turns["dropped"]:
        return weights_note(source)
    count = f"{turns['dropped']} of {turns['written']} assistant messages"
    return (f"{count} are no turns of the data set, but {trainer} trains them too", *weights_note(source))


def _as_columns(message: dict[str, Any], chat: ChatFormat, tools: Sequence[Any] | None) -> dict[str, Any]:
    """Return a message whose calls a table of messages can have."""
    if "tool_calls" not in message:
        return message
    if not _takes_text(chat):
        plain = chat.template_form.message(message["content"], calls_of(message))
        (label,) = chat.label_texts([plain], tools=tools)
        content = _EMPTY_BLOCK.sub("", label.plain)
        return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}
    return _with_text(message)


def _with_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of its calls as JSON text."""
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls} if calls else dict(message)


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


def write_trl(source: ExportSource, folder: Path) -> Written:
    facts = [*((name, pa.string()) for name in _FACTS), ("reward", pa.float64())]
    turns: Counter[str] = Counter()

    def row(conversation: StudentConversation) -> dict[str, Any] | str:
        values = json_fields(conversation.messages, source.chat, conversation.tools)
        if isinstance(values, str):
            return values
        turns.update(_turns(conversation))
        return {**values, **facts_of(conversation), "reward": source.rewards.get(conversation.record.rollout_id)}

    files, left_out = write_conversations(source, folder, pa.schema([*JSON_COLUMNS, *facts]), row)
    mask = "TRL trains every token of a row, of users and tools too, unless SFTConfig has assistant_only_loss=True"
    return Written(files, left_out, (mask, *_message_notes(source, turns, "TRL"), *truncation_note(source)))


def write_verl(source: ExportSource, folder: Path) -> Written:
    index = {split: count() for split in SPLITS}
    turns: Counter[str] = Counter()
    extra = pa.struct([("split", pa.string()), ("index", pa.int64()), *((name, pa.string()) for name in _FACTS)])
    of_messages = _struct_columns(source)

    def row(conversation: StudentConversation) -> dict[str, Any] | str:
        tools, chat = conversation.tools, source.chat
        messages = [_as_columns(message, chat, tools) for message in conversation.messages]
        values = {"messages": messages, **({"tools": tools or []} if "tools" in of_messages.names else {})}
        (columns,) = pa.Table.from_pylist([values], of_messages).to_pylist()
        if _rendered(chat, columns["messages"], columns.get("tools")) != _rendered(chat, conversation.messages, tools):
            return _TOOLS if tools and "tools" not in values else _COLUMNS
        turns.update(_turns(conversation))
        about = {"split": conversation.split, "index": next(index[conversation.split]), **facts_of(conversation)}
        return {**values, "data_source": source.experiment, "extra_info": about}

    schema = pa.schema([*of_messages, ("data_source", pa.string()), ("extra_info", extra)])
    files, left_out = write_conversations(source, folder, schema, row)
    return Written(files, left_out, _message_notes(source, turns, "verl"))


def _rendered(chat: ChatFormat, messages: list[Any], tools: list[Any] | None) -> str | None:
    """Return the template's text of a conversation; None if the template refuses it."""
    try:
        return render_template(chat.tokenizer, chat.template, messages, tools)
    except TemplateUnbounded:
        raise
    except Exception:  # templates raise various errors
        return None


def _struct_columns(source: ExportSource) -> pa.Schema:
    """Return the columns `messages`, with the keys of all messages, and `tools` if columns can hold them."""
    keys = dict.fromkeys(("role", "content"))
    schemas: dict[str, Any] = {}
    for conversation in source.conversations():
        for message in conversation.messages:
            keys |= dict.fromkeys(_as_columns(message, source.chat, conversation.tools))
        if conversation.tools and not source.chat.calls_in_content:
            schemas[json.dumps(conversation.tools)] = conversation.tools
    message = pa.struct([(key, _CALLS if key == "tool_calls" else pa.string()) for key in keys])
    tools = _nested(list(schemas.values()))
    return pa.schema([("messages", pa.list_(message)), *([] if tools == pa.null() else [("tools", tools)])])


def _nested(schemas: list[Any]) -> pa.DataType:
    """Return the type of tool schemas as nested columns; null if Arrow cannot hold them, or pads one with fields of
    another."""
    try:
        nested = pa.array(schemas)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):  # text in one schema and an object in another
        return pa.null()
    return nested.type if nested.to_pylist() == schemas else pa.null()


# --- prompts for reinforcement ---------------------------------------------------------------------------------------

_PROMPT_EXTRA = ("split", "task_id", "task_hash", "repo", "suite", "agent_id", "feature_id")
_PROMPTS = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        ("extra_info", pa.struct([("index", pa.int64()), *((name, pa.string()) for name in _PROMPT_EXTRA)])),
    ]
)


def write_verl_rl(source: ExportSource, folder: Path) -> Written:
    rows_of: dict[str, set[tuple[str | None, str]]] = {split: set() for split in SPLITS}
    offered = False

    def row(conversation: StudentConversation) -> dict[str, Any] | str:
        nonlocal offered
        record, seen = conversation.record, rows_of[conversation.split]
        key = (record.task_id, conversation.agent.agent_id)
        if key in seen:
            return "later rollouts of a task and agent"
        prompt = source.first_messages(record, conversation.agent)
        if any(message.keys() != {"role", "content"} for message in prompt):
            return "prompts with calls or thoughts, which `prompt` has no columns for"
        seen.add(key)
        offered |= bool(conversation.tools) and not source.chat.calls_in_content
        about = {name: getattr(record, name, None) for name in ("task_id", "task_hash", "repo", "suite")}
        about |= {"split": conversation.split, "index": len(seen) - 1, "agent_id": key[1]}
        about["feature_id"] = conversation.agent.feature_id
        return {
            "data_source": record.suite or source.experiment,
            "prompt": prompt,
            "ability": "code",
            "reward_model": {"style": "rule", "ground_truth": record.task_id},
            "extra_info": about,
        }

    files, left_out = write_conversations(source, folder, _PROMPTS, row)
    notes = ("`ground_truth` is the id of the task, whose suite judges the answer",)
    tools = ("rows have no tool schemas: name the tools in verl's `data.tool_config_path`",) if offered else ()
    return Written(files, left_out, (*notes, *tools))
