"""Taking think blocks out of training data: on ids, never on text.

Belongs here: what of an output is its think block, when a row must be dropped instead of cut, the same for earlier
assistant turns in a prompt, and the tail of a generation prompt. Does not belong here: which rows there are (`pairs`).

What happens to an output, by the form of its prompt's tail (`ChatFormat.tail_form`) and the think ids before its first
tool-call id; a close after that id delimits nothing:

    tail \\ output   neither              opens only           closes, or both
    none            as it is             drop                 cut
    open            drop                 drop                 cut
    closed          as it is             drop                 cut

Cut is: through the first close and the newline ids after it. Whatever think id is left then drops the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from etpi_resources.chat.format import ChatFormat, Tail

UNCLOSED = "unclosed_think"
SECOND = "second_think_block"
AFTER_CALL = "think_after_call"
EMPTY = "nothing_but_think"


@dataclass(frozen=True)
class Stripped:
    """An output without its think block. `reason`: why the row must be dropped, where it must; `ids` is then the output
    as it was. `removed`: ids cut."""

    ids: np.ndarray
    removed: int = 0
    reason: str | None = None


def strip_output(output: np.ndarray, tail: Tail, chat: ChatFormat) -> Stripped:
    """The table above for one output, shape (n,) int32."""
    if chat.think_open_id is None or chat.think_close_id is None:
        return Stripped(output)
    before_call = output[: _first(output, chat.tool_open_id, len(output))]
    close = _first(before_call, chat.think_close_id, -1)
    if close < 0 and (tail == "open" or chat.think_open_id in before_call):
        return Stripped(output, reason=UNCLOSED)
    cut = _after_newlines(output, close + 1, chat) if close >= 0 else 0
    rest = output[cut:]
    if has_think(rest, chat):
        return Stripped(output, reason=SECOND if has_think(before_call[cut:], chat) else AFTER_CALL)
    if cut and not len(rest[rest != chat.end_id]):
        return Stripped(output, reason=EMPTY)
    return Stripped(rest, removed=cut)


def strip_opened(output: np.ndarray, chat: ChatFormat) -> Stripped:
    """The published rule: only an output whose first id opens a think block is cut. What a prompt opened or closed
    before it is not looked at, so reasoning that such a prompt lets begin unopened stays, its `</think>` with it."""
    if chat.think_open_id is None or not len(output) or output[0] != chat.think_open_id:
        return Stripped(output)
    return strip_output(output, "none", chat)


def has_think(ids: np.ndarray, chat: ChatFormat) -> bool:
    """Whether a think id, opening or closing, is among the ids."""
    return bool(_is_think(ids, chat).any())


def close_tail(prompt: np.ndarray, chat: ChatFormat) -> np.ndarray:
    """The prompt with its open tail replaced by what the template writes with enable_thinking = false, as serving then
    renders it too; another prompt as it is.

    Raises:
        ValueError: the tail is open and the template cannot close it.
    """
    if chat.tail_form(_last_turn(prompt, chat).tolist()) != "open":
        return prompt
    opened = len(prompt) - 1 - _first(prompt[::-1], chat.think_open_id, 0)
    return np.concatenate([prompt[:opened], np.asarray(_closed_tail(chat), dtype=prompt.dtype)])


def without_tail(prompt: np.ndarray, chat: ChatFormat) -> np.ndarray:
    """The prompt up to the think block, open or closed, that its generation prompt ends in."""
    last = _last_turn(prompt, chat)
    if chat.tail_form(last.tolist()) == "none":
        return prompt
    return prompt[: len(prompt) - len(last) + _first(last, chat.think_open_id, len(last))]


@lru_cache
def _closed_tail(chat: ChatFormat) -> tuple[int, ...]:
    prompt = chat.prompt_ids([{"role": "user", "content": "x"}], enable_thinking=False)
    if chat.tail_form(prompt) != "closed":
        raise ValueError(
            f"chat format {chat.name!r}: prompts end in an open think block, and its template closes none with "
            "enable_thinking = false; keep think blocks (pairs.strip_think = false) or take another chat_template"
        )
    last = len(prompt) - 1 - _first(np.asarray(prompt[::-1]), chat.think_open_id, 0)
    return tuple(prompt[last:])


def strip_history(prompt: np.ndarray, chat: ChatFormat) -> tuple[np.ndarray, int]:
    """A prompt without the think blocks of its earlier assistant messages, and how many ids that cut.

    A block that holds nothing but newlines is the template's own and stays, for serving renders it too; one that is
    never closed, or only after a tool call, stays because nothing says where it ends.
    """
    if chat.think_close_id is None or chat.think_close_id not in prompt:
        return prompt, 0
    starts = [*np.flatnonzero(prompt == chat.turn_id).tolist(), len(prompt)]
    kept = [prompt[: starts[0]]]
    # The last segment is the generation prompt, which is not history.
    for start, end in pairwise(starts):
        segment = prompt[start:end]
        body = _assistant_body(segment, chat) if end < len(prompt) else None
        if body is None:
            kept.append(segment)
            continue
        content = segment[body:]
        found = strip_output(content, "none", chat)
        block = content[: found.removed]
        inside = block[~_is_think(block, chat)]
        empty = _after_newlines(inside, 0, chat) == len(inside)
        kept.append(segment if empty else np.concatenate([segment[:body], found.ids]))
    edited = np.concatenate(kept)
    return edited, len(prompt) - len(edited)


def _assistant_body(segment: np.ndarray, chat: ChatFormat) -> int | None:
    """Where the text of an assistant message begins in its segment (`<|im_start|>assistant\\n…`); None for other roles,
    and where the newline is one id with what follows."""
    return next((n for n in range(2, 6) if chat.decode(segment[1:n].tolist()) == "assistant\n"), None)


def _is_think(ids: np.ndarray, chat: ChatFormat) -> np.ndarray:
    return np.isin(ids, [i for i in (chat.think_open_id, chat.think_close_id) if i is not None])


def _last_turn(prompt: np.ndarray, chat: ChatFormat) -> np.ndarray:
    turns = np.flatnonzero(prompt == chat.turn_id)
    return prompt[turns[-1] :] if len(turns) else prompt


def _first(ids: np.ndarray, wanted: int | None, default: int) -> int:
    found = np.flatnonzero(ids == wanted)
    return int(found[0]) if wanted is not None and len(found) else default


def _after_newlines(ids: Sequence[int] | np.ndarray, at: int, chat: ChatFormat) -> int:
    """The first position from `at` on whose id is not made of newlines alone. An id that joins a newline with text
    stays whole: cutting inside an id would be re-tokenising."""
    while at < len(ids) and _is_newline(chat, int(ids[at])):
        at += 1
    return at


@lru_cache(maxsize=4096)
def _is_newline(chat: ChatFormat, token: int) -> bool:
    text = chat.decode([token])
    return bool(text) and not text.strip("\r\n")
