"""Recorded tool calls in the normal form, and the only reader of the forms of calls that lakes hold.

Lakes hold calls as chat APIs write them, and some text has flattened calls (`[tool_use NAME] {…}`). The spellings of
other programs are read at the door, in the importers' formats.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from etpi_resources.chat.tool_forms.call import BAD_JSON, NO_CALL, Call, ParsedCall, arguments_object, json_object

FLAT_CALL = re.compile(r"\[tool_use ([^\]\n]{1,200})\]\s*(?=\{)")
"""The beginning of a flattened call."""


@dataclass(slots=True)
class ToolCall:
    """A recorded call. `arguments`: an object, or None with the recorded value in `raw` and `why` it is not read."""

    name: str
    arguments: dict[str, Any] | None = None
    id: str | None = None
    raw: Any = None
    why: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the call as lakes hold it: `{"id", "type", "function": {"name", "arguments"}}`, without nulls."""
        arguments = self.raw if self.why else self.arguments
        function = {"name": self.name, "arguments": arguments} if self.name else {"arguments": arguments}
        call = {"type": "function", "function": function}
        return {"id": self.id, **call} if self.id else call

    @property
    def parsed(self) -> ParsedCall:
        """Return the call for the forms of chat templates, or why it is none."""
        if self.arguments is None:
            return BAD_JSON if self.name else NO_CALL
        return Call(self.name, self.arguments)


def tool_call(name: str, arguments: Any, call_id: str | None = None) -> ToolCall:
    """Return a call whose arguments are an object, JSON text of one, or missing, which are those without parameters."""
    if type(arguments) is dict:
        return ToolCall(name, dict(arguments), call_id)
    if (read := arguments_object(arguments)) is None:
        return ToolCall(name, None, call_id, arguments, "its arguments are no JSON object")
    return ToolCall(name, read if type(read) is dict else dict(read), call_id)


def stored_call(value: Any) -> ToolCall:
    """Read a call of a lake: `{"function": {"name", "arguments"}}`, or flat, with `input` in older lakes."""
    function = value.get("function", value) if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    call_id = value.get("id") if isinstance(value, Mapping) else None
    call_id = call_id if isinstance(call_id, str) and call_id else None
    if function is None or not isinstance(name, str):
        return ToolCall("", None, call_id, value, "it has no name")
    return tool_call(name, function.get("arguments", function.get("input")), call_id)


def without_arguments(value: Any) -> bool:
    """Return whether a call of a lake states no arguments, not even empty ones."""
    function = value.get("function", value) if isinstance(value, Mapping) else None
    return isinstance(function, Mapping) and function.get("arguments", function.get("input")) is None


def flat_calls(text: str) -> Iterator[tuple[int, int, ToolCall]]:
    """Yield (start, end, call) of each flattened call of a text; one without readable JSON ends behind its name."""
    at = 0
    while match := FLAT_CALL.search(text, at):
        value, end = json_object(text, match.end())
        call = ToolCall(match[1], value) if value is not None else ToolCall(match[1], raw="", why=BAD_JSON)
        at = max(end, match.end())
        yield match.start(), at, call
