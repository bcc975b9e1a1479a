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
_OF_CHATML = re.compile(r"<\|im_\w+\|>")
_PROSE, _NEXT = "proseofprobe", "nextofprobe"
_USER, _ANSWER = {"role": "user", "content": "userofprobe"}, {"role": "assistant", "content": _PROSE}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "x", "arguments": {"x": "y"}}}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "tool_call_id": "call00000", "name": "x", "content": _NEXT}
_SHOWN = 120
"""Number of rendered characters that an error shows."""


def is_chatml(template: str) -> bool:
    """Return whether a template is of the ChatML family; etpi's terminal template writes only its end of a turn.

    Families with further tokens of the same spelling (Kimi, Phi-4) begin a turn otherwise.
    """
    return {TURN, END} >= (written := {*_OF_CHATML.findall(template)}) and len(written) > 0


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
        spoken = apply([_USER, _ANSWER], None, False)
        after = spoken[spoken.rindex(_PROSE) + len(_PROSE) :]
        ends = control.findall(after)
        if not ends:
            raise NoTurnEnd(
                f"chat template {name!r} writes {after[:_SHOWN]!r} after an assistant's text, which has no control "
                "token of the tokenizer: either the template belongs to another tokenizer (name both of one model in "
                "base.tokenizer and base.chat_template), or it leaves the end of a turn to the next message, and a "
                "student could not learn to stop"
            )
        prompt, plain = apply([_USER], None, True), apply([_USER], None, False)
        header = prompt.removeprefix(plain).partition("<think>")[0] if prompt.startswith(plain) else ""
        turn = control.match(header)
        kept = _kept_ends(apply, control, turn[0] if turn else None) or ends[:1]
        return cls(header if turn else "", turn[0] if turn else None, ends[: len(kept)][-1], kept[-1])


def ends_of_next(apply: Apply, control: re.Pattern[str]) -> tuple[str, str] | None:
    """Return what ends a turn in words and one with calls where the next message's first token does (GLM).

    None if the template writes an end of its own, or none at all.
    """
    spoken = apply([_USER, _ANSWER], None, False)
    if control.search(spoken[spoken.rindex(_PROSE) :]):
        return None
    words = _opening(apply, control, _ANSWER, {**_USER, "content": _NEXT})
    return (words, _opening(apply, control, _CALLING, _RESULT) or words) if words else None


def _opening(apply: Apply, control: re.Pattern[str], turn: dict[str, Any], following: dict[str, Any]) -> str:
    """Return the text from a turn to the control token that begins the following message; empty if there is none."""
    try:
        before, both = (apply([_USER, turn, *after], None, False) for after in ([], [following]))
    except Exception:  # templates raise various errors for roles and calls that they refuse
        return ""
    opened = control.search(both, len(before))
    if opened is None or not both.startswith(before) or both[len(before) : opened.start()].strip():
        return ""
    return both[len(before) : opened.end()]


def _kept_ends(apply: Apply, control: re.Pattern[str], turn: str | None) -> list[str]:
    """Return the control tokens between an assistant's text and the message of a user that follows.

    A template may end a turn with several (Command R7B). Empty if the template does not show them.

    Args:
        turn: the control token that an assistant's turn begins with, and in most templates every message.
    """
    try:
        text = apply([_USER, _ANSWER, {**_USER, "content": _NEXT}], None, False)
    except Exception:  # templates raise various errors for roles that they refuse
        return []
    if _PROSE not in text or _NEXT not in text:
        return []
    opening, between = text.partition(_USER["content"])[0], text.partition(_PROSE)[2].partition(_NEXT)[0]
    if turn and turn in between:
        return control.findall(between.partition(turn)[0])
    left, right = ([piece for piece in control.split(part) if piece] for part in (opening, between))
    while left and right and left[-1] == right[-1]:  # they belong to the user's message
        del left[-1], right[-1]
    return control.findall("".join(right))
