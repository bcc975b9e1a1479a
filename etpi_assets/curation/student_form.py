"""Convert a captured turn to the message that the student's chat template renders.

Structured and flattened calls (`[tool_use NAME] {…}`, `[tool_result] …`) get the template's own form. Text that the
model itself wrote, such as a fenced block or a `<tool_call>`, stays unchanged.

Under a template that writes tool calls, a turn's calls stay structured and the template writes them. Under etpi's own
templates, which write none, they become Qwen's XML inside the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from etpi_assets.trajectories.calls import flat_calls, stored_call
from etpi_resources.chat.format import ChatFormat, Label, TemplateRefuses
from etpi_resources.chat.marks import EMPTY_BLOCK, THINK, THINK_END, split_thought, think_block
from etpi_resources.chat.tool_forms import Call, parse_structured
from etpi_resources.chat.tool_forms.call import SHELLS, tool_name
from etpi_resources.chat.tool_forms.tagged import hermes_call, xml_call

_RESULT = re.compile(r"\A\[tool_result\] ?")
_CLOSING = ("</parameter>", "</function>", "</tool_call>")
_OPENED, _CLOSED = re.compile(rf"\A\s*{THINK}\n?"), re.compile(rf"\A\s*{THINK_END}[\r\n]*")
_THOUGHT = "reasoning_content"
"""Holds thoughts that a template without a key for them would drop; the template does not read it."""


@dataclass(frozen=True)
class StudentForm:
    """The form in which one student reads and writes assistant turns.

    Attributes:
        chat: its tokenizer and template.
        tools: the schemas that its prompts offer, None if they offer none.
        template_kwargs: further arguments of its template, as in serving.
        thoughts: whether turns keep their thoughts.
    """

    chat: ChatFormat
    tools: Sequence[Any] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    thoughts: bool = True

    def message(
        self, content: str, tool_calls: Sequence[Any] | None = None, reasoning: str | None = None
    ) -> dict[str, Any]:
        """Return the assistant message for the template: `content`, and `tool_calls` if it has any.

        Args:
            reasoning: the turn's thoughts, if they are recorded apart from its text.

        A call whose arguments cannot be read keeps their text, which the template writes or refuses.

        Raises:
            UnknownToolForm: no known form matches the calls that the template writes.
            TemplateRefuses: a call has no name, so that no template writes it.
        """
        thought = split_thought(content, reasoning)
        inside = thought.inside if self.thoughts else None
        block = ""
        if inside is not None and not self.thought_key:  # thoughts within the text stay as they are written
            block = think_block(inside) if reasoning else content[: len(content) - len(thought.rest)]
            inside = None
        if self.chat.calls_in_content:
            return {"role": "assistant", "content": block + turn_text(thought.rest, tool_calls)}
        if not tool_calls and next(_flattened_calls(thought.rest), None) is None:
            return self.chat.words.message(block + thought.rest, [], inside or "")
        prose, calls = _split_flattened(thought.rest)
        texts: dict[int, str] = {}  # arguments that cannot be read, by the number of their call
        for raw in tool_calls or ():
            call = parse_structured(raw)
            if isinstance(call, str):
                name, texts[len(calls)] = _unreadable(raw)
                call = Call(name, {})
            calls.append(call)
        calls = [Call(self._name(call.name), call.arguments) for call in calls]
        form = self.chat.template_form if calls else self.chat.words
        message = form.message(block + prose, calls, inside or "")
        for number, text in texts.items():
            message["tool_calls"][number]["function"]["arguments"] = text
        if block and not message["content"]:  # the template leaves out text beside calls
            message[_THOUGHT] = thought.inside
        return message

    def text(self, message: Mapping[str, Any]) -> str:
        """Return the text that the student writes for a message from `message`, without the end-of-turn token.

        Raises UnknownToolForm: the message has calls, and the template writes none.
        """
        return self.labels([message])[0].plain

    def labels(self, messages: Sequence[Mapping[str, Any]]) -> list[Label]:
        """Return the text that the student writes for each message, without the end of the turn.

        It follows the generation prompt. Thoughts that the template does not write are a block of text, and an empty
        block that it adds to a turn without thoughts is left out, unless the prompt opens it.

        Raises UnknownToolForm: a message has calls, and the template writes none.
        """
        written = [m for m in messages if not self._is_verbatim(m)]
        rendered = iter(self.chat.label_texts(written, tools=self.tools, **self.template_kwargs))
        return [Label(m["content"]) if self._is_verbatim(m) else self._with_block(m, next(rendered)) for m in messages]

    def _is_verbatim(self, message: Mapping[str, Any]) -> bool:
        """Return whether a template of the ChatML family writes a message's text as it is, and nothing else."""
        content = message["content"]
        if not self.chat.chatml or self.chat.has_control(content):
            return False
        trimmed = content == content.strip() and THINK not in content and THINK_END not in content
        return self.chat.calls_in_content or (trimmed and message.keys() == {"role", "content"} and not self.opened)

    def _with_block(self, message: Mapping[str, Any], label: Label) -> Label:
        """Return a label whose beginning continues the generation prompt.

        It has the thoughts that the template does not write, and no empty block that the prompt does not ask for.
        """
        thought, body = self._thought(message), label.text
        lost = thought is not None and label.masked(thought.strip()) not in body
        if lost:  # the template may leave the line breaks between thoughts and text (DeepSeek R1)
            body = body.lstrip("\r\n")
        if not self.opened:
            if lost:
                body = label.masked(think_block(thought or "")) + body
            return label.replaced(body if thought is not None else EMPTY_BLOCK.sub("", body, count=1))
        body = _OPENED.sub("", body, count=1)
        if not self.thoughts:
            return label.replaced(_CLOSED.sub("", body, count=1))
        if lost or (thought is None and not _CLOSED.match(body)):
            body = label.masked(f"{thought or ''}\n{THINK_END}\n\n") + body
        return label.replaced(body)

    def _thought(self, message: Mapping[str, Any]) -> str | None:
        """Return the thoughts of a message from `message`, None if it has none."""
        if not self.thoughts or self.thought_key:
            return message.get(self.thought_key or "") or None
        return message.get(_THOUGHT) or split_thought(message["content"]).inside

    @property
    def thought_key(self) -> str | None:
        """The key of a message under which the template reads thoughts; None if they are part of the text."""
        return self.chat.words.thinking or self.chat.words.think_key

    @cached_property
    def opened(self) -> bool:
        """Return whether prompts end in an open think block."""
        return _tail(self.chat, json.dumps(dict(self.template_kwargs), sort_keys=True, default=str)) == "open"

    def fault(self, message: Mapping[str, Any], text: str) -> str | None:
        """Return why the form's parser does not read the message's calls back from its text, None if it does.

        A form without escapes cannot carry a value that contains the form's own closing tag.
        """
        calls = calls_of(message)
        form = self.chat.tool_form if calls else None
        if form is None:
            return None
        parsed = form.parse(text if self._thought(message) is None else text.partition(THINK_END)[2])
        if form.same(parsed, calls):
            return None
        wrong = next((call for call in parsed if isinstance(call, str)), "other calls are read")
        return f"{form.name} does not read its {len(calls)} call(s) back: {wrong}"

    def loses_prose(self, content: str, message: Mapping[str, Any]) -> bool:
        """Return whether the template writes a message's calls without the prose in the captured content."""
        if not message.get("tool_calls") or self.chat.template_form.prose == "kept":
            return False
        prose, _ = _split_flattened(split_thought(content).rest)
        return bool(prose.strip())

    def _name(self, name: str) -> str:
        """Return the tool's name as the prompt offers it: any shell tool is `bash` if the prompt offers `bash`."""
        offered = {tool_name(tool) for tool in self.tools or ()}
        return "bash" if name not in offered and name.lower() in SHELLS and "bash" in offered else name


