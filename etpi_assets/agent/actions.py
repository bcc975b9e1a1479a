"""Parse the actions of an assistant turn, and format commands as calls.

Forms: structured tool calls, `<tool_call>` with XML or JSON inside, `[tool_use …]`, and fenced blocks. The parser reads
one form per turn, the first of these that occurs. A malformed call is an error only if no other call of the turn
parses. Nothing here raises, and the time is linear in the text.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from etpi_assets.agent.bash import split_command
from etpi_assets.agent.tools import TOOLS
from etpi_assets.trajectories.calls import ToolCall, flat_calls, stored_call, without_arguments
from etpi_assets.trajectories.records import Action
from etpi_resources.chat.marks import THINK, THINK_END
from etpi_resources.chat.tool_forms import FORMS, ParsedCall, ToolForm
from etpi_resources.chat.tool_forms.call import BAD_JSON, NO_CALL, SHELLS, Call
from etpi_resources.chat.tool_forms.markdown import read_fenced
from etpi_resources.chat.tool_forms.tagged import hermes_call, read_bare_xml, read_tagged, xml_call

if TYPE_CHECKING:
    from etpi_resources.engines import Request

Form = Literal["tool_calls", "xml", "hermes", "fenced", "bracket"]

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""A command that succeeds with this as its first line of output ends the agent, also in mini-swe-agent."""

NO_ACTION = NO_CALL
UNCLOSED_THINK = "the think block is not closed"
EMPTY = "the command is empty"

_READ_ANYWAY = frozenset({"hermes", "qwen_xml", "markdown"})
"""Forms that are parsed under every chat template."""


def read_actions(
    content: str,
    tool_calls: Sequence[Any] | None = None,
    message_commands: Collection[str] = ("send_message",),
    bare_calls: bool = False,
    form: ToolForm | None = None,
) -> tuple[list[Action], str | None]:
    """Parse a turn; return its actions in order, and the reason if there are none.

    Args:
        content: the turn's text; a think block before the first call is skipped.
        tool_calls: structured calls, in the normal form or as a lake holds them; if there are any, the text is not
            parsed.
        message_commands: shell commands and tools that send messages.
        form: the form of the model's chat template, parsed before the others.
        bare_calls: `<function=NAME>…</function>` without a `<tool_call>` is a call; some harnesses accept it.

    A bash command that sends messages becomes one action per message, and one bash action for the rest with `:` in
    place of each message, so that message text never counts as bash. If there is no rest, the messages are pure. A call
    of another tool becomes a bash action `NAME {arguments}`.
    """
    form_name, calls = _calls(content, tool_calls, bare_calls, form)
    actions: list[Action] = []
    error: str | None = None
    for call in calls:
        parsed = call if isinstance(call, str) else _actions(form_name, *call, message_commands)
        if isinstance(parsed, str):
            error = error or parsed
        else:
            actions.extend(parsed)
    if actions:
        return actions, None
    return [], error or (UNCLOSED_THINK if _open_think(content) else NO_ACTION)


def format_action(command: str, form: Form = "xml") -> str | list[dict[str, Any]]:
    """Format a command as a turn's text, for "tool_calls" as the structured list; the inverse of `read_actions`."""
    if form == "tool_calls":
        return [{"type": "function", "function": {"name": "bash", "arguments": json.dumps({"command": command})}}]
    if form == "hermes":
        return hermes_call(Call("bash", {"command": command}))
    if form == "bracket":
        return f"[tool_use Bash] {json.dumps({'command': command}, ensure_ascii=False)}"
    if form == "fenced":
        return FORMS["markdown"].render([Call("bash", {"command": command})])
    return xml_call(Call("bash", {"command": command}))


_COMMAND_OF = {"bash": "command", "Bash": "command", "run_shell_command": "command", "exec_command": "cmd"}
"""Tools that run a command, by the names that harnesses give them, and the argument that is the command."""
_FURTHER = {"description": "Run a command.", "is_background": False}
"""Values of further arguments that some of them require."""


def next_turn(request: Request, commands: Sequence[str]) -> str:
    """Return the turn of a script that runs these commands, one a turn, through the shell that the request offers, and
    then submits: by a command, or in a harness with tools of its own by an answer without a call. A harness that asks
    again after the command gets such an answer too. Harnesses read calls in the form of the student's template,
    `request.privileged["form"]`."""
    tools = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in request.tools}
    shell = next((name for name in tools if name in _COMMAND_OF), "bash")
    turn = sum(message["role"] == "assistant" for message in request.messages)
    if turn > len(commands) or (turn == len(commands) and not tools.keys() <= TOOLS.keys()):
        return "Done."
    command = commands[turn] if turn < len(commands) else f"echo {SUBMIT}"
    further = {name: _FURTHER[name] for name in tools.get(shell, {}).get("required", ()) if name in _FURTHER}
    call, form = Call(shell, {_COMMAND_OF[shell]: command, **further}), request.privileged.get("form")
    return form.render([call]) if form else xml_call(call)


def after_think(content: str) -> str:
    """Return the text after the think block; all of it if no `</think>` comes before the first call."""
    close = content.find(THINK_END)
    if close < 0 or 0 <= content.find("<tool_call>") < close:
        return content
    return content[close + len(THINK_END) :]


def _open_think(content: str) -> bool:
    return content.lstrip().startswith(THINK) and THINK_END not in content


def _calls(
    content: str, tool_calls: Sequence[Any] | None, bare_calls: bool, template_form: ToolForm | None
) -> tuple[str, list[ParsedCall]]:
    if tool_calls:
        return "tool_calls", [_structured(call) for call in tool_calls]
    body = after_think(content)
    if template_form is not None and template_form.name not in _READ_ANYWAY and (calls := template_form.parse(body)):
        return template_form.name, calls
    if "<tool_call>" in body:
        tagged = list(read_tagged(body))
        return ("hermes" if any(form == "hermes" for form, _ in tagged) else "xml"), [call for _, call in tagged]
    if _open_think(content):
        return "xml", []
    if bare_calls and "<function=" in body:
        return "xml", list(read_bare_xml(body))
    if calls := [call.parsed for _, _, call in flat_calls(body)]:
        return "bracket", calls
    return "fenced", list(read_fenced(body))


def _actions(
    form: str, name: str, arguments: Mapping[str, Any], message_commands: Collection[str]
) -> list[Action] | str:
    if name in message_commands:
        message = _first(arguments, "message", "content", "text", "body")
        to = _first(arguments, "to", "recipient", "agent", "agent_id")
        if message is None:
            return EMPTY
        wait = arguments.get("wait") in (True, "true", "True", "1")
        return [Action("send_message", name, to=to, message=message, form=form, pure=True, wait=wait)]
    if name.lower() not in SHELLS:
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


def _structured(raw: Any) -> ParsedCall:
    """Parse a structured call; one without arguments is malformed."""
    call = raw if isinstance(raw, ToolCall) else stored_call(raw)
    missing = not isinstance(raw, ToolCall) and call.name and without_arguments(raw)
    return BAD_JSON if missing else call.parsed


def _first(arguments: Mapping[str, Any], *keys: str) -> str | None:
    for key in keys:
        value = arguments.get(key)
        if isinstance(value, str):
            return value
        if isinstance(value, list | tuple):
            return shlex.join(map(str, value))
    return None


_encode = json.JSONEncoder(ensure_ascii=False, default=str).encode
"""Created once: creating an encoder costs as much as encoding a call."""


def _dumps(arguments: Mapping[str, Any]) -> str:
    try:
        return _encode(arguments)
    except (ValueError, TypeError, RecursionError):
        return str(arguments)
