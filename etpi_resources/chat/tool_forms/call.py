"""`Call` and `ToolForm`, and the JSON and text helpers that the forms share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

NO_CALL = "no command found"
UNCLOSED_CALL = "the call is not closed"
BAD_JSON = "the call is not valid JSON"

SHELLS = frozenset({"bash", "shell", "sh", "terminal", "execute_bash", "run_bash", "run_command", "execute_command"})
"""Names of tools that run shell commands, in lower case."""

_DECODER = json.JSONDecoder(strict=False)
"""Accepts raw newlines inside JSON strings, because models write them."""


_FIRST_PIECE, _LONGEST_TOKEN = 1024, 16
"""Characters that are decoded at first, and those of the longest token whose end a cut can hide, as in `\\u0041`."""


class Call(NamedTuple):
    """One call: the tool's name and its arguments by name."""

    name: str
    arguments: Mapping[str, Any]


ParsedCall = Call | str
"""A call, or the reason why the text is not a call."""


@dataclass(frozen=True)
class ToolForm:
    """One syntax of tool calls.

    Attributes:
        name: its name in errors and checks.
        render: calls of one turn -> their text, without the turn's prose and end token.
        parse: text of a turn after its think block -> its calls in order; empty if it has none. Never raises, and takes
            time linear in the text.
        typed: whether argument values keep their JSON types; if not, the parser returns them as text.
        marker: a string that every call of this form contains and prose does not; None if the form has no such string.
        servers: the parsers of vLLM (`--tool-call-parser`) that read the form, by the names in its
            `vllm/tool_parsers/__init__.py`; empty if it has none.
    """

    name: str
    render: Callable[[Sequence[Call]], str]
    parse: Callable[[str], list[ParsedCall]]
    typed: bool = True
    marker: str | None = None
    servers: tuple[str, ...] = ()

    def same(self, left: Sequence[ParsedCall], right: Sequence[ParsedCall]) -> bool:
        """Return whether both sides are the same calls; if the form is not typed, values are compared as text."""
        return [self._comparable(call) for call in left] == [self._comparable(call) for call in right]

    def _comparable(self, call: ParsedCall) -> Any:
        if isinstance(call, str) or self.typed:
            return call
        return call.name, {key: value_text(value) for key, value in call.arguments.items()}


def parse_structured(raw: Any) -> ParsedCall:
    """Parse a call of a chat API: `{"function": {"name", "arguments"}}` or `{"name", "arguments" | "input"}`.

    The arguments are an object or JSON text; missing arguments, blank text and `null` count as an empty object.
    """
    function = raw.get("function", raw) if isinstance(raw, (dict, Mapping)) else None
    if not isinstance(function, (dict, Mapping)) or not isinstance(function.get("name"), str):
        return NO_CALL
    arguments = arguments_object(function.get("arguments", function.get("input")))
    return BAD_JSON if arguments is None else Call(function["name"], arguments)


def arguments_object(arguments: Any) -> Mapping[str, Any] | None:
    """Return a call's arguments from an object or JSON text of one; {} for none, blank text and `null`; else None."""
    if arguments is None or (isinstance(arguments, str) and arguments[:1] != "{" and arguments.strip() in ("", "null")):
        return {}
    if isinstance(arguments, str):
        arguments = _flat_object(arguments) or json_object(arguments, len(arguments) - len(arguments.lstrip()))[0]
    return arguments if isinstance(arguments, Mapping) else None


_EXACT = frozenset({str, int, bool, type(None)})


def _flat_object(text: str) -> dict[str, Any] | None:
    """Return the object that the whole text is, where a faster parser reads its values as the standard one does."""
    try:
        value = orjson.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) and _EXACT.issuperset(map(type, value.values())) else None


def function_schema(tool: Any) -> Any:
    """Return a tool's schema as chat APIs send it: {"type": "function", "function": {name, description, parameters}}.

    Takes schemas without the wrapper too, as the APIs of responses and of Anthropic, and MCP, write them. A value
    without a name is returned unchanged.
    """
    wrapped = tool.get("function") if isinstance(tool, Mapping) else None
    flat = wrapped if isinstance(wrapped, Mapping) else tool
    if not isinstance(flat, Mapping) or not isinstance(flat.get("name"), str):
        return tool
    drops = ("type",) if flat is tool else ()
    return {"type": "function", "function": {_SCHEMA.get(k, k): v for k, v in flat.items() if k not in drops}}


_SCHEMA = {"input_schema": "parameters", "inputSchema": "parameters"}
"""Keys of a tool's parameters in other APIs."""


def tool_name(tool: Any) -> str | None:
    """Return the name in a tool's schema, with the wrapper or without; None if it has none."""
    schema = function_schema(tool)
    function = schema.get("function") if isinstance(schema, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


def message_calls(calls: Sequence[Call], *, as_text: bool = False) -> list[dict[str, Any]]:
    """Return calls as the `tool_calls` of a message; `as_text` writes their arguments as JSON text."""
    return [
        {
            "id": f"call{number:05d}",
            "type": "function",
            "function": {"name": call.name, "arguments": dumps(call.arguments) if as_text else dict(call.arguments)},
        }
        for number, call in enumerate(calls)
    ]


def json_object(text: str, start: int) -> tuple[dict[str, Any] | None, int]:
    """Return the JSON object at `start` and the position after it, or (None, `start`) if there is none.

    The text is decoded in growing pieces: an error costs the decoder a look at all that was before it.
    """
    size = _FIRST_PIECE
    while True:
        piece = text[start : start + size]
        try:
            value, end = _DECODER.raw_decode(piece)
        except json.JSONDecodeError as error:
            cut = error.pos > size - _LONGEST_TOKEN or error.msg.startswith("Unterminated string")
            if not cut or start + size >= len(text):
                return None, start
            size *= 4
        except (ValueError, RecursionError):
            return None, start
        else:
            return (value, start + end) if isinstance(value, dict) else (None, start)


def named_object(value: Any, key: str = "arguments") -> ParsedCall:
    """Return the call in `{"name": ..., key: {...}}`; the arguments may also be JSON text."""
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return BAD_JSON
    arguments = value.get(key)
    if isinstance(arguments, str):
        arguments, _ = json_object(arguments, 0)
    return Call(value["name"], arguments) if isinstance(arguments, Mapping) else BAD_JSON


def dumps(value: Any) -> str:
    """Return JSON as the `tojson` of transformers writes it: keys in their order, no escapes of non-ASCII letters."""
    return json.dumps(value, ensure_ascii=False)


def value_text(value: Any) -> str:
    """Return an argument's value as text: a string unchanged, other values as JSON."""
    return value if isinstance(value, str) else dumps(value)


def skip_space(text: str, at: int) -> int:
    """Return the first position from `at` on that is not white space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at