@lru_cache
def _tail(chat: ChatFormat, template_kwargs: str) -> str:
    """Return the form of the tail of prompts, see `ChatFormat.tail_form`."""
    return chat.tail_form(chat.prompt_ids([{"role": "user", "content": "x"}], **json.loads(template_kwargs)))


def calls_of(message: Mapping[str, Any]) -> list[Call]:
    """Return the calls of a message from `StudentForm.message`."""
    return [call for raw in message.get("tool_calls") or () if isinstance(call := parse_structured(raw), Call)]


def turn_text(content: str, tool_calls: Sequence[Any] | None = None) -> str:
    """Return the text of an assistant turn under etpi's own templates, without the end-of-turn token.

    It is the content with flattened calls rewritten in place, then the structured calls, separated by newlines.
    """
    text, at = "", 0
    for start, end, call in _flattened_calls(content):
        text += content[at:start] + format_call(*call)
        at = end
    parts = [text + content[at:]] if content else []
    for raw in tool_calls or ():
        call = parse_structured(raw)
        if isinstance(call, str):
            name, arguments = _unreadable(raw)
            parts.append(f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>')
        else:
            parts.append(format_call(*call))
    return "\n".join(parts)


def observation_text(content: str) -> str:
    """Return an observation's text without the leading `[tool_result]` of a flattened conversation."""
    return _RESULT.sub("", content)


def format_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call as a student under etpi's own templates writes it; `read_actions` reads it back.

    Every shell tool is named `bash`. If a value contains a closing tag of the form, the call is written as JSON.
    """
    call = Call("bash" if name.lower() in SHELLS else name, arguments)
    plain = "".join(json.dumps(value, ensure_ascii=False) for value in arguments.values())
    return hermes_call(call) if any(tag in plain for tag in _CLOSING) else xml_call(call)


def _split_flattened(content: str) -> tuple[str, list[Call]]:
    """Split the content into its text and the flattened calls at its end.

    A call with text after it stays in the text, because a template writes calls only after the text.
    """
    calls: list[Call] = []
    end = len(content)
    for start, stop, call in reversed([*_flattened_calls(content)]):
        if content[stop:end].strip():
            break
        calls.insert(0, call)
        end = start
    return (content[:end].rstrip() if calls else content), calls


def _flattened_calls(content: str) -> Iterator[tuple[int, int, Call]]:
    """Yield (start, end, call) of each `[tool_use NAME] {…}` at the start of a line whose JSON parses."""
    for start, end, call in flat_calls(content):
        if call.arguments is not None and content[start - 1 : start] in ("", "\n"):
            yield start, end, Call(call.name, call.arguments)


def _unreadable(raw: Any) -> tuple[str, str]:
    """Return the name of a call whose arguments cannot be read, and their text as captured.

    Raises TemplateRefuses: it has no name.
    """
    call = stored_call(raw)
    if not call.name:
        raise TemplateRefuses(f"no template writes a call without a name: {json.dumps(raw, ensure_ascii=False)[:80]}")
    return call.name, call.raw if isinstance(call.raw, str) else json.dumps(call.raw, ensure_ascii=False)
