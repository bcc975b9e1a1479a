"""Which form a chat template writes calls in, and the text of a turn as the template writes it.

Belongs here: probing a template by rendering small conversations. Does not belong here: token ids (`chat_format`), or
any template's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etpi_resources.chat.tool_forms import FORMS, Call, ToolForm, message_calls

Apply = Callable[[list[dict[str, Any]], list[Any] | None, bool], str]
"""Messages, tools and whether the generation prompt follows -> text."""

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
_EMPTY_THINK = re.compile(r"\s*<think>\s*</think>\s*")
_SHOWN = 400


class UnknownToolForm(ValueError):
    """A template whose calls no registered form reads; says what it rendered and which forms were tried."""


@dataclass(frozen=True)
class TemplateForm:
    """How one template writes assistant turns.

    Attributes:
        form: of its calls; None where it writes no call at all.
        rendered: the text that the probe call became.
        as_text: whether it takes arguments as JSON text alone (DeepSeek V3).
        end: what it writes after an assistant message.
        name: what errors call the template.
    """

    form: ToolForm | None
    rendered: str
    as_text: bool
    end: str
    name: str

    @classmethod
    def of(cls, apply: Apply, name: str) -> TemplateForm:
        """The form of a template, found by rendering a probe call and reading it back with every registered form.

        Raises:
            UnknownToolForm: the template writes the call, and no form reads it back, or it refuses the call.
        """
        spoken = apply([_USER, {"role": "assistant", "content": _PROSE}], None, False)
        end = spoken[spoken.rindex(_PROSE) + len(_PROSE) :]
        failed: Exception | None = None
        for as_text in (False, True):
            message = {"role": "assistant", "content": "", "tool_calls": message_calls([_PROBE], as_text=as_text)}
            try:
                text = _body(apply, message, _TOOLS, end)
            except Exception as error:  # a template may refuse a form of arguments in any way
                failed = failed or error
                continue
            if _PROBE.name not in text:
                return cls(None, text, as_text, end, name)
            for form in FORMS.values():
                if form.same(form.parse(text), [_PROBE]):
                    return cls(form, text, as_text, end, name)
            raise UnknownToolForm(
                f"chat template {name!r} writes a call as {text[:_SHOWN]!r}; none of the known forms reads that "
                f"back: tried {', '.join(FORMS)}. Add a form to etpi_resources/chat/tool_forms, or another template"
            )
        raise UnknownToolForm(f"chat template {name!r} refuses a tool call: {type(failed).__name__}: {failed}")

    def turn(self, content: str, calls: Sequence[Call], tools: Sequence[Any] | None, apply: Apply) -> str:
        """An assistant turn as the template writes it, from after the header (and after an empty think block that the
        template adds) to before the end of the turn. A think block of the content stays as it is.

        Raises:
            UnknownToolForm: the template writes no calls.
        """
        if self.form is None:
            raise UnknownToolForm(
                f"chat template {self.name!r} writes no tool call: a probe became {self.rendered[:_SHOWN]!r}. "
                "Structured calls cannot be told to a student in it; take a template with tool calls"
            )
        thought, prose = _after_thought(content)
        message = {
            "role": "assistant",
            "content": prose,
            "tool_calls": message_calls(calls, as_text=self.as_text),
        }
        return thought + _body(apply, message, None if tools is None else list(tools), self.end)


def _body(apply: Apply, message: Mapping[str, Any], tools: list[Any] | None, end: str) -> str:
    """The message's text between the header and the end that the template writes."""
    head = apply([_USER], tools, True)
    text = apply([_USER, dict(message)], tools, False)
    start = _shared(head, text)
    # The generation prompt may go on after the header (an open think block); the header is what every turn has.
    thinking = head.rfind("<think>")
    if 0 <= thinking < start:
        start = thinking
    body = text[start:]
    if added := _EMPTY_THINK.match(body):
        body = body[added.end() :]
    return body.removesuffix(end)


def _shared(left: str, right: str) -> int:
    same = min(len(left), len(right))
    return next((at for at in range(same) if left[at] != right[at]), same)


def _after_thought(content: str) -> tuple[str, str]:
    """The content's think block with the white space after it, and the rest."""
    close = content.find("</think>")
    if close < 0:
        return "", content
    at = close + len("</think>")
    rest = content[at:].lstrip()
    return content[: len(content) - len(rest)] or "", rest
