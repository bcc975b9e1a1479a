"""Decode token ids to messages and turns with the tokenizer of the options: TRL's labelled rows, and pairs of ids."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from etpi_assets.importers.calls import listed
from etpi_assets.importers.conversation import Message, Options, fill_agent, token_ids
from etpi_assets.importers.format import Row
from etpi_assets.importers.run_info import build_rollout, run_info
from etpi_assets.importers.source import as_list, field, text_field
from etpi_assets.importers.spec import base
from etpi_assets.trajectories.calls import ToolCall
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord
from etpi_resources.chat.marks import CALL
from etpi_resources.chat.tool_forms import Call
from etpi_resources.chat.tool_forms.template import UnknownToolForm
from etpi_resources.labels import IGNORE_INDEX
from etpi_resources.rows.bounded import Unreadable

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat


def chat_format(options: Options, where: str) -> ChatFormat:
    """Load the chat format of the ids. Raises Unreadable: `needs_tokenizer`."""
    from etpi_resources.chat.format import load_chat_format

    if options.tokenizer is None:
        remedy = 'name their chat format: options.tokenizer = "qwen3"'
        raise Unreadable("needs_tokenizer", f"{where} holds token ids; {remedy}")
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

    Raises Unreadable: `needs_tokenizer`; `bad_token_ids` if an id is beyond the vocabulary.
    """
    chat = chat_format(options, where)
    if max(ids, default=0) >= chat.vocab_size:
        beyond = f"id {max(ids)} is beyond the {chat.vocab_size} of {options.tokenizer}"
        raise Unreadable("bad_token_ids", f"{where}: {beyond}")
    entries: list[Message] = []
    at = 0
    for start, end in spans:
        entries += _context(ids[at:start], chat)
        output = list(ids[start:end])
        text = chat.without_end(output)
        turn = Message("assistant", chat.decode(text), prompt_ids=list(ids[:start]), output_ids=output)
        turn.capture = "native" if capture == "native" else "retokenised"
        turn.finish = "stop" if len(text) < len(output) else None
        entries.append(turn)
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
        name = re.match(r"\s*(\w+)", head)  # Llama's heads end with a control token
        role = base().roles.get(name[1] if name else "", "user")
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
_RESULT = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)


def ids_and_labels(row: Any, where: str) -> tuple[list[int], list[int]]:
    """Return a row's ids without padding, and its labels: as in TRL, an id is trained if no mask leaves it out.

    Raises Unreadable: `bad_token_ids`.
    """
    ids = token_ids(row.get("input_ids"), f"{where}, input_ids")
    columns = (*_MASKS, "attention_mask")
    masks = {name: as_list(row[name], f"{where}, {name}") for name in columns if row.get(name) is not None}
    labels = as_list(ids if masks and row.get("labels") is None else row.get("labels"), f"{where}, labels")
    wrong = [name for name, column in {"labels": labels, **masks}.items() if len(column) != len(ids)]
    wrong += [f"labels[{i}]" for i, (t, w) in enumerate(zip(ids, labels, strict=False)) if w not in (IGNORE_INDEX, t)]
    wrong += [name for name, mask in masks.items() if not all(m in (0, 1) for m in mask)]
    if wrong:
        form = "labels are unshifted, an id or -100 each, and masks are 0 and 1"
        raise Unreadable("bad_token_ids", f"{where}: {wrong[0]} does not fit the {len(ids)} ids; {form}")
    seen = masks.pop("attention_mask", None) or [1] * len(ids)
    labels = [t if all(of_id) else IGNORE_INDEX for t, *of_id in zip(labels, *masks.values(), strict=True)]
    return [t for t, s in zip(ids, seen, strict=True) if s], [w for w, s in zip(labels, seen, strict=True) if s]


def _turn_spans(ids: Sequence[int], labels: Sequence[int], chat: ChatFormat) -> list[tuple[int, int]]:
    """Return (start, end) of each labelled turn without its header and white space after its end (verl's masks)."""
    header, spans = chat.header_ids, list[tuple[int, int]]()
    for start, end in spans_of(labels):
        begins = range(max(0, start - len(header) + 1), start + 1)
        start = next((i + len(header) for i in begins if [*ids[i : i + len(header)]] == header), start)
        last = next((i for i in range(end - 1, start, -1) if ids[i] in chat.end_ids), end - 1)
        spans.append((start, end if chat.decode(ids[last + 1 : end]).strip() else last + 1))
    return spans


