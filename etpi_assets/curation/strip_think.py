"""Remove think blocks from recorded outputs and histories: ids are cut, never encoded again.

Tags are found by their ids, or by their text if the vocabulary has no such ids (`chat.marks`). An output is kept, cut
or dropped by the form of its prompt's tail (`ChatFormat.tail_form`) and by the think tags before its first call. A
closing tag after the call is ignored.

    tail \\ output   neither              opens only           closes, or both
    none            keep                 drop                 cut
    open            drop                 drop                 cut
    closed          keep                 drop                 cut

Cutting removes everything up to the first closing tag and the newline ids after it. An output whose tags are all in
code is kept if the tail is closed; otherwise it is dropped, since nothing tells whether it has thoughts. So is an
output whose vocabulary has no such ids, with a closing tag in a line of prose or in a call, and no opening one. If a
think tag is left outside code, or the ids cannot be cut there because one of them has more text than the tag and
newlines, the output is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from etpi_resources.chat.format import NO_TURN, ChatFormat, Tail
from etpi_resources.chat.marks import CALL, THINK, THINK_END, contains, spans, split_thought, without_code

UNCLOSED = "unclosed_think"
SECOND = "second_think_block"
AFTER_CALL = "think_after_call"
EMPTY = "nothing_but_think"
JOINED = "think_joined_with_text"
QUOTED = "think_tag_in_code"
_TAGS = re.compile("</?think>")
_GENERATION_PROMPT = 64
"""Ids at a prompt's end that are searched first for the beginning of its last message."""


@dataclass(frozen=True)
class Stripped:
    """An output without its think block.

    Attributes:
        ids: what is left of the output; the whole output if it must be dropped.
        removed: the number of ids cut.
        reason: why the output must be dropped, None if it is kept.
    """

    ids: np.ndarray
    removed: int = 0
    reason: str | None = None


def strip_output(output: np.ndarray, tail: Tail, chat: ChatFormat) -> Stripped:
    """Apply the table above to one output, (n,) int32."""
    if tail != "open" and not has_think(output, chat):
        return Stripped(output)
    if tail == "closed" and not _TAGS.search(without_code(chat.decode(output.tolist()))):
        return Stripped(output)
    calls = spans(output, CALL, chat)
    limit = calls[0][0] if calls else len(output)
    opens, closes = ([end for _, end in spans(output, tag, chat) if end <= limit] for tag in (THINK, THINK_END))
    close = closes[0] if closes else 0
    if not close and (tail == "open" or opens):
        return Stripped(output, reason=UNCLOSED)
    cut = _after_newlines(output, close, chat) if close else 0
    rest = output[cut:]
    before_call = chat.decode(output[:limit].tolist()) if close else ""
    if close and THINK_END not in without_code(before_call):
        return Stripped(output, reason=QUOTED)
    only_closed = chat.think_close_id is None and tail != "open" and not opens
    if close and only_closed and split_thought(before_call).rest == before_call:
        return Stripped(output, reason=QUOTED)
    if close and not _ends_in_tag(output[:close], chat):
        return Stripped(output, reason=JOINED)
    if has_think(rest, chat) and _TAGS.search(without_code(chat.decode(rest.tolist()))):
        return Stripped(output, reason=SECOND if has_think(output[cut:limit], chat) else AFTER_CALL)
    if cut and not len(rest[rest != chat.end_id]):
        return Stripped(output, reason=EMPTY)
    return Stripped(rest, removed=cut)


def strip_opened(output: np.ndarray, chat: ChatFormat) -> Stripped:
    """Cut an output only if it opens a think block itself, as the published rule does.

    The rule ignores the prompt, so reasoning after a prompt that ends in an open think block stays whole.
    """
    opens = spans(output, THINK, chat)
    return strip_output(output, "none", chat) if opens and opens[0][0] == 0 else Stripped(output)


def has_think(ids: np.ndarray, chat: ChatFormat) -> bool:
    """Return whether an opening or closing think tag is among the ids."""
    return contains(ids, (THINK, THINK_END), chat)


def _ends_in_tag(ids: np.ndarray, chat: ChatFormat) -> bool:
    """Return whether the text of ids ends in a closing tag and newlines."""
    if chat.think_close_id is not None:
        return True
    return chat.decode(ids.tolist()).rstrip("\r\n").endswith(THINK_END)


def close_tail(prompt: np.ndarray, chat: ChatFormat) -> np.ndarray:
    """Replace an open tail by the template's text with enable_thinking = false, which serving renders too.

    A prompt without an open tail is returned unchanged.

    Raises:
        ValueError: the tail is open and the template cannot close it.
    """
    if chat.tail_form(last_turn(prompt, chat).tolist()) != "open":
        return prompt
    opened = len(prompt) - len(last_turn(prompt, chat)) + spans(last_turn(prompt, chat), THINK, chat)[-1][0]
    return np.concatenate([prompt[:opened], np.asarray(_closed_tail(chat), dtype=prompt.dtype)])


def without_tail(prompt: np.ndarray, chat: ChatFormat) -> np.ndarray:
    """Return the prompt up to the think block, open or closed, at the end of its generation prompt."""
    last = last_turn(prompt, chat)
    if chat.tail_form(last.tolist()) == "none":
        return prompt
    return prompt[: len(prompt) - len(last) + spans(last, THINK, chat)[0][0]]


