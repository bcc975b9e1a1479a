"""The think block of a turn in its token ids: its length, and its removal from the history of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from etpi_resources.chat.marks import CALL, THINK, THINK_END, Span, spans

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat


def think_tokens(output: Sequence[int], chat: ChatFormat, tail: str) -> int:
    """Count the ids inside the think block of `output`, without the tags, given the form of the prompt's tail."""
    opened, closed = _think_span(output, chat, tail)
    return 0 if opened is None else (closed[0] if closed else len(output)) - opened


def post_think_tokens(output: Sequence[int], chat: ChatFormat, tail: str) -> int:
    """Count the ids after the think block of `output`: all if there is none, 0 if it is not closed."""
    opened, closed = _think_span(output, chat, tail)
    if closed is None:
        return len(output) if opened is None else 0
    return len(output) - closed[1]


def strip_think(output: Sequence[int], chat: ChatFormat, tail: str) -> list[int]:
    """Remove the think block and the newline ids after it from `output`; unchanged if no block is closed."""
    opened, closed = _think_span(output, chat, tail)
    if opened is None or closed is None:
        return list(output)
    at = closed[1]
    while at < len(output) and not chat.decode(output[at : at + 1]).strip("\n"):
        at += 1
    return list(output[at:])


def _think_span(output: Sequence[int], chat: ChatFormat, tail: str) -> tuple[int | None, Span | None]:
    """Return the first position in the think block and the span of its end tag.

    Tags after the first call do not count.
    """
    calls = spans(output, CALL, chat)
    limit = calls[0][0] if calls else len(output)
    closed = next((span for span in spans(output, THINK_END, chat) if span[1] <= limit), None)
    opened = next((end for _, end in spans(output, THINK, chat) if end <= limit), None)
    if opened is None and (tail == "open" or closed is not None):
        opened = 0
    return opened, closed
