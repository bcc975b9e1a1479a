"""Determine the form of a chat template's tool calls, and render assistant turns as the template writes them.

The template renders a small conversation with a probe call; the form whose parser returns that call is the template's.
Nothing here depends on a template's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etpi_resources.chat.tool_forms import FORMS, Call, ToolForm, message_calls

Apply = Callable[[list[dict[str, Any]], list[Any] | None, bool], str]
"""(messages, tools, whether to add the generation prompt) -> text."""

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
"""Number of rendered characters that an error shows."""


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
    """

    form: ToolForm | None
    probe_text: str
    as_text: bool
    end: str
    name: str

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
                text = _body(apply, message, _TOOLS, end)
            except Exception as error:  # templates raise various errors for arguments in the wrong form
                failed = failed or error
                continue
            if _PROBE.name not in text:
                return cls(None, text, as_text, end, name)
            for form in FORMS.values():
                if form.same(form.parse(text), [_PROBE]):
                    return cls(form, text, as_text, end, name)
            raise UnknownToolForm(
                f"chat template {name!r} writes a call as {text[:_SHOWN]!r}, which none of the known forms parses: "
                f"tried {', '.join(FORMS)}. Add a form to etpi_resources/chat/tool_forms, or use another template"
            )
        raise UnknownToolForm(f"chat template {name!r} cannot render a tool call: {type(failed).__name__}: {failed}")

    def turn(self, content: str, calls: Sequence[Call], tools: Sequence[Any] | None, apply: Apply) -> str:
        """Return an assistant turn as the template writes it, without the header and the end of the turn.

        An empty think block that the template adds is left out too; a think block in `content` is kept unchanged.

        Raises:
            UnknownToolForm: the template writes no calls.
        """
        if self.form is None:
            raise UnknownToolForm(
                f"chat template {self.name!r} writes no tool call: it renders a probe call as "
                f"{self.probe_text[:_SHOWN]!r}. Structured calls need a template that writes tool calls"
            )
        thought, prose = _after_thought(content)
        message = {
            "role": "assistant",
            "content": prose,
            "tool_calls": message_calls(calls, as_text=self.as_text),
        }
        return thought + _body(apply, message, None if tools is None else list(tools), self.end)


def _body(apply: Apply, message: Mapping[str, Any], tools: list[Any] | None, end: str) -> str:
    """Return the message's text between the header and the end that the template writes."""
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
    return body.removesuffix(end)


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
