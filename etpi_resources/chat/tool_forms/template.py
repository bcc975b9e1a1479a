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
from etpi_resources.chat.tool_forms import FORMS, Call, ToolForm, message_calls

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
_TAGS = re.compile(r"</?think>")
_EMPTY_THINK = re.compile(r"\s*<think>\s*</think>\s*")
_SHOWN = 400
"""Number of rendered characters that an error shows."""


Prose = Literal["kept", "dropped", "moved", "refused"]


class UnknownToolForm(ValueError):
    """No registered form parses the template's calls; the message shows the rendered text and names the forms."""


@dataclass(frozen=True)
class TemplateForm:
    """How one template writes assistant turns.

    Attributes:
        form: the form of its calls; None if it writes no calls.
        probe_text: its rendering of the probe call.
        as_text: whether it accepts arguments only as JSON text (DeepSeek V3).
        end: its text after an assistant message.
        name: the template's name in errors.
        call_end: the rendered probe call if it has an end of its own instead of `end` (gpt-oss: `<|call|>`).
        thinking: the key of a message that holds its thoughts, if the template writes them in a form of its own.
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
        spoken = apply([_USER, {"role": "assistant", "content": _PROSE}], None, False)
        end = spoken[spoken.rindex(_PROSE) + len(_PROSE) :]
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
                        one_text=_refuses_both(apply, message, thinking["thinking"]),
                        **thinking,
                    )  # fmt: skip
            raise UnknownToolForm(
                f"chat template {name!r} writes a call as {text[:_SHOWN]!r}, which none of the known forms parses: "
                f"tried {', '.join(FORMS)}. Add a form to etpi_resources/chat/tool_forms, or use another template"
            )
        raise UnknownToolForm(f"chat template {name!r} cannot render a tool call: {type(failed).__name__}: {failed}")

    def message(self, content: str, calls: Sequence[Call]) -> dict[str, Any]:
        """Return an assistant message as the template takes it.

        Its thoughts are under their own key, if the template has one. Prose beside calls is left out where the template
        does not write it before them, and becomes part of the thoughts where only one of the two is allowed.
        """
        thought, prose = _after_thought(content) if self.thinking else ("", content)
        thought = _TAGS.sub("", thought).strip()
        if calls and thought and self.one_text:
            thought, prose = "\n\n".join(filter(None, (thought, prose))), ""
        if calls and self.prose != "kept":
            prose = ""
        message: dict[str, Any] = {"role": "assistant", "content": prose}
        if self.thinking and thought:
            message[self.thinking] = thought
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
        if self.form is None and calls:
            raise UnknownToolForm(
                f"chat template {self.name!r} writes no tool call: it renders a probe call as "
                f"{self.probe_text[:_SHOWN]!r}. Structured calls need a template that writes tool calls"
            )
        thought, prose = ("", content) if self.thinking else _after_thought(content)
        body, _ = _body(apply, self.message(prose, calls), None if tools is None else list(tools), self.end)
        return thought + body

    def answer(self, text: str) -> str:
        """Return the text of an answer without what the template writes before it, thoughts included."""
        for mark in (self.opening, self.thought_end):
            if mark.strip() and mark in text:
                return text.rpartition(mark)[2]
        return text


def _thinking(apply: Apply, end: str) -> dict[str, Any]:
    """Return `thinking`, `opening` and `thought_end`.

    `thinking` is the key under which the template writes the thoughts of the last message; None for think tags in text.
    """
    spoken, _ = _body(apply, {"role": "assistant", "content": _PROSE}, None, end)
    opening = spoken.partition(_PROSE)[0]
    for key in _THINKING_KEYS:
        try:
            text = apply([_USER, {"role": "assistant", "content": _PROSE, key: _THOUGHT}], None, False)
        except Exception:  # templates raise various errors for keys that they check
            continue
        if _THOUGHT in text and f"<think>\n{_THOUGHT}" not in text:
            between = text.partition(_THOUGHT)[2].partition(_PROSE)[0]
            return {"thinking": key, "opening": opening, "thought_end": between}
        if _THOUGHT in text:
            break
    return {"thinking": None, "opening": opening, "thought_end": ""}


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
    start = _shared_length(head, text)
    # The generation prompt may open a think block after the header; that block is not part of the header.
    thinking = head.rfind("<think>")
    if 0 <= thinking < start:
        start = thinking
    body = text[start:]
    if added := _EMPTY_THINK.match(body):
        body = body[added.end() :]
    return body.removesuffix(end), body.endswith(end)


def _shared_length(left: str, right: str) -> int:
    """Return the length of the longest common prefix."""
    same = min(len(left), len(right))
    return next((at for at in range(same) if left[at] != right[at]), same)


def _after_thought(content: str) -> tuple[str, str]:
    """Return the content's think block with the white space after it, and the rest."""
    close = content.find("</think>")
    if close < 0:
        return "", content
    at = close + len("</think>")
    rest = content[at:].lstrip()
    return content[: len(content) - len(rest)] or "", rest
