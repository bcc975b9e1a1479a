"""Convert a captured turn to the message that the student's chat template renders.

Structured and flattened calls (`[tool_use NAME] {…}`, `[tool_result] …`) get the template's own form. Text that the
model itself wrote, such as a fenced block or a `<tool_call>`, stays unchanged.

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
from etpi_resources.chat.tool_forms import Call, message_calls, parse_structured
from etpi_resources.chat.tool_forms.tagged import hermes_call, xml_call

_FLATTENED = re.compile(r"^\[tool_use ([^\]\n]{1,200})\] (?=\{)", re.MULTILINE)
_RESULT = re.compile(r"\A\[tool_result\] ?")
_SHELLS = frozenset({"bash", "shell", "sh", "terminal", "execute_bash", "run_bash", "run_command", "execute_command"})
_CLOSING = ("</parameter>", "</function>", "</tool_call>")
_DECODER = json.JSONDecoder(strict=False)


@dataclass(frozen=True)
class StudentForm:
    """The form in which one student reads and writes assistant turns.

    Attributes:
        chat: its tokenizer and template.
        tools: the schemas that its prompts offer, None if they offer none.
        template_kwargs: further arguments of its template, as in serving.
        thoughts: whether turns keep thoughts that the template writes in a form of its own (gpt-oss, Gemma). Think tags
            in text are not affected; they are removed from the ids.
    """

    chat: ChatFormat
    tools: Sequence[Any] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    thoughts: bool = True

    def message(self, content: str, tool_calls: Sequence[Any] | None = None) -> dict[str, Any]:
        """Return the assistant message for the template: `content`, and `tool_calls` if it has any.

        Raises:
            UnknownToolForm: no known form matches the calls that the template writes.
        """
        if self.chat.calls_in_content:
            return {"role": "assistant", "content": turn_text(content, tool_calls)}
        if not tool_calls and not _FLATTENED.search(content):
            return self._message(content, [])
        content, calls = _split_flattened(content)
        for raw in tool_calls or ():
            call = parse_structured(raw)
            if isinstance(call, str):
                content = "\n".join(filter(None, (content, _unreadable(raw))))
            else:
                calls.append(call)
        return self._message(content, [Call(self._name(call.name), call.arguments) for call in calls])

    def text(self, message: Mapping[str, Any]) -> str:
        """Return the text that the student writes for a message from `message`, without the end-of-turn token.

        Raises:
            UnknownToolForm: the message has calls, and the template writes none.
        """
        calls, content = calls_of(message), self._content(message)
        if not calls and self.chat.chatml:
            return content
        return self.chat.turn_text(content, calls, tools=self.tools, **self.template_kwargs)

    def output_ids(self, messages: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each message's text; the template alone writes control tokens.

        Args:
            texts: `text` of each message.
        """
        if self.chat.chatml:  # its calls contain no control tokens
            return self.chat.encode_all(texts)
        return [
            self.chat.turn_ids(self._content(m), calls_of(m), tools=self.tools, **self.template_kwargs)
            for m in messages
        ]

    def fault(self, message: Mapping[str, Any], text: str) -> str | None:
        """Return why the form's parser does not read the message's calls back from its text, None if it does.

        A form without escapes cannot carry a value that contains the form's own closing tag.
        """
        calls = calls_of(message)
        form = self.chat.tool_form if calls else None
        if form is None:
            return None
        parsed = form.parse(text[max(0, text.find("</think>")) :])
        if form.same(parsed, calls):
            return None
        wrong = next((call for call in parsed if isinstance(call, str)), "other calls are read")
        return f"{form.name} does not read its {len(calls)} call(s) back: {wrong}"

    def loses_prose(self, content: str, message: Mapping[str, Any]) -> bool:
        """Return whether the template writes a message's calls without the prose in the captured content."""
        if self.chat.chatml or not message.get("tool_calls") or self.chat.template_form.prose == "kept":
            return False
        prose, _ = _split_flattened(content)
        return bool(prose.rpartition("</think>")[2].strip())

    def _message(self, content: str, calls: Sequence[Call]) -> dict[str, Any]:
        """Return the message for the template, with its thoughts where the template reads them."""
        if not self.chat.chatml:
            form = self.chat.template_form
            message = form.message(content, calls)
            if form.thinking and not self.thoughts:
                message.pop(form.thinking, None)
            return message
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = message_calls(calls, as_text=self.chat.template_form.as_text)
        return message

    def _content(self, message: Mapping[str, Any]) -> str:
        """Return the content of a message from `message`, with its thoughts as a think block again."""
        key = None if self.chat.chatml else self.chat.template_form.thinking
        thought = message.get(key) if key else None
        return f"<think>\n{thought}\n</think>\n\n{message['content']}" if thought else message["content"]

    def _name(self, name: str) -> str:
        """Return the tool's name as the prompt offers it: any shell tool is `bash` if the prompt offers `bash`."""
        offered = {tool_name(tool) for tool in self.tools or ()}
        return "bash" if name not in offered and name.lower() in _SHELLS and "bash" in offered else name


def calls_of(message: Mapping[str, Any]) -> list[Call]:
    """Return the calls of a message from `StudentForm.message`."""
    parsed = [parse_structured(raw) for raw in message.get("tool_calls") or ()]
    return [call for call in parsed if isinstance(call, Call)]


def tool_name(tool: Any) -> str | None:
    """Return the name in a tool's schema: OpenAI's `{"function": {"name"}}`, or flat."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


def turn_text(content: str, tool_calls: Sequence[Any] | None = None) -> str:
    """Return the text of an assistant turn under etpi's own templates, without the end-of-turn token.

    It is the content with flattened calls rewritten in place, then the structured calls, separated by newlines.
    """
    parts = [_rewrite_flattened(content, format_call)] if content else []
    for raw in tool_calls or ():
        call = parse_structured(raw)
        parts.append(_unreadable(raw) if isinstance(call, str) else format_call(*call))
    return "\n".join(parts)


def observation_text(content: str) -> str:
    """Return an observation's text without the leading `[tool_result]` of a flattened conversation."""
    return _RESULT.sub("", content)


def format_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call as a student under etpi's own templates writes it; `read_actions` reads it back.

    Every shell tool is named `bash`. If a value contains a closing tag of the form, the call is written as JSON.
    """
    call = Call("bash" if name.lower() in _SHELLS else name, arguments)
    plain = "".join(json.dumps(value, ensure_ascii=False) for value in arguments.values())
    return hermes_call(call) if any(tag in plain for tag in _CLOSING) else xml_call(call)


def _split_flattened(content: str) -> tuple[str, list[Call]]:
    """Split the content into its text and the flattened calls at its end.

    A call with text after it stays in the text, because a template writes calls only after the text.
    """
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
    """Replace each `[tool_use NAME] {…}` at the start of a line by `write(name, arguments)`.

    One whose JSON does not parse stays text. (start, end, call) of each is appended to `pieces`.
    """
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
    """Return the text of a call that cannot be parsed, as captured, so that parsing the text fails in the same way."""
    return f"<tool_call>\n{json.dumps(raw, ensure_ascii=False)}\n</tool_call>"
