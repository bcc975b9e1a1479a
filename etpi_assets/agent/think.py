"""The think block of a turn as the agent loop sees it: on ids, never on text.

Belongs here: counting its ids and those after it, and taking it out of history while a rollout runs. Does not belong
here: what of it becomes training data, which curation decides with reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat


def think_tokens(output: Sequence[int], chat: ChatFormat, tail: str) -> int:
    """How many ids of `output` stand inside its think block (the tags not counted), given the prompt's tail."""
    opened, closed = _think_span(output, chat, tail)
    return 0 if opened is None else (len(output) if closed is None else closed) - opened


def post_think_tokens(output: Sequence[int], chat: ChatFormat, tail: str) -> int:
    """How many ids of `output` follow its think block: all where there is none, 0 where it is not closed."""
    opened, closed = _think_span(output, chat, tail)
    if closed is None:
        return len(output) if opened is None else 0
    return len(output) - closed - 1


def strip_think(output: Sequence[int], chat: ChatFormat, tail: str) -> list[int]:
    """`output` from after its think block and the newline ids that follow; unchanged where no block is closed."""
    opened, closed = _think_span(output, chat, tail)
    if opened is None or closed is None:
        return list(output)
    at = closed + 1
    while at < len(output) and not chat.decode(output[at : at + 1]).strip("\n"):
        at += 1
    return list(output[at:])


def _think_span(output: Sequence[int], chat: ChatFormat, tail: str) -> tuple[int | None, int | None]:
    """First position inside the think block, and the position of its close. A close after the first call is none."""
    calls = [i for i, token in enumerate(output) if token == chat.tool_open_id]
    limit = calls[0] if calls else len(output)
    closed = next((i for i in range(limit) if output[i] == chat.think_close_id), None)
    opened = next((i + 1 for i in range(limit) if output[i] == chat.think_open_id), None)
    if opened is None and (tail == "open" or closed is not None):
        opened = 0
    return opened, closed
