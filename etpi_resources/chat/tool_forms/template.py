"""Determine the form of a chat template's tool calls, and render assistant turns as the template writes them.

The template renders a small conversation with a probe call; the form whose parser returns that call is the template's.
Nothing here depends on a template's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from etpi_resources.chat.markers import Apply
from etpi_resources.chat.marks import THINK, THINK_END, split_thought
from etpi_resources.chat.tool_forms import FORMS, Call, ToolForm, message_calls
from etpi_resources.errors import ExpectedError

_PROBE = Call("run_probe", {"command": 'printf "%s\\n" <a> {b}\nls', "depth": "two"})
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": _PROBE.name,
            "description": "probe",
            "parameters": {
                "type": "object",
                "properties": {
                    "command": {"type": "string", "description": "c"},
                    "depth": {"type": "string", "description": "d"},
                },
                "required": ["command"],
            },
        },
    }
]
_USER = {"role": "user", "content": "probe"}
_PROSE = "proseofprobe"
_THOUGHT = "thoughtofprobe"
_THINKING_KEYS = ("thinking", "reasoning_content", "reasoning")
_EMPTY_THINK = re.compile(rf"\s*{THINK}\s*{THINK_END}\s*")
_SHOWN = 400
"""Number of rendered characters that an error shows."""


Prose = Literal["kept", "dropped", "moved", "refused"]


class TemplateRefuses(ValueError):
    """A chat template does not take a conversation; the message is the template's own where it raised an error."""


class UnknownToolForm(ExpectedError, TemplateRefuses):
    """No registered form parses the template's calls; the message shows the rendered text and names the forms."""


@dataclass(frozen=True)
class TemplateForm:
    """The form in which one template writes assistant turns.

    Attributes:
        form: the form of its calls; None if it writes no calls.
        probe_text: its rendering of the probe call.
        as_text: whether it accepts arguments only as JSON text (DeepSeek V3).
        end: its text after an assistant message.
        name: the template's name in errors.
        call_end: the rendered probe call if it has an end of its own instead of `end` (gpt-oss: `<|call|>`).
        thinking: the key of a message that holds its thoughts, if the template writes them in a form of its own.
        think_key: the key of a message whose thoughts the template writes between think tags.
        prose: what it does with the text of a turn with calls; "moved": it writes it after the calls (Gemma 4).
        one_text: whether it refuses a turn with calls that has both thoughts and prose (gpt-oss).
        opening: what it writes before the text of an answer (gpt-oss: `<|channel|>final<|message|>`).
        thought_end: what it writes between thoughts and the text of an answer, if it has `thinking`.
    """

    form: ToolForm | None
    probe_text: str
    as_text: bool
    end: str
    name: str
    call_end: str = ""
    thinking: str | None = None
    think_key: str | None = None
    prose: Prose = "kept"
    one_text: bool = False
    opening: str = ""
    thought_end: str = ""

    @classmethod
    def probe(cls, apply: Apply, name: str) -> TemplateForm:
        """Render a probe call with the template, and return the first registered form that parses it back.

        Raises:
            UnknownToolForm: the template raises for the call, or no form parses the call that it writes.
        """
        end = _end(apply)
        failed: Exception | None = None
        for as_text in (False, True):
            message = {"role": "assistant", "content": "", "tool_calls": message_calls([_PROBE], as_text=as_text)}
            try:
                text, ended = _body(apply, message, _TOOLS, end)
            except Exception as error:  # templates raise various errors for arguments in the wrong form
                failed = failed or error
                continue
            if _PROBE.name not in text:
                return cls(None, text, as_text, end, name, **_thinking(apply, end))
            for form in FORMS.values():
                if form.same(form.parse(text), [_PROBE]):
                    thinking = _thinking(apply, end)
                    return cls(
                        form, text, as_text, end, name,
                        call_end="" if ended else text,
                        prose=_prose(apply, message, end),
                        one_text=_refuses_both(apply, message, thinking.get("thinking")),
                        **thinking,
                    )  # fmt: skip
            raise UnknownToolForm(
                f"chat template {name!r} writes a call as {text[:_SHOWN]!r}, which none of the known forms parses: "
                f"tried {', '.join(FORMS)}. Add a form to etpi_resources/chat/tool_forms, or use another template"
            )
        raise UnknownToolForm(f"chat template {name!r} cannot render a tool call: {type(failed).__name__}: {failed}")

    @classmethod
    def of_words(cls, apply: Apply, name: str) -> TemplateForm:
        """Return how the template writes turns without calls, for one whose calls are in no known form."""
        end = _end(apply)
        return cls(None, "", False, end, name, **_thinking(apply, end))

    def message(self, prose: str, calls: Sequence[Call], thought: str = "") -> dict[str, Any]:
        """Return an assistant message as the template takes it.

        Prose beside calls is left out where the template does not write it before them, and becomes part of the
        thoughts where only one of the two is allowed. Thoughts need a key; without, they are part of the prose.
        """
        key = self.thinking or self.think_key
        thought = thought.strip() if self.thinking else thought
        if calls and thought and self.one_text:
            thought, prose = "\n\n".join(filter(None, (thought, prose))), ""
        if calls and self.prose != "kept":
            prose = ""
        message: dict[str, Any] = {"role": "assistant", "content": prose}
        if key and thought:
            message[key] = thought
        elif self.think_key and (THINK in prose or THINK_END in prose):
            message[self.think_key] = ""  # so that the template takes no quoted tag for thoughts
        if calls:
            message["tool_calls"] = message_calls(calls, as_text=self.as_text)
        return message

    def turn(self, content: str, calls: Sequence[Call], tools: Sequence[Any] | None, apply: Apply) -> str:
        """Return an assistant turn as the template writes it, without the header and the end of the turn.

        An empty think block that the template adds is left out too; a think block in `content` is kept unchanged, or
        written as the template writes thoughts.

        Raises:
            UnknownToolForm: there are calls, and the template writes none.
        """
        self._require_calls(calls)
        block, prose = _after_thought(content)
        message = self.message(prose, calls, split_thought(content).inside or "") if self.thinking else None
        body, _ = _body(apply, message or self.message(prose, calls), None if tools is None else list(tools), self.end)
        return body if self.thinking else block + body

    def label(self, message: Mapping[str, Any], tools: Sequence[Any] | None, apply: Apply) -> str:
        """Return what the template writes for a message after its generation prompt, without the end of the turn.

        If the generation prompt is no part of the rendered message, the label begins after the part that they share, or
        at the think block with which the generation prompt ends.

        Raises:
            UnknownToolForm: the message has calls, and the template writes none.
        """
        self._require_calls(message.get("tool_calls") or ())
        shown = None if tools is None else list(tools)
        head, text = apply([_USER], shown, True), apply([_USER, dict(message)], shown, False)
        start = len(head) if text.startswith(head) else _start(head, text)
        return text[start:].removesuffix(self.end)

    def _require_calls(self, calls: Sequence[Any]) -> None:
        if self.form is None and calls:
            raise UnknownToolForm(
                f"chat template {self.name!r} writes no tool call: it renders a probe call as "
                f"{self.probe_text[:_SHOWN]!r}. Structured calls need a template that writes tool calls"
            )

    def answer(self, text: str) -> str:
        """Return the text of an answer without what the template writes before it, thoughts included."""
        for mark in (self.opening, self.thought_end):
            if mark.strip() and mark in text:
                return text.rpartition(mark)[2]
        return text


