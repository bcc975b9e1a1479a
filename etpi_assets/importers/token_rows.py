"""Decode the token ids of a ChatML conversation to messages and turns, with the tokenizer of the options."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from etpi_assets.importers.conversation import ROLES, ChatEntry, Options
from etpi_assets.importers.source import Unreadable
from etpi_resources.labels import IGNORE_INDEX

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat


def chat_format(options: Options, where: str) -> ChatFormat:
    """Load the chat format of the ids. Raises Unreadable: `needs_tokenizer`."""
    from etpi_resources.chat.format import load_chat_format

    if options.tokenizer is None:
        raise Unreadable(
            "needs_tokenizer", f'{where} holds token ids; name their chat format: options.tokenizer = "qwen3"'
        )
    try:
        return load_chat_format(options.tokenizer)
    except (FileNotFoundError, ValueError) as error:
        raise Unreadable("needs_tokenizer", f"{where}: {error}") from error


def entries_of(
    ids: Sequence[int], spans: Sequence[tuple[int, int]], options: Options, where: str, capture: str
) -> list[ChatEntry]:
    """Decode `ids` to messages, with a turn for each span.

    Args:
        ids: one conversation in the chat template's form, (n,).
        spans: (start, end) of the trained ids, in order, not overlapping.

    Raises:
        Unreadable: `needs_tokenizer`; `bad_token_ids` if an id is beyond the vocabulary.
    """
    chat = chat_format(options, where)
    if max(ids, default=0) >= chat.vocab_size:
        raise Unreadable(
            "bad_token_ids", f"{where}: id {max(ids)} is beyond the {chat.vocab_size} of {options.tokenizer}"
        )
    entries: list[ChatEntry] = []
    at = 0
    for start, end in spans:
        entries += _context(ids[at:start], chat)
        output = list(ids[start:end])
        text = chat.without_end(output)
        entries.append(
            ChatEntry(
                "assistant",
                chat.decode(text),
                prompt_ids=list(ids[:start]),
                output_ids=output,
                capture="native" if capture == "native" else "retokenised",
                finish_reason="stop" if len(text) < len(output) else None,
            )
        )
        at = end
    return entries + _context(ids[at:], chat)


def _context(ids: Sequence[int], chat: ChatFormat) -> list[ChatEntry]:
    """Decode context between turns; an assistant header at the end belongs to the next turn and gives no message."""
    starts = [i for i, token in enumerate(ids) if token == chat.turn_id]
    entries = []
    lead = chat.decode(ids[: starts[0] if starts else len(ids)], skip_special=True).strip("\n")
    if lead:
        entries.append(ChatEntry("user", lead))
    for start, end in pairwise([*starts, len(ids)]):
        body = list(ids[start + 1 : end])
        ended = chat.end_id in body
        head, _, text = chat.decode(body[: body.index(chat.end_id)] if ended else body).partition("\n")
        role = ROLES.get(head.strip(), "user")
        if ended or (role != "assistant" and text):
            entries.append(ChatEntry(role, text, learn=False))
    return entries


def spans_of(labels: Sequence[int]) -> list[tuple[int, int]]:
    """Return (start, end) of each run of labels other than `IGNORE_INDEX`."""
    trained = [False, *(label != IGNORE_INDEX for label in labels), False]
    edges = [i for i, (before, after) in enumerate(pairwise(trained)) if before != after]
    return list(zip(edges[::2], edges[1::2], strict=True))
