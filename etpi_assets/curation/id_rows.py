"""Faults that only rows of ids and labels can have: the mask against the template's turns, BOS, control tokens."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from etpi_assets.importers.token_rows import spans_of
from etpi_resources.chat.format import ChatFormat
from etpi_resources.chat.marks import THINK, THINK_END
from etpi_resources.labels import IGNORE_INDEX

_SHOWN = 8
_ROLES = frozenset(("system", "developer", "user", "assistant", "model", "tool", "ipython"))
_OPENINGS = (f"{THINK}\n\n{THINK_END}\n\n", f"{THINK}\n")
"""Blocks that a generation prompt may write, so that a label begins after them."""


class Fault(NamedTuple):
    """A fault of a row: the number of its labelled turn, None for the whole row; `at`: where it is, in ids."""

    turn: int | None
    kind: str
    detail: str
    at: int


class _Body(NamedTuple):
    """The ids [start, stop) of a message after its header, its end included."""

    start: int
    stop: int
    role: str


def has_bodies(chat: ChatFormat) -> bool:
    """Return whether the messages of a row of ids can be told apart: a header of its own line begins each."""
    return chat.markers.header.endswith("\n")


def mask_faults(ids: Sequence[int], labels: Sequence[int], chat: ChatFormat) -> Iterator[Fault]:
    """Yield the faults of a row's ids and labels, without padding."""
    bos = chat.tokenizer.bos_token_id
    if (
        isinstance(bos, int)
        and bos not in {*chat.end_ids, chat.pad_id}
        and ids.count(bos) > 1
        and _writes_one(chat, bos)
    ):
        detail = f"{ids.count(bos)} of {chat.tokenizer.bos_token!r}"
        yield Fault(None, "bos", detail, [i for i, token in enumerate(ids) if token == bos][1])
    if not has_bodies(chat):
        return
    bodies, problem = _bodies(ids, chat)
    if not any(body.role == "assistant" for body in bodies):
        yield Fault(None, "foreign_ids", f"no turn of an assistant: {chat.decode(ids[:24])!r}", 0)
    elif problem:
        yield problem
    else:
        if (text := chat.decode(ids)).count("\ufffd") > 2:
            yield Fault(None, "foreign_ids", f"{text.count(chr(0xFFFD))} characters that are no text", 0)
        yield from _label_faults(ids, labels, bodies, chat)


@lru_cache(maxsize=64)
def _writes_one(chat: ChatFormat, bos: int) -> bool:
    """Return whether the template begins a conversation of several turns with one BOS (Llama 2 repeats it)."""
    user = {"role": "user", "content": "x"}
    return chat.prompt_ids([user, {"role": "assistant", "content": "x"}, user]).count(bos) <= 1


def _bodies(ids: Sequence[int], chat: ChatFormat) -> tuple[list[_Body], Fault | None]:
    """Return the messages of a row, and the first fault of their structure."""
    begin, ends, header = chat.turn_id, chat.end_ids, chat.markers.header
    bodies, problem = list[_Body](), list[Fault]()
    at = 0
    while at < len(ids):
        if ids[at] != begin:
            at += 1
            continue
        stop = next((i for i in range(at + 1, len(ids)) if ids[i] in ends or ids[i] == begin), len(ids))
        head = next((i for i in range(at + 1, stop) if "\n" in chat.decode(ids[i : i + 1])), stop)
        text = chat.decode(ids[at : head + 1])
        name = re.match(r"\W*(\w+)", text.removeprefix(chat.decode([begin])))
        role = "assistant" if text == header else name[1] if name else ""
        nested = stop < len(ids) and ids[stop] == begin
        if nested:
            problem.append(Fault(None, "structure", f"a message of {role!r} begins another before it ends", stop))
        elif role not in _ROLES:
            problem.append(Fault(None, "structure", f"a message of the unknown role {role!r}", at))
        bodies.append(_Body(head + 1, min(stop + 1, len(ids)), role))
        after = [*ids[stop + 1 : stop + 2]] if not nested else []
        if after and after[0] not in {begin, *chat.control_ids} and chat.decode(after).strip():
            text = chat.decode(ids[stop + 1 : stop + 1 + _SHOWN])
            problem.append(Fault(None, "structure", f"text follows the end of a message: {text!r}", stop + 1))
        at = stop if nested else stop + 1
    return bodies, problem[0] if problem else None


def _label_faults(
    ids: Sequence[int], labels: Sequence[int], bodies: Sequence[_Body], chat: ChatFormat
) -> Iterator[Fault]:
    starts = [start for start, _ in spans_of(labels)]
    inside: set[int] = set()
    for start, stop, role in bodies:
        if role not in ("assistant", "model"):
            continue
        inside.update(range(start, stop))
        trained = [labels[i] != IGNORE_INDEX for i in range(start, stop)]
        if not any(trained):
            continue
        turn = max(0, bisect_left(starts, start + trained.index(True) + 1) - 1)
        if ids[stop - 1] not in chat.end_ids or not trained[-1]:
            at = stop - (ids[stop - 1] in chat.end_ids)
            yield Fault(turn, "no_end", f"ends in {chat.decode(ids[max(start, at - 6) : at])!r}", at)
        # Within the body alone: a cut row may end before the turn does.
        body = trained[:-1] if ids[stop - 1] in chat.end_ids else trained
        skipped = next((n for n in _openings(chat) if chat.decode(ids[start : start + n]) in _OPENINGS), 0)
        hidden = body[0 if body[:1] == [True] else skipped :]
        if not all(hidden):
            at = start + len(body) - len(hidden) + hidden.index(False)
            yield Fault(
                turn, "partly_masked", f"{hidden.count(False)} of {len(body)} tokens of a turn have no label", at
            )
    # A mask may include the header or the line break after a turn.
    heads = {i for start, *_ in bodies for i in range(max(0, start - 8), start)}
    outside = [i for i, label in enumerate(labels) if label != IGNORE_INDEX and i not in inside and i not in heads]
    outside = [i for i in outside if chat.decode(ids[i : i + 1]).strip()]
    if outside:
        shown = chat.decode(ids[outside[0] : outside[0] + _SHOWN])
        yield Fault(None, "prompt_trained", f"{len(outside)} labels, first {shown!r}", outside[0])


@lru_cache(maxsize=64)
def _openings(chat: ChatFormat) -> tuple[int, ...]:
    return tuple(len(chat.encode(text, allow_special=True)) for text in _OPENINGS)
