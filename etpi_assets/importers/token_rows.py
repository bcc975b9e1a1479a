"""Token ids back to messages: what a ChatML conversation of ids says, and which spans of it were written by the agent.

Belongs here: reading ids with the tokenizer that the options name. Does not belong here: any data set's columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from etpi_assets.importers.conversation import ROLES, Entry, Options
from etpi_assets.importers.source import Unreadable
from etpi_resources.labels import IGNORE_INDEX

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat


def chat_format(options: Options, where: str) -> ChatFormat:
    """The chat format of the ids. Raises Unreadable: `needs_tokenizer`."""
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
) -> list[Entry]:
    """The messages of `ids`, a turn for each span.

    Args:
        ids: one conversation, (n,), as the template wrote it.
        spans: (start, end) of what the agent is to learn, in order, not overlapping; each is a turn with its ids.

    Raises:
        Unreadable: `needs_tokenizer`, `bad_token_ids` where an id is beyond the vocabulary.
    """
    chat = chat_format(options, where)
    if max(ids, default=0) >= chat.vocab_size:
        raise Unreadable(
            "bad_token_ids", f"{where}: id {max(ids)} is beyond the {chat.vocab_size} of {options.tokenizer}"
        )
    entries: list[Entry] = []
    at = 0
    for start, end in spans:
        entries += _context(ids[at:start], chat)
        output = list(ids[start:end])
        text = output[:-1] if output[-1] == chat.end_id else output
        entries.append(
            Entry(
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


def _context(ids: Sequence[int], chat: ChatFormat) -> list[Entry]:
    """The messages of ids that the agent read; a header with nothing after it is where a turn begins."""
    starts = [i for i, token in enumerate(ids) if token == chat.turn_id]
    entries = []
    lead = chat.decode(ids[: starts[0] if starts else len(ids)], skip_special=True).strip("\n")
    if lead:
        entries.append(Entry("user", lead))
    for start, end in pairwise([*starts, len(ids)]):
        body = list(ids[start + 1 : end])
        ended = chat.end_id in body
        head, _, text = chat.decode(body[: body.index(chat.end_id)] if ended else body).partition("\n")
        role = ROLES.get(head.strip(), "user")
        if ended or (role != "assistant" and text):
            entries.append(Entry(role, text, learn=False))
    return entries


def spans_of(labels: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of positions that carry a label: those that are not `IGNORE_INDEX`."""
    carries = [False, *(label != IGNORE_INDEX for label in labels), False]
    edges = [i for i, (before, after) in enumerate(pairwise(carries)) if before != after]
    return list(zip(edges[::2], edges[1::2], strict=True))
