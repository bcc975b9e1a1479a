"""Rows of any other form, whose columns `options.map` names: `messages = "conv.turns"`, `role = "from"`, and so on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etpi_assets.importers import messages
from etpi_assets.importers.conversation import Options
from etpi_assets.importers.format import PLAIN, FormatDoc, Row, row_format
from etpi_assets.importers.source import Unreadable, as_mapping
from etpi_assets.trajectories.records import RolloutRecord

_OF_ROW = {
    "messages": "messages",
    "system": "system",
    "tools": "tools",
    "task": "instance_id",
    "repo": "repo",
    "model": "teacher",
    "reward": "reward",
}
_OF_MESSAGE = {
    "role": "role",
    "text": "content",
    "reasoning": "reasoning_content",
    "calls": "tool_calls",
    "answers": "tool_call_id",
    "time": "timestamp",
    "trained": "train",
}
_ROLES = ("user", "assistant", "tool")
_WITHOUT_ROLES = ("prompt", "answer")
KEYS = (*_OF_ROW, *_OF_MESSAGE, *_ROLES, *_WITHOUT_ROLES)
"""Keys of a map: paths in a row and in a message, the file's names of roles, paths of a prompt and its answer."""


def check_map(columns: Mapping[str, str]) -> None:
    """Raise ValueError if the map names neither messages nor a prompt and an answer."""
    if "messages" not in columns and not set(_WITHOUT_ROLES) <= set(columns):
        raise ValueError("map: it names neither `messages`, nor `prompt` and `answer`")


def record(row: Row, where: str, options: Options) -> RolloutRecord:
    """Read a row. Raises Unreadable: `needs_map`, `unknown_form`, or as the format `messages`."""
    columns = options.map
    if columns is None:
        raise Unreadable("needs_map", f'{where}: name its columns: options.map = {{messages = "PATH", ...}}')
    mapped = {_OF_ROW[key]: _value(row, path, where) for key, path in columns.items() if key in _OF_ROW}
    if "messages" in columns:
        items = messages.listed(mapped["messages"], f"{where}, {columns['messages']}")
        mapped["messages"] = [
            _message(item, columns, f"{where}, {columns['messages']}[{i}]") for i, item in enumerate(items)
        ]
    else:
        texts = [(role, _value(row, columns[key], where)) for role, key in zip(_ROLES, _WITHOUT_ROLES, strict=False)]
        mapped["messages"] = [{"role": role, "content": text} for role, text in texts]
    return messages.record({**row, **mapped}, where, options)


def _message(item: Any, columns: Mapping[str, str], where: str) -> dict[str, Any]:
    message = dict(as_mapping(item, where))
    for key, name in _OF_MESSAGE.items():
        if key in columns:
            value = _value(message, columns[key], where) if key in ("role", "text") else _at(message, columns[key])
            message[name] = value
    named = {columns[role]: role for role in _ROLES if role in columns}
    if isinstance(message.get("role"), str | int):
        message["role"] = named.get(str(message["role"]), message["role"])
    return message


_MISSING = object()


def _value(value: Any, path: str, where: str) -> Any:
    """Return the value at a path. Raises Unreadable (`unknown_form`) if there is none."""
    value_there = _at(value, path, _MISSING)
    if value_there is _MISSING:
        keys = ", ".join(map(str, list(value)[:12]))
        raise Unreadable("unknown_form", f"{where} has nothing at {path!r}, which the map names; it has {keys}")
    return value_there


def _at(value: Any, path: str, missing: Any = None) -> Any:
    """Return the value at a path of keys and indices: `a.b`, `a[0].b` or `$.a`; a key may have dots itself."""
    if isinstance(value, Mapping) and path in value:
        return value[path]
    for key in path.removeprefix("$.").replace("[", ".").replace("]", "").split("."):
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.lstrip("-").isdecimal() and -len(value) <= int(key) < len(value):
            value = value[int(key)]
        else:
            return missing
    return value


FORMAT = row_format(
    "mapped",
    FormatDoc(
        title='Rows of any other form: `options.map` names their columns, as in `map = {messages = "conv.turns", '
        'role = "from", text = "value", reward = "score"}`; `etpi init --map messages=conv.turns,...` writes it',
        keeps="as `messages`; paths are keys with dots and indices. Of a row: `messages`, or `prompt` and `answer`, "
        "`system`, `tools`, `task`, `repo`, `model`, `reward`; of a message: `role`, `text`, `reasoning`, `calls`, "
        "`answers` (the id of the call that a result answers), `time`, `trained`; `user`, `assistant` and `tool` are "
        "the file's names of these roles. Columns with usual names need no key. Alpaca's rows: `prompt=instruction,"
        "answer=output`",
        loses="other columns, so Alpaca's `input`",
    ),
    claims=lambda row: False,
    record=record,
    rank=PLAIN,
)
