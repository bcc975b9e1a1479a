"""The control tokens with which a chat template begins and ends an assistant's turn.

A template of the ChatML family writes `<|im_start|>assistant` and `<|im_end|>`. For any other template, small
conversations are rendered and the tokens are read off. Nothing here depends on a template's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from etpi_resources.errors import ExpectedError

Apply = Callable[[list[dict[str, Any]], list[Any] | None, bool], str]
"""(messages, tools, whether to add the generation prompt) -> text."""

TURN, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
_PROSE = "proseofprobe"
_USER = {"role": "user", "content": "probe"}
_SHOWN = 120
"""Number of rendered characters that an error shows."""


def is_chatml(template: str) -> bool:
    """Return whether a template is of the ChatML family; etpi's terminal template writes only its end of a turn."""
    return TURN in template or END in template


class NoTurnEnd(ExpectedError, ValueError):
    """A template ends an assistant's turn with no control token of the tokenizer; the message shows what it writes."""


@dataclass(frozen=True)
class TurnMarkers:
    """The texts with which a template begins and ends an assistant's turn.

    Attributes:
        header: the generation prompt without a think block, as text; empty if the template writes none (Mistral).
        turn: the control token that the header begins with; None if the template has no header.
        end: the control token that ends a turn.
        kept_end: the token in place of `end` once another message follows (gpt-oss: `<|end|>` for `<|return|>`).
    """

    header: str
    turn: str | None
    end: str
    kept_end: str

    @classmethod
    def chatml(cls) -> TurnMarkers:
        """Return the markers of the ChatML family."""
        return cls(f"{TURN}assistant\n", TURN, END, END)

    @classmethod
    def probe(cls, apply: Apply, control: re.Pattern[str], name: str) -> TurnMarkers:
        """Render small conversations and return the markers.

        Args:
            control: matches the tokenizer's control tokens.
            name: the template's name in errors.

        Raises:
            NoTurnEnd: no control token follows an assistant's text.
        """
        spoken = apply([_USER, {"role": "assistant", "content": _PROSE}], None, False)
        after = spoken[spoken.rindex(_PROSE) + len(_PROSE) :]
        end = control.search(after)
        if end is None:
            raise NoTurnEnd(
                f"chat template {name!r} writes {after[:_SHOWN]!r} after an assistant's text, which has no control "
                "token of the tokenizer: either the template belongs to another tokenizer (name both of one model in "
                "base.tokenizer and base.chat_template), or it leaves the end of a turn to the next message, and a "
                "student could not learn to stop"
            )
        prompt, plain = apply([_USER], None, True), apply([_USER], None, False)
        header = prompt.removeprefix(plain).partition("<think>")[0] if prompt.startswith(plain) else ""
        turn = control.match(header)
        return cls(header if turn else "", turn[0] if turn else None, end[0], _kept_end(apply, control, end[0]))


def _kept_end(apply: Apply, control: re.Pattern[str], end: str) -> str:
    """Return the control token after an assistant's text that a user message follows; `end` if it cannot be seen."""
    try:
        text = apply([_USER, {"role": "assistant", "content": _PROSE}, _USER], None, False)
    except Exception:  # templates raise various errors for roles that they refuse
        return end
    match = control.search(text, text.rindex(_PROSE)) if _PROSE in text else None
    return match[0] if match else end