def labelled_ids(row: Any, where: str, options: Options) -> list[Message]:
    """Read TRL's rows of `input_ids` with labels or masks; calls and results become those of messages.

    Raises Unreadable: `bad_token_ids`, `empty`, or as `entries_of`.
    """
    ids, labels = ids_and_labels(row, where)
    spans = _turn_spans(ids, labels, chat_format(options, where))
    if not spans:
        raise Unreadable("empty", f"{where}: every label is -100, so there is no turn")
    entries = entries_of(ids, spans, options, where, text_field(row, "capture") or options.capture)
    return list(_with_calls(entries, chat_format(options, where)))


def _with_calls(entries: Sequence[Message], chat: ChatFormat) -> Iterator[Message]:
    """Yield the messages with the calls that their text has, and the results in a message of the user as the tool's."""
    try:
        form = None if chat.calls_in_content else chat.tool_form
    except UnknownToolForm:
        form = None
    for entry in entries:
        results = _RESULT.findall(entry.text) if entry.role == "user" else ()
        calls = form.parse(entry.text) if form is not None and entry.role == "assistant" else ()
        calls = [call for call in calls if isinstance(call, Call)] if all(isinstance(c, Call) for c in calls) else []
        if results and not _RESULT.sub("", entry.text).strip():
            yield from (replace(entry, role="tool", text=text) for text in results)
        elif calls and form is not None:
            at = [i for mark in (CALL, form.marker) if mark and (i := entry.text.find(mark)) >= 0]
            structured = [ToolCall(call.name, dict(call.arguments), f"call{n}") for n, call in enumerate(calls)]
            yield replace(entry, text=entry.text[: min(at, default=0)].rstrip("\n"), calls=structured)
        else:
            yield entry


# --- pairs of ids, `{input_ids, output_ids, metadata}`, one row per turn ------------


def group(row: Row) -> Any:
    """Return the rollout that the row belongs to; None: the row is a rollout of its own."""
    return text_field(row, "metadata", "rollout_id")


def record(rows: list[Row], where: str, options: Options) -> RolloutRecord:
    """Join the turns of one rollout. Raises Unreadable: `bad_token_ids`, `needs_tokenizer`, `unknown_form`."""
    by_agent: dict[str, list[Row]] = {}
    for row in rows:
        if not isinstance(row.get("metadata"), Mapping | None):
            listed(row["metadata"], f"{where}, metadata")  # raises with the type that it has
        by_agent.setdefault(text_field(row, "metadata", "agent_id") or "agent1", []).append(row)
    agents = [_agent(name, turns, where, options) for name, turns in by_agent.items()]
    return build_rollout(agents, run_info(rows[0], options), where)


def _agent(name: str, rows: list[Row], where: str, options: Options) -> AgentRecord:
    turns: list[Message] = []
    conversation: list[Message] = []
    for number, row in enumerate(rows):
        what = f"{where}, {name}, turn {number}"
        prompt = token_ids(row.get("input_ids"), f"{what}, input_ids")
        output = token_ids(row.get("output_ids"), f"{what}, output_ids")
        capture = text_field(row, "metadata", "capture") or options.capture
        conversation = entries_of(
            [*prompt, *output], [(len(prompt), len(prompt) + len(output))], options, what, capture
        )
        turns.append(conversation[-1])
    # The last prompt shows the earlier turns as its last assistant messages; replace these by the turns with their ids.
    entries = conversation[:-1]
    shown = [i for i, entry in enumerate(entries) if entry.role == "assistant"]
    for at, turn in zip(reversed(shown), reversed(turns[:-1]), strict=False):
        entries[at] = turn
    if len(turns) - 1 > len(shown):
        problem = f"{len(turns)} turns, but the last prompt shows {len(shown)}: they are no one conversation"
        remedy = "leave `rollout_id` out of `metadata` to import each as a row of its own"
        raise Unreadable("unknown_form", f"{where}, {name}: {problem}; {remedy}")
    feature, role, status = (text_field(rows[0], "metadata", key) for key in ("feature_id", "role", "exit_status"))
    agent = AgentRecord(name, feature or "", role or "solo", status or "unknown")
    fill_agent(agent, [*entries, turns[-1]], options, answers="last")
    numbers = [number if type(number := field(row, "metadata", "turn")) is int else i for i, row in enumerate(rows)]
    if numbers == sorted(set(numbers)):
        mapping = dict(enumerate(numbers))
        agent.turns = [replace(turn, turn=mapping[turn.turn]) for turn in agent.turns]
        agent.messages = [replace(m, turn=None if m.turn is None else mapping[m.turn]) for m in agent.messages]
    return agent