def _end(apply: Apply) -> str:
    """Return what the template writes after an assistant's text."""
    spoken = apply([_USER, {"role": "assistant", "content": _PROSE}], None, False)
    return spoken[spoken.rindex(_PROSE) + len(_PROSE) :]


def _thinking(apply: Apply, end: str) -> dict[str, Any]:
    """Return `thinking`, `think_key`, `opening` and `thought_end`."""
    spoken, _ = _body(apply, {"role": "assistant", "content": _PROSE}, None, end)
    opening = spoken.partition(_PROSE)[0]
    for key in _THINKING_KEYS:
        try:
            text = apply([_USER, {"role": "assistant", "content": _PROSE, key: _THOUGHT}], None, False)
        except Exception:  # templates raise various errors for keys that they check
            continue
        if _THOUGHT in text and f"{THINK}\n{_THOUGHT}" not in text:
            between = text.partition(_THOUGHT)[2].partition(_PROSE)[0]
            return {"thinking": key, "opening": opening, "thought_end": between}
        if _THOUGHT in text:
            return {"think_key": key, "opening": opening, "thought_end": ""}
    return {"opening": opening, "thought_end": ""}


def _refuses_both(apply: Apply, message: Mapping[str, Any], key: str | None) -> bool:
    """Return whether the template refuses a message with calls that has both thoughts and prose."""
    if key is None:
        return False
    try:
        apply([_USER, {**message, "content": _PROSE, key: _THOUGHT}], _TOOLS, False)
    except Exception:  # templates raise various errors for messages that they refuse
        return True
    return False


def _prose(apply: Apply, message: Mapping[str, Any], end: str) -> Prose:
    """Return what happens to text beside the calls of a message."""
    try:
        text, _ = _body(apply, {**message, "content": _PROSE}, _TOOLS, end)
    except Exception:  # templates raise various errors for content that they refuse
        return "refused"
    if _PROSE not in text:
        return "dropped"
    return "kept" if text.index(_PROSE) < text.index(_PROBE.name) else "moved"


def _body(apply: Apply, message: Mapping[str, Any], tools: list[Any] | None, end: str) -> tuple[str, bool]:
    """Return the message's text between the header and the end that the template writes, and whether it ends so."""
    head = apply([_USER], tools, True)
    text = apply([_USER, dict(message)], tools, False)
    body = text[_start(head, text) :]
    if added := _EMPTY_THINK.match(body):
        body = body[added.end() :]
    return body.removesuffix(end), body.endswith(end)


def _start(head: str, text: str) -> int:
    """Return where a message begins in its rendering, given the prompt before it.

    The generation prompt may open a think block after the header; that block is not part of the header.
    """
    start, thinking = _shared_length(head, text), head.rfind(THINK)
    return thinking if 0 <= thinking < start else start


def _shared_length(left: str, right: str) -> int:
    """Return the length of the longest common prefix."""
    same = min(len(left), len(right))
    return next((at for at in range(same) if left[at] != right[at]), same)


def _after_thought(content: str) -> tuple[str, str]:
    """Return the content's think block with the white space after it, and the rest."""
    thought = split_thought(content)
    rest = thought.rest.lstrip() if thought.inside is not None else content
    return content[: len(content) - len(rest)], rest
