"""What an assistant turn does, read from whatever form its harness writes.

Belongs here: the forms a command travels in (structured tool calls, `<tool_call>` with XML or JSON inside,
`[tool_use …]` and fenced blocks), reading and writing them. Does not belong here: what a bash command sends
(`commands`), or running anything.

One form is read a turn, the first of those above that occurs. A call that ends unread is an error only where no other
call of the turn could be read. Nothing here raises, and the time is linear in the text, whatever a model writes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

from etpi_assets.rollouts.commands import split_command
from etpi_assets.rollouts.records import Action

Form = Literal["tool_calls", "xml", "hermes", "fenced", "bracket"]

NO_ACTION = "no command found"
UNCLOSED_THINK = "the think block is not closed"
UNCLOSED_CALL = "the call is not closed"
BAD_JSON = "the call is not valid JSON"
EMPTY = "the command is empty"

_SHELLS = frozenset({"bash", "shell", "sh", "terminal", "execute_bash", "run_bash", "run_command", "execute_command"})
_FENCES = frozenset({"```bash", "```sh", "```shell", "```mswea_bash_command"})
_DECODER = json.JSONDecoder(strict=False)
"""Not strict: models write raw newlines inside JSON strings."""

_Call = tuple[str, Mapping[str, Any]] | str
"""A call's name and arguments, or why it could not be read."""


def read_actions(
    content: str,
    tool_calls: Sequence[Any] | None = None,
    message_commands: Collection[str] = ("send_message",),
    bare_calls: bool = False,
) -> tuple[list[Action], str | None]:
    """The turn's actions in order, and why there is none (None where there is one).

    Args:
        content: the turn's text; a think block before the first call is not read.
        tool_calls: structured calls ({"function": {"name", "arguments"}} or {"name", "arguments" | "input"}, arguments
            as a mapping or as JSON text), read instead of the text where there are any.
        message_commands: shell commands and tools that send messages.
        bare_calls: whether `<function=NAME>…</function>` is a call where no `<tool_call>` is; some harnesses take it.

    A bash command that sends messages becomes one action a message, and one bash action for the rest where there is
    any: its `command` has `:` in each message's place, so that message text never counts as bash. The messages are pure
    where nothing is left. A call of another tool becomes a bash action that reads `NAME {arguments}`.
    """
    form, calls = _calls(content, tool_calls, bare_calls)
    actions: list[Action] = []
    error: str | None = None
    for call in calls:
        found = call if isinstance(call, str) else _actions(form, *call, message_commands)
        if isinstance(found, str):
            error = error or found
        else:
            actions.extend(found)
    if actions:
        return actions, None
    return [], error or (UNCLOSED_THINK if _open_think(content) else NO_ACTION)


