"""A tool call as plain values, and the JSON helpers that the forms share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

NO_CALL = "no command found"
UNCLOSED_CALL = "the call is not closed"
BAD_JSON = "the call is not valid JSON"

_DECODER = json.JSONDecoder(strict=False)
"""Not strict: models write raw newlines inside JSON strings."""


class Call(NamedTuple):
    """One call: the tool's name and its arguments by name."""

    name: str
    arguments: Mapping[str, Any]


Read = Call | str
"""A call, or the reason why its text is not one."""


@dataclass(frozen=True)
class ToolForm:
    """One syntax of tool calls.

    Attributes:
        name: its name in errors and checks.
        render: the calls of one turn as text, without the turn's prose and its end.
        parse: the calls of a turn's text after its think block, in order; empty where there is none. Never raises;
            linear in the text.
        lark: tool names -> the grammar of one turn's call, as llguidance reads it.
        typed: whether argument values keep their JSON types; otherwise they are read back as text.
        mark: a text that occurs in every call of this form and in no prose, None where there is none.
    """

    name: str
    render: Callable[[Sequence[Call]], str]
    parse: Callable[[str], list[Read]]
    lark: Callable[[Sequence[str]], str]
    typed: bool = True
    mark: str | None = None

    def same(self, left: Sequence[Read], right: Sequence[Read]) -> bool:
        """Return whether both are the same calls; a form without types compares values as text."""
        return [self._plain(call) for call in left] == [self._plain(call) for call in right]

    def _plain(self, call: Read) -> Any:
        if isinstance(call, str) or self.typed:
            return call
        return call.name, {key: value_text(value) for key, value in call.arguments.items()}


def structured(raw: Any) -> Read:
    """Read a call of a chat API: `{"function": {"name", "arguments"}}` or `{"name", "arguments" | "input"}`.

    The arguments are an object or JSON text; no arguments are an empty object.
    """
    function = raw.get("function", raw) if isinstance(raw, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return NO_CALL
    arguments = function.get("arguments", function.get("input"))
    if isinstance(arguments, str):
        arguments, _ = json_object(arguments, len(arguments) - len(arguments.lstrip()))
    elif arguments is None:
        arguments = {}
    return Call(function["name"], arguments) if isinstance(arguments, Mapping) else BAD_JSON


def message_calls(calls: Sequence[Call], *, as_text: bool = False) -> list[dict[str, Any]]:
    """Return calls as a chat template reads them in `message["tool_calls"]`; `as_text`: the arguments as JSON text."""
    return [
        {
            "id": f"call{number:05d}",
            "type": "function",
            "function": {"name": call.name, "arguments": dumps(call.arguments) if as_text else dict(call.arguments)},
        }
        for number, call in enumerate(calls)
    ]


def json_object(text: str, start: int) -> tuple[dict[str, Any] | None, int]:
    """Return (the JSON object at `start`, its end), or (None, `start`) if there is none."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, start
    return (value, end) if isinstance(value, dict) else (None, start)


def named_object(value: Any, key: str = "arguments") -> Read:
    """Return the call of `{"name": ..., key: {...}}`; the arguments may be JSON text."""
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return BAD_JSON
    arguments = value.get(key)
    if isinstance(arguments, str):
        arguments, _ = json_object(arguments, 0)
    return Call(value["name"], arguments) if isinstance(arguments, Mapping) else BAD_JSON


def dumps(value: Any) -> str:
    """Return JSON as chat templates write it: `tojson` of transformers keeps the order of keys and every character."""
    return json.dumps(value, ensure_ascii=False)


def value_text(value: Any) -> str:
    """Return an argument as text: a string unchanged, anything else as JSON."""
    return value if isinstance(value, str) else dumps(value)


def skip_space(text: str, at: int) -> int:
    """Return the next position without white space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def lark_names(names: Sequence[str]) -> str:
    """Return tool names as the alternatives of a rule."""
    return " | ".join(quoted(name) for name in names)


def quoted(text: str) -> str:
    """Return a text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)