@lru_cache
def _closed_tail(chat: ChatFormat) -> tuple[int, ...]:
    prompt = chat.prompt_ids([{"role": "user", "content": "x"}], enable_thinking=False)
    if chat.tail_form(prompt) != "closed":
        raise ValueError(
            f"chat format {chat.name!r}: prompts end in an open think block, and its template closes none with "
            "enable_thinking = false; keep think blocks (pairs.strip_think = false) or use another chat_template"
        )
    return tuple(prompt[spans(prompt, THINK, chat)[-1][0] :])


def strip_history(prompt: np.ndarray, chat: ChatFormat) -> tuple[np.ndarray, int]:
    """Remove the think blocks of a prompt's earlier assistant messages; return the prompt and the number of ids cut.

    A block of newlines only stays: the template wrote it, and serving renders it too. A block that is not closed before
    the first tool call stays, because its end is unknown, and so do all blocks of a turn with several.
    """
    if not contains(prompt, (THINK_END,), chat):
        return prompt, 0
    pieces = []
    for segment, body in _history(prompt, chat):
        stripped = strip_output(segment[body:], "none", chat)
        block = segment[body:][: stripped.removed]
        empty = not _TAGS.sub("", chat.decode(block.tolist())).strip("\r\n")
        pieces.append(segment if empty else np.concatenate([segment[:body], stripped.ids]))
    edited = np.concatenate(pieces)
    return edited, len(prompt) - len(edited)


def thinks_in_history(prompt: np.ndarray, chat: ChatFormat) -> bool:
    """Return whether an earlier assistant message of a prompt has think text: a block that is more than newlines.

    Tags in code, prose and calls are text. `prompt` may be the part of a prompt that follows an earlier one.
    """
    if not has_think(prompt, chat):
        return False
    thoughts = (split_thought(chat.decode(segment[body:].tolist())) for segment, body in _history(prompt, chat))
    return any(thought.inside or thought.opened or thought.again for thought in thoughts)


def _history(prompt: np.ndarray, chat: ChatFormat) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the segments of a prompt, and where the text of an earlier assistant message begins in each.

    That is the segment's end for another message, and for the generation prompt.
    """
    # At ends of turns too: in some templates only an assistant's message begins with the start-of-message id.
    pieces = _cut(prompt, [*_starts(chat), *chat.end_ids])
    for segment in pieces[:-1]:
        yield segment, _assistant_body(segment, chat)
    yield pieces[-1], len(pieces[-1])


def _assistant_body(segment: np.ndarray, chat: ChatFormat) -> int:
    """Return where the text of an assistant message begins in its segment (`<|im_start|>assistant…`).

    The segment's end for other roles, and if the header's last character and the text after it share an id.
    """
    if chat.turn_id == NO_TURN:
        return 1 if len(segment) and int(segment[0]) in _before_assistant(chat) else len(segment)
    header = _header_text(chat)
    if not chat.decode(segment[: len(header)].tolist()).startswith(header):
        return len(segment)
    ends = range(1, len(header) + 1)
    return next((n for n in ends if chat.decode(segment[:n].tolist()) == header), len(segment))


@lru_cache
def _header_text(chat: ChatFormat) -> str:
    """Return the header as its ids are decoded: without dropped white space, and with a vocabulary's own prefix."""
    return chat.decode(chat.header_ids)


@lru_cache
def _before_assistant(chat: ChatFormat) -> frozenset[int]:
    """Return the control ids that an assistant's text follows in a template without a header (Mistral: `[/INST]`)."""
    last = [chat.prompt_ids([{"role": "user", "content": "x"}])[-1]]
    with suppress(ValueError):  # the template writes no results
        last.append(chat.observation_ids("x", "tool")[-1])
    return chat.control_ids.intersection(last)


def segments(prompt: np.ndarray, chat: ChatFormat) -> list[np.ndarray]:
    """Cut a prompt into messages; the first segment, often empty, is before the first message.

    It is cut before every start-of-message id, or before every control id if the template has no such id.
    """
    return _cut(prompt, _starts(chat))


def _cut(prompt: np.ndarray, before: list[int]) -> list[np.ndarray]:
    return np.split(prompt, np.isin(prompt, before).nonzero()[0])


def _starts(chat: ChatFormat) -> list[int]:
    return [*chat.control_ids] if chat.turn_id == NO_TURN else [chat.turn_id]


def last_turn(prompt: np.ndarray, chat: ChatFormat) -> np.ndarray:
    """Return the prompt from its last start-of-message id, or last control id, on; the whole prompt if it has none."""
    starts = _starts(chat)
    for length in (_GENERATION_PROMPT, len(prompt)):  # most prompts end in a short generation prompt
        (turns,) = np.isin(prompt[-length:], starts).nonzero()
        if len(turns):
            return prompt[max(len(prompt) - length, 0) + turns[-1] :]
    return prompt


def _after_newlines(ids: Sequence[int] | np.ndarray, at: int, chat: ChatFormat) -> int:
    """Return the first position from `at` on whose id is not only newlines.

    An id that joins a newline with text stays whole: cutting inside an id would be re-tokenising.
    """
    while at < len(ids) and _is_newline(chat, int(ids[at])):
        at += 1
    return at


@lru_cache(maxsize=4096)
def _is_newline(chat: ChatFormat, token: int) -> bool:
    text = chat.decode([token])
    return bool(text) and not text.strip("\r\n")