def format_action(command: str, form: Form = "xml") -> str | list[dict[str, Any]]:
    """The command in a form, as a turn's text (for "tool_calls": the structured list). The inverse of reading it."""
    if form == "tool_calls":
        return [{"type": "function", "function": {"name": "bash", "arguments": json.dumps({"command": command})}}]
    if form == "hermes":
        body = json.dumps({"name": "bash", "arguments": {"command": command}}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"
    if form == "bracket":
        return f"[tool_use Bash] {json.dumps({'command': command}, ensure_ascii=False)}"
    if form == "fenced":
        return f"```bash\n{command}\n```"
    return f"<tool_call>\n<function=bash>\n<parameter=command>\n{command}\n</parameter>\n</function>\n</tool_call>"


def after_think(content: str) -> str:
    """The text after the think block; all of it where no `</think>` stands before the first call."""
    close = content.find("</think>")
    if close < 0 or 0 <= content.find("<tool_call>") < close:
        return content
    return content[close + len("</think>") :]


def _open_think(content: str) -> bool:
    return content.lstrip().startswith("<think>") and "</think>" not in content


def _calls(content: str, tool_calls: Sequence[Any] | None, bare_calls: bool) -> tuple[Form, list[_Call]]:
    if tool_calls:
        return "tool_calls", [_structured(call) for call in tool_calls]
    body = after_think(content)
    if "<tool_call>" in body:
        found = list(_tagged(body))
        return ("hermes" if any(form == "hermes" for form, _ in found) else "xml"), [call for _, call in found]
    if _open_think(content):
        return "xml", []
    if bare_calls and "<function=" in body:
        return "xml", list(_bare(body))
    if calls := list(_bracketed(body)):
        return "bracket", calls
    return "fenced", list(_fenced(body))


def _actions(
    form: Form, name: str, arguments: Mapping[str, Any], message_commands: Collection[str]
) -> list[Action] | str:
    if name in message_commands:
        message = _first(arguments, "message", "content", "text", "body")
        to = _first(arguments, "to", "recipient", "agent", "agent_id")
        if message is None:
            return EMPTY
        wait = arguments.get("wait") in (True, "true", "True", "1")
        return [Action("send_message", name, to=to, message=message, form=form, pure=True, wait=wait)]
    if name.lower() not in _SHELLS:
        return [Action("bash", f"{name} {_dumps(arguments)}", form=form)]
    command = _first(arguments, "command", "cmd", "script")
    if command is None or not command.strip():
        return EMPTY
    split = split_command(command, message_commands)
    if not split.sent:
        return [Action("bash", command, form=form)]
    pure = not split.rest
    messages = [
        Action("send_message", command, to=sent.to, message=sent.message, form=form, pure=pure, wait=sent.wait)
        for sent in split.sent
    ]
    if pure:
        return messages
    rest = Action("bash", split.rest, form=form)
    return [*messages, rest] if split.leads else [rest, *messages]


def _structured(call: Any) -> _Call:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return NO_ACTION
    arguments = function.get("arguments", function.get("input"))
    if isinstance(arguments, str):
        arguments, _ = _object(arguments, len(arguments) - len(arguments.lstrip()))
    return (function["name"], arguments) if isinstance(arguments, Mapping) else BAD_JSON


def _tagged(text: str) -> Iterator[tuple[Form, _Call]]:
    """Calls in `<tool_call>` tags. Each search starts where the last ended, or was bounded by the block."""
    opening, closing = "<tool_call>", "</tool_call>"
    at = text.find(opening)
    while at >= 0:
        start = at + len(opening)
        while start < len(text) and text[start].isspace():
            start += 1
        if text.startswith("{", start):
            value, end = _object(text, start)
            name, arguments = (
                (value.get("name"), value.get("arguments", value.get("parameters"))) if value else (None, None)
            )
            if isinstance(arguments, str):
                arguments, _ = _object(arguments, 0)
            yield "hermes", (name, arguments) if isinstance(name, str) and isinstance(arguments, Mapping) else BAD_JSON
            at = text.find(opening, max(end, start))
            continue
        end = text.find(closing, start)
        yield "xml", _xml(text, start, len(text) if end < 0 else end)
        at = text.find(opening, end) if end >= 0 else -1


def _bare(text: str) -> Iterator[_Call]:
    """`<function=NAME>…</function>` with nothing around it; one that no tag closes is not closed."""
    opening, closing = "<function=", "</function>"
    at = text.find(opening)
    while at >= 0:
        end = text.find(closing, at)
        yield UNCLOSED_CALL if end < 0 else _xml(text, at, end)
        at = text.find(opening, end) if end >= 0 else -1


def _xml(text: str, start: int, end: int) -> _Call:
    """`<function=NAME><parameter=P>value</parameter>…` in text[start:end]; one newline each side of a value is form."""
    name_end = text.find(">", start, end)
    if not text.startswith("<function=", start) or name_end < 0:
        return NO_ACTION if end < len(text) else UNCLOSED_CALL
    arguments: dict[str, Any] = {}
    at = text.find("<parameter=", name_end, end)
    while at >= 0:
        key_end = text.find(">", at, end)
        value_end = text.find("</parameter>", key_end, end) if key_end >= 0 else -1
        if value_end < 0:
            return UNCLOSED_CALL
        value = text[key_end + 1 : value_end]
        arguments[text[at + len("<parameter=") : key_end]] = value.removeprefix("\n").removesuffix("\n")
        at = text.find("<parameter=", value_end, end)
    if not arguments and end == len(text):
        return UNCLOSED_CALL
    return text[start + len("<function=") : name_end], arguments


def _bracketed(text: str) -> Iterator[_Call]:
    opening = "[tool_use "
    at = text.find(opening)
    while at >= 0:
        name_end = text.find("]", at, at + 200)
        start = name_end + 1
        while 0 < start < len(text) and text[start].isspace():
            start += 1
        if name_end < 0 or not text.startswith("{", start):
            at = text.find(opening, at + len(opening))
            continue
        value, end = _object(text, start)
        yield BAD_JSON if value is None else (text[at + len(opening) : name_end], value)
        at = text.find(opening, max(end, start))


def _fenced(text: str) -> Iterator[_Call]:
    block: list[str] | None = None
    for line in text.split("\n"):
        mark = line.strip()
        if block is None:
            block = [] if mark in _FENCES else None
        elif mark == "```":
            yield "bash", {"command": "\n".join(block)}
            block = None
        else:
            block.append(line)
    if block is not None:
        yield UNCLOSED_CALL


def _object(text: str, start: int) -> tuple[dict[str, Any] | None, int]:
    """The JSON object at `start` and where it ends; None where there is none (and `start` again)."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, start
    return (value, end) if isinstance(value, dict) else (None, start)


def _first(arguments: Mapping[str, Any], *keys: str) -> str | None:
    for key in keys:
        value = arguments.get(key)
        if isinstance(value, str):
            return value
        if isinstance(value, list | tuple):
            return " ".join(map(str, value))
    return None


def _dumps(arguments: Mapping[str, Any]) -> str:
    try:
        return json.dumps(arguments, ensure_ascii=False, default=str)
    except (ValueError, TypeError, RecursionError):
        return str(arguments)
