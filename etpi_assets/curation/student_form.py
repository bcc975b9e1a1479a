"""A captured turn as the message that the student's chat template renders.

Belongs here: turning structured or flattened calls (`[tool_use NAME] {…}`, `[tool_result] …`) into the template's own
form. What a model itself wrote into its text, a fenced block or a `<tool_call>`, stays as it is. Does not belong here:
ids, or the syntax of a form (`etpi_resources.chat.tool_forms`).

Under a template that writes tool calls, a turn's calls stay structured and the template writes them. Under etpi's own
templates, which write none, they become Qwen's XML inside the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from etpi_resources.chat.format import ChatFormat
from etpi_resources.chat.tool_forms import Call, message_calls, structured
from etpi_resources.chat.tool_forms.tagged import hermes_call, xml_call

_FLATTENED = re.compile(r"^\[tool_use ([^\]\n]{1,200})\] (?=\{)", re.MULTILINE)
_RESULT = re.compile(r"\A\[tool_result\] ?")
_SHELLS = frozenset({"bash", "shell", "sh", "terminal", "execute_bash", "run_bash", "run_command", "execute_command"})
_CLOSING = ("</parameter>", "</function>", "</tool_call>")
_DECODER = json.JSONDecoder(strict=False)


@dataclass(frozen=True)
class StudentForm:
    """How one student reads and writes assistant turns.

    Attributes:
        chat: its tokenizer and template.
        tools: the schemas that its prompts offer, None where they offer none.
        template_kwargs: what its template gets besides, as in serving.
    """

    chat: ChatFormat
    tools: Sequence[Any] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def message(self, content: str, tool_calls: Sequence[Any] | None = None) -> dict[str, Any]:
        """The assistant message that the template is given: `content`, and `tool_calls` where it has any.

        Raises:
            UnknownToolForm: the template writes calls in a form that nothing here reads.
        """
        if self.chat.calls_in_content:
            return {"role": "assistant", "content": turn_text(content, tool_calls)}
        if not tool_calls and not _FLATTENED.search(content):
            return {"role": "assistant", "content": content}
        content, calls = _split_flattened(content)
        for raw in tool_calls or ():
            call = structured(raw)
            if isinstance(call, str):
                content = "\n".join(filter(None, (content, _unreadable(raw))))
            else:
                calls.append(call)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            named = [Call(self._name(call.name), call.arguments) for call in calls]
            message["tool_calls"] = message_calls(named, as_text=self.chat.template_form.as_text)
        return message

    def text(self, message: Mapping[str, Any]) -> str:
        """The text that the student is to write for a message of `message`, without the end of the turn.

        Raises:
            UnknownToolForm: the message has calls, and the template writes none.
        """
        calls = calls_of(message)
        if not calls:
            return message["content"]
        return self.chat.turn_text(message["content"], calls, tools=self.tools, **self.template_kwargs)

    def fault(self, message: Mapping[str, Any], text: str) -> str | None:
        """Why the parser of the template's form does not read the message's calls back from its text; None where it
        does. A form without escapes cannot carry a text that holds its own closing tag."""
        calls, form = calls_of(message), self.chat.tool_form
        if not calls or form is None:
            return None
        read = form.parse(text[max(0, text.find("</think>")) :])
        if form.same(read, calls):
            return None
        wrong = next((call for call in read if isinstance(call, str)), "other calls are read")
        return f"{form.name} does not read its {len(calls)} call(s) back: {wrong}"

    def _name(self, name: str) -> str:
        """The tool's name as the prompt offers it; a shell tool by another name is `bash` where that is offered."""
        offered = {tool_name(tool) for tool in self.tools or ()}
        return "bash" if name not in offered and name.lower() in _SHELLS and "bash" in offered else name


def calls_of(message: Mapping[str, Any]) -> list[Call]:
    """The calls of a message of `StudentForm.message`."""
    read = [structured(raw) for raw in message.get("tool_calls") or ()]
    return [call for call in read if isinstance(call, Call)]


def tool_name(tool: Any) -> str | None:
    """The name in a tool's schema: OpenAI's `{"function": {"name"}}`, or flat."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


def turn_text(content: str, tool_calls: Sequence[Any] | None = None) -> str:
    """The text of an assistant turn under etpi's own templates: its content, flattened calls rewritten in place, then
    its structured calls, a line break between them. The end-of-turn token is not part of it."""
    parts = [_rewrite_flattened(content, format_call)] if content else []
    for raw in tool_calls or ():
        call = structured(raw)
        parts.append(_unreadable(raw) if isinstance(call, str) else format_call(*call))
    return "\n".join(parts)


def observation_text(content: str) -> str:
    """An observation's text without the mark that flattening put before it."""
    return _RESULT.sub("", content)


def format_call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as a student under etpi's own templates writes it; `read_actions` reads it back. Shell tools go by one
    name, `bash`. Where a value holds a closing tag of the form, the call is written as JSON instead."""
    call = Call("bash" if name.lower() in _SHELLS else name, arguments)
    plain = "".join(json.dumps(value, ensure_ascii=False) for value in arguments.values())
    return hermes_call(call) if any(tag in plain for tag in _CLOSING) else xml_call(call)


def _split_flattened(content: str) -> tuple[str, list[Call]]:
    """The content without the flattened calls it ends in, and those calls. One with text after it stays in the text:
    a template writes calls behind a turn's text alone."""
    pieces: list[tuple[int, int, Call]] = []
    _rewrite_flattened(content, lambda name, arguments: "", pieces)
    calls: list[Call] = []
    end = len(content)
    for start, stop, call in reversed(pieces):
        if content[stop:end].strip():
            break
        calls.insert(0, call)
        end = start
    return (content[:end].rstrip() if calls else content), calls


def _rewrite_flattened(
    content: str, write: Callable[[str, Mapping[str, Any]], str], pieces: list[tuple[int, int, Call]] | None = None
) -> str:
    """`[tool_use NAME] {…}` at the start of a line becomes a call; one whose JSON does not parse stays text. `pieces`
    gets (start, end, call) of each."""
    parts: list[str] = []
    at = 0
    for match in _FLATTENED.finditer(content):
        if match.start() < at:
            continue
        try:
            arguments, end = _DECODER.raw_decode(content, match.end())
        except (ValueError, RecursionError):
            continue
        parts += [content[at : match.start()], write(match[1], arguments)]
        if pieces is not None:
            pieces.append((match.start(), end, Call(match[1], arguments)))
        at = end
    return "".join(parts) + content[at:]


def _unreadable(raw: Any) -> str:
    """A call that nothing can read, in the text as it was captured: reading it gives the same error."""
    return f"<tool_call>\n{json.dumps(raw, ensure_ascii=False)}\n</tool_call>"
