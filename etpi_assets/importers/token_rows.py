"""Decode the token ids of a ChatML conversation to messages and turns, with the tokenizer of the options."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from etpi_assets.importers.conversation import Options, token_ids
from etpi_assets.importers.normal import Message
from etpi_assets.importers.source import Unreadable, as_list, text_field
from etpi_assets.importers.spec import base
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
) -> list[Message]:
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
    entries: list[Message] = []
    at = 0
    for start, end in spans:
        entries += _context(ids[at:start], chat)
        output = list(ids[start:end])
        text = chat.without_end(output)
        entries.append(
            Message(
                "assistant",
                chat.decode(text),
                prompt_ids=list(ids[:start]),
                output_ids=output,
                capture="native" if capture == "native" else "retokenised",
                finish="stop" if len(text) < len(output) else None,
            )
        )
        at = end
    return entries + _context(ids[at:], chat)


def _context(ids: Sequence[int], chat: ChatFormat) -> list[Message]:
    """Decode context between turns; an assistant header at the end belongs to the next turn and gives no message."""
    starts = [i for i, token in enumerate(ids) if token == chat.turn_id]
    entries = []
    lead = chat.decode(ids[: starts[0] if starts else len(ids)], skip_special=True).strip("\n")
    if lead:
        entries.append(Message("user", lead))
    for start, end in pairwise([*starts, len(ids)]):
        body = list(ids[start + 1 : end])
        ended = chat.end_id in body
        head, _, text = chat.decode(body[: body.index(chat.end_id)] if ended else body).partition("\n")
        role = base().roles.get(head.strip(), "user")
        role = role if role in ("system", "user", "assistant", "tool") else "user"
        if ended or (role != "assistant" and text):
            entries.append(Message(role, text, trained=False))
    return entries


def spans_of(labels: Sequence[int]) -> list[tuple[int, int]]:
    """Return (start, end) of each run of labels other than `IGNORE_INDEX`."""
    trained = [False, *(label != IGNORE_INDEX for label in labels), False]
    edges = [i for i, (before, after) in enumerate(pairwise(trained)) if before != after]
    return list(zip(edges[::2], edges[1::2], strict=True))


_MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")


def labelled_ids(row: Any, where: str, options: Options) -> list[Message]:
    """Read TRL's rows of `input_ids` with labels or masks.

    Raises:
        Unreadable: `bad_token_ids`, `empty`, or as `entries_of`.
    """
    ids = token_ids(row.get("input_ids"), f"{where}, input_ids")
    masks = {name: as_list(row[name], f"{where}, {name}") for name in _MASKS if row.get(name) is not None}
    labels = as_list(ids if masks and row.get("labels") is None else row.get("labels"), f"{where}, labels")
    wrong = [name for name, column in {"labels": labels, **masks}.items() if len(column) != len(ids)]
    wrong += [f"labels[{i}]" for i, (t, w) in enumerate(zip(ids, labels, strict=False)) if w not in (IGNORE_INDEX, t)]
    wrong += [name for name, mask in masks.items() if not all(m in (0, 1) for m in mask)]
    if wrong:
        raise Unreadable(
            "bad_token_ids",
            f"{where}: {wrong[0]} does not fit the {len(ids)} ids; labels are unshifted, an id or -100 each, and masks "
            "are 0 and 1",
        )
    # As in TRL, an id is trained only if no mask leaves it out.
    labels = [t if all(of_id) else IGNORE_INDEX for t, *of_id in zip(labels, *masks.values(), strict=True)]
    spans = spans_of(labels)
    if not spans:
        raise Unreadable("empty", f"{where}: every label is -100, so there is no turn")
    return entries_of(ids, spans, options, where, text_field(row, "capture") or options.capture)
