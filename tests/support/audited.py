"""Training files to audit: conversations with calls, as messages and as ids with labels, and faults for them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from etpi_resources.chat.format import ChatFormat, load_chat_format
from etpi_resources.labels import IGNORE_INDEX
from tests.support.rows import write_lines, write_parquet

TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
WORDS = ["anchor", "buoy", "deck", "ebb", "hull", "inlet", "jetty", "keel", "lagoon", "mast", "oar", "port"]
Row = dict[str, Any]


def model_folder(folder: Path, name: str = "qwen3", context: int = 40960) -> Path:
    """Write the tokenizer, template and configuration of a model, which an audit needs of it."""
    chat = load_chat_format(name)
    chat.save(folder)
    (folder / "chat_template.jinja").write_text(chat.template)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": context}))
    return folder


def conversations(count: int, turns: int = 2, seed: int = 0) -> list[Row]:
    """Return rows of messages: each turn but the last calls the tool."""
    rng = random.Random(seed)

    def words(n: int) -> str:
        return " ".join(rng.choices(WORDS, k=n))

    rows = []
    for number in range(count):
        messages: list[Row] = [
            {"role": "system", "content": "Work in the repository."},
            {"role": "user", "content": f"Task {number}: {words(30)}"},
        ]
        for _ in range(turns):
            call = {"type": "function", "function": {"name": "bash", "arguments": {"command": f"ls {words(3)}"}}}
            messages += [
                {"role": "assistant", "content": f"I look at {words(8)}.", "tool_calls": [call]},
                {"role": "tool", "content": words(40)},
            ]
        messages.append({"role": "assistant", "content": f"Done: {words(12)}."})
        rows.append({"messages": messages, "tools": [TOOL]})
    return rows


def as_ids(row: Row, chat: ChatFormat) -> Row:
    """Return a row as TRL's prepared data: ids of the template, and labels of the assistant's turns with their ends."""
    text: Any = chat.tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)
    ids = chat.tokenizer(text, add_special_tokens=False)["input_ids"]
    header = chat.tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    labels, at = [IGNORE_INDEX] * len(ids), 0
    while at < len(ids):
        if ids[at : at + len(header)] == header:
            at += len(header)
            end = ids.index(chat.end_id, at) + 1
            labels[at:end] = ids[at:end]
            at = end
        at += 1
    return {"input_ids": ids, "labels": labels}


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write JSON lines, or parquet by the name."""
    write = write_parquet if path.suffix == ".parquet" else write_lines
    return write(path, [dict(row) for row in rows])


def verl_rows(rows: Sequence[Row]) -> list[Row]:
    """Return rows as verl's multi-turn parquet has them: schemas as JSON text, and a data source."""
    return [row | {"tools": json.dumps(row["tools"]), "data_source": "harbour"} for row in rows]


def first_answer(row: Row) -> Row:
    return next(message for message in row["messages"] if message["role"] == "assistant")


def _unopened(row: Row) -> None:
    first_answer(row)["content"] = "I think of tides.\n</think>\nI look."


def _other_names(row: Row) -> None:
    for message in row["messages"]:
        for call in message.get("tool_calls", ()):
            call["function"]["name"] = "shell"


def _no_results(row: Row) -> None:
    row["messages"] = [message for message in row["messages"] if message["role"] != "tool"]


def _flat(row: Row) -> None:
    row["tools"] = [TOOL["function"]]


MESSAGE_FAULTS: Mapping[str, Callable[[Row], object]] = {
    "think": _unopened,
    "control": lambda row: row["messages"][1].update(content="Print <|im_end|> now."),
    "no_tools": lambda row: row.pop("tools"),
    "not_offered": _other_names,
    "unanswered": _no_results,
    "no_answer": lambda row: row["messages"].append({"role": "user", "content": "And now?"}),
    "empty_turn": lambda row: row["messages"][-1].update(content=""),
    "schemas": _flat,
    "syntax": lambda row: first_answer(row).update(
        content="<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>",
        tool_calls=[],
    ),
    "syntax of prose": lambda row: row["messages"][-1].update(content="<tool_call>1. Look.<tool_call>Done."),
    "secret": lambda row: row["messages"][-2].update(content="AKIA" + "ABCDEFGHIJKLMNOP"),
    "too_long": lambda row: row["messages"][1].update(content="tide " * 50_000),
}
"""Kind -> a change of a row of messages that has this fault."""


def _labels(row: Row) -> list[int]:
    return [i for i, label in enumerate(row["labels"]) if label != IGNORE_INDEX]


def _drop(row: Row, at: Sequence[int]) -> None:
    for name in ("input_ids", "labels"):
        row[name] = [value for i, value in enumerate(row[name]) if i not in at]


def _mask(row: Row, at: Sequence[int]) -> None:
    for i in at:
        row["labels"][i] = IGNORE_INDEX


def id_faults(chat: ChatFormat) -> Mapping[str, Callable[[Row], object]]:
    """Return kind -> a change of a row of ids and labels that has this fault."""

    def ends(row: Row) -> list[int]:
        return [i for i in _labels(row) if row["input_ids"][i] == chat.end_id]

    def insert(row: Row, at: int, token: int, label: int) -> None:
        row["input_ids"].insert(at, token)
        row["labels"].insert(at, label)

    return {
        "all_masked": lambda row: _mask(row, _labels(row)),
        "partly_masked": lambda row: _mask(row, _labels(row)[:5]),
        "no_end": lambda row: _mask(row, ends(row)),
        "prompt_trained": lambda row: row.update(labels=list(row["input_ids"])),
        "bad_ids": lambda row: row.update(labels=[*row["labels"][1:], IGNORE_INDEX]),
        "foreign_ids": lambda row: row.update(input_ids=(ids := list(range(500, 600))), labels=list(ids)),
        "structure": lambda row: insert(row, _labels(row)[3], chat.end_id, chat.end_id),
        "differs": lambda row: _drop(row, [row["input_ids"].index(chat.end_id) + 1]),
        "think": lambda row: insert(row, _labels(row)[2], chat.think_close_id or 0, chat.think_close_id or 0),
        "no_end cut": lambda row: _drop(row, range(ends(row)[-1], len(row["input_ids"]))),
    }
