"""A captured turn in the form the student writes: text, then its calls inline.

Belongs here: rewriting what a harness kept apart (structured calls) or flattened (`[tool_use NAME] {…}`,
`[tool_result] …`). What a model itself wrote into its text, a fenced block or a `<tool_call>`, stays as it is. Does not
belong here: ids.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_FLATTENED = re.compile(r"^\[tool_use ([^\]\n]{1,200})\] (?=\{)", re.MULTILINE)
_RESULT = re.compile(r"\A\[tool_result\] ?")
_SHELLS = frozenset({"bash", "shell", "sh", "terminal", "execute_bash", "run_bash", "run_command", "execute_command"})
_CLOSING = ("</parameter>", "</function>", "</tool_call>")
_DECODER = json.JSONDecoder(strict=False)


def turn_text(content: str, tool_calls: Sequence[Any] | None = None) -> str:
    """The text of an assistant turn: its content, flattened calls rewritten in place, then its structured calls, a line
    break between them. The end-of-turn token is not part of it."""
    parts = [_rewrite_flattened(content)] if content else []
    parts += [_structured(call) for call in tool_calls or ()]
    return "\n".join(parts)


def observation_text(content: str) -> str:
    """An observation's text without the mark that flattening put before it."""
    return _RESULT.sub("", content)


def format_call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as the student writes it; `read_actions` reads it back. Shell tools go by one name, `bash`; arguments that
    are no text are JSON. Where a value holds a closing tag of the form, the call is written as JSON instead."""
    name = "bash" if name.lower() in _SHELLS else name
    values = {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in arguments.items()
    }
    if any(tag in value for value in values.values() for tag in _CLOSING):
        body = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def _rewrite_flattened(content: str) -> str:
    """`[tool_use NAME] {…}` at the start of a line becomes a call; one whose JSON does not parse stays text."""
    parts: list[str] = []
    at = 0
    for match in _FLATTENED.finditer(content):
        if match.start() < at:
            continue
        try:
            arguments, end = _DECODER.raw_decode(content, match.end())
        except (ValueError, RecursionError):
            continue
        parts += [content[at : match.start()], format_call(match[1], arguments)]
        at = end
    return "".join(parts) + content[at:]


def _structured(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    arguments = function.get("arguments", function.get("input")) if isinstance(function, Mapping) else None
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments, strict=False)
    arguments = {} if arguments is None else arguments
    if isinstance(name, str) and isinstance(arguments, Mapping):
        return format_call(name, arguments)
    # No call that anything can read: it stands in the text as it was captured, and reading it gives the same error.
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
