"""The normal form of a recorded conversation, which every reader writes; and from it one agent's record with its turns.

A turn is the model's output for one request. Most formats write one message per request, so a message is a turn. Some
write one message per content block (`blocks`); there an unbroken run of assistant messages is a turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from etpi_assets.agent.actions import NO_ACTION, read_actions
from etpi_assets.importers.source import text_field
from etpi_assets.importers.spec import Unread, silent
from etpi_assets.trajectories import records
from etpi_assets.trajectories.calls import ToolCall
from etpi_assets.trajectories.records import Action, AgentRecord, RolloutRecord, Turn, exit_kind
from etpi_resources.rows.bounded import Unreadable

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(slots=True)
class Message:
    """One message of an imported conversation.

    Attributes:
        thought: the reasoning before the text.
        result_of: of a result, the id of the call that it answers, or the tool's name.
        time: in UTC.
        trained: an assistant's message is a turn, not context.
        kind: as in the lake; None: it follows from the role.
        inbox: messages of other agents that it shows; None: `fill_agent` parses them from the text.
        actions: actions of the turn as the source recorded them; None: `fill_agent` parses them.
        broken_call: the text is a call that cannot be parsed.
    """

    role: Role
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    thought: str | None = None
    time: datetime | None = None
    trained: bool = True
    kind: str | None = None
    prompt_ids: list[int] | None = None
    output_ids: list[int] | None = None
    logprobs: list[float] | None = None
    capture: Literal["native", "retokenised"] = "native"
    finish: str | None = None
    exit_code: int | None = None
    inbox: list[dict[str, str]] | None = None
    actions: list[Action] | None = None
    broken_call: bool = False
    result_of: str | None = None


@dataclass
class RunInfo:
    """Facts of a run besides its messages.

    Attributes:
        rollout: the record, without agents.
        patch, exit_status: of its agent; the status is etpi's name of how the run ended.
        truncated: the last turn was cut at the output limit.
        numbered: the task id is a number that names a task within its file alone.
    """

    rollout: RolloutRecord
    patch: str | None
    exit_status: str | None
    truncated: bool
    numbered: bool


Answers = Literal["none", "last", "answered", "all"]
"""Which texts of a conversation are answers: none, the last message, also those before a message of the user (not where
results come as such messages: that message may be the harness's, which found no call), or all, where the program
reads structured calls alone."""

_INBOX_LINE = re.compile(r"^\[(?:Message|Reply) from (\w+)[^\]\n]*\]: ?", re.MULTILINE)
_INBOX_LIST = re.compile(r"\[\s*\{")
_FINISHES = {
    **dict.fromkeys(("tool_calls", "function_call", "tool_use", "end_turn", "stop_sequence", "STOP"), "stop"),
    **dict.fromkeys(("max_tokens", "max_output_tokens", "MAX_TOKENS", "model_context_window_exceeded"), "length"),
    **dict.fromkeys(("content_filter", "SAFETY", "RECITATION", "abort", "error"), "length"),  # cut too
}
_DECODER = json.JSONDecoder(strict=False)
_MOST_LOGPROB = 1e6
"""Engines report impossible tokens as -9999 or so; beyond this, a float32 column would hold infinity."""


@dataclass(frozen=True)
class Options:
    """Options of an imported rollout set (`options` of its spec).

    Attributes:
        message_commands: shell commands and tools that send messages to other agents.
        receive_commands: shell commands that print received messages, as a JSON list of {"from", "content"}.
        teacher: name of the model, if the source does not record it.
        repo: the repository, if the source does not record it (CooperBench's folders do).
        tokenizer: chat format of token ids in the source: "tiny", "qwen3" or a folder; ids of another than the
            student's are not trained.
        capture: how those ids were captured, if the rows do not say: "native" or "retokenised".
        tools: schemas of the tools that prompts offer, as JSON text or tables, for runs that record none.
        map: columns of rows of the format `mapped`: key -> path.
        ignore: names of columns and of keys of messages (`message.NAME`) that may stay unread.
        secrets: what is done with keys in the runs: "keep", "mask" (a turn that wrote one is context) or "quarantine".
    """

    message_commands: tuple[str, ...] = ("send_message",)
    receive_commands: tuple[str, ...] = ()
    teacher: str | None = None
    repo: str | None = None
    tokenizer: str | None = None
    capture: str = "retokenised"
    tools: list[dict[str, Any]] | None = None
    map: Mapping[str, str] | None = None
    secrets: str = "keep"
    ignore: tuple[str, ...] = ()
    unread: Unread = silent


def fill_agent(
    record: AgentRecord,
    entries: Sequence[Message],
    options: Options,
    *,
    blocks: bool = False,
    bare_calls: bool = False,
    answers: Answers = "none",
) -> AgentRecord:
    """Add the messages and turns of a conversation to `record`, and return it.

    Parallel results are put in the order of the calls that they answer.

    Args:
        blocks: consecutive assistant messages are content blocks of one response.
        bare_calls: `<function=NAME>` without a `<tool_call>` around it is a call; some harnesses accept it.
        answers: which texts without a call are answers, not malformed calls.

    Raises Unreadable: `no_prompt` if the conversation begins with the assistant.
    """
    turns: list[tuple[list[Message], list[Message]]] = []  # its messages, and those that answer it
    in_turn = False
    for entry in in_call_order(entries):
        is_turn = entry.role == "assistant" and entry.trained
        if is_turn and not record.messages and entry.prompt_ids is None:
            missing = "the conversation begins with the assistant, its prompt is missing"
            raise Unreadable("no_prompt", f"{record.agent_id}: {missing}")
        if is_turn and not (blocks and in_turn):
            turns.append(([], []))
        if is_turn:
            turns[-1][0].append(entry)
        elif turns and entry.role != "assistant":
            turns[-1][1].append(entry)
        in_turn = is_turn
        record.messages.append(_message(entry, len(turns) - 1 if turns else None))
    record.turns += [_turn(number, *turn, options, bare_calls) for number, turn in enumerate(turns)]
    if answers != "none":
        _accept_answers(record, entries, answers)
    return record


def in_call_order(entries: Sequence[Message]) -> Sequence[Message]:
    """Return the entries with parallel results in the order of their calls, since templates write no ids.

    Results keep their order where one of them names no call or several, and in a conversation with recorded ids.
    """
    parallel = [start for start, entry in enumerate(entries) if len(entry.calls) > 1]
    if not parallel or any(entry.prompt_ids is not None for entry in entries):
        return entries
    ordered = list(entries)
    for start in parallel:
        end = start + 1
        while end < len(entries) and entries[end].role == "tool":
            end += 1
        names = [{call.id, call.name} for call in entries[start].calls]
        places = [[i for i, of in enumerate(names) if result.result_of in of] for result in entries[start + 1 : end]]
        firsts = [place[0] for place in places if len(place) == 1]
        if len(set(firsts)) == len(places):
            results = zip(firsts, range(start + 1, end), strict=True)
            ordered[start + 1 : end] = [entries[at] for _, at in sorted(results)]
    return ordered


def _accept_answers(record: AgentRecord, entries: Sequence[Message], answers: Answers) -> None:
    """Record a conversation that ends in a final answer as finished, and turns that are answers as readable.

    A final answer is assistant text without a call, not truncated. A model trained without them does not learn to stop.
    """
    spoken = [(e, of) for e, of in pairwise([*entries, None]) if e and e.role == "assistant" and e.trained]
    ended = bool(record.turns) and exit_kind(record.exit_status) == "ended"
    if ended := ended and entries[-1] is spoken[-1][0] and _accept(record.turns[-1], entries[-1]):
        record.exit_status = "Submitted"
    if answers == "all" or (ended and answers == "answered"):
        pairs = list(zip(record.turns, spoken, strict=True))
        texts = [(turn, e) for turn, (e, of) in pairs if answers == "all" or (of is not None and of.role == "user")]
        if answers == "all" or not any(turn.actions for turn, _ in texts):
            for turn, entry in texts:
                _accept(turn, entry)


def _accept(turn: Turn, entry: Message) -> bool:
    """Clear the parse error of a turn that is an answer in words; return whether it is one."""
    is_text = not entry.broken_call and bool(entry.text.strip())
    accepted = is_text and turn.parse_error == NO_ACTION and turn.finish_reason != "length"
    turn.parse_error = None if accepted else turn.parse_error
    return accepted


def _message(entry: Message, turn: int | None) -> records.Message:
    return records.Message(
        role=entry.role,
        content=entry.text,
        turn=turn,
        kind=entry.kind or _kind(entry, turn),
        reasoning=entry.thought,
        tool_calls=[call.as_dict() for call in entry.calls] or None,
        at=entry.time,
    )


def _turn(number: int, group: Sequence[Message], answer: Sequence[Message], options: Options, bare_calls: bool) -> Turn:
    entry = group[0] if len(group) == 1 else joined(group)
    native = entry.output_ids is not None
    actions, error = entry.actions, None
    if not actions:
        actions, error = read_actions(entry.text, entry.calls, options.message_commands, bare_calls)
    commands = options.receive_commands
    receives = bool(commands) and any(name in action.command for name in commands for action in actions)
    codes = [entry.exit_code for entry in answer if entry.exit_code is not None]
    return Turn(
        turn=number,
        content=entry.text,
        prompt_ids=entry.prompt_ids if native else None,
        output_ids=entry.output_ids,
        logprobs=entry.logprobs if native else None,
        capture=entry.capture if native else "none",
        finish_reason=entry.finish,
        reasoning=entry.thought or None,
        actions=actions,
        parse_error=error,
        observation="\n".join([entry.text for entry in answer]) if answer else None,
        exit_code=codes[-1] if codes else None,
        inbox=[message for entry in answer for message in _inbox(entry, receives)],
        at=entry.time,
    )


def joined(group: Sequence[Message]) -> Message:
    """Return the blocks of one response as one message, without ids."""
    return Message(
        "assistant",
        "\n".join(entry.text for entry in group if entry.text),
        [call for entry in group for call in entry.calls],
        "\n".join(entry.thought for entry in group if entry.thought),
        next((entry.time for entry in group if entry.time is not None), None),
        finish=group[-1].finish,
        actions=[action for entry in group for action in entry.actions or ()],
    )


def _kind(entry: Message, turn: int | None) -> str:
    if entry.role == "assistant":
        return "action" if entry.trained else "other"
    if entry.role == "user" and entry.text.startswith("[") and _INBOX_LINE.match(entry.text):
        return "inbox"
    return "prompt" if turn is None else "observation"


def _inbox(entry: Message, receives: bool) -> list[dict[str, str]]:
    """Return the entry's inbox, or parse its text: `[Message from NAME]: …` and `[Reply from NAME]: …`.

    `receives`: the turn ran a receive command, so JSON lists of {"from", "content"} are messages too.
    """
    if entry.inbox is not None:
        return entry.inbox
    text = entry.text
    marked = "[" in text and ("[Message from " in text or "[Reply from " in text)  # one character is found far faster
    if not marked and not receives:
        return []
    marks = list(_INBOX_LINE.finditer(text)) if marked else []
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    bodies = (text[mark.end() : end].partition("\n</output>")[0] for mark, end in zip(marks, ends, strict=False))
    messages = [{"from": mark[1], "message": body.strip()} for mark, body in zip(marks, bodies, strict=True)]
    start = _INBOX_LIST.search(text) if receives else None
    while start is not None:
        try:
            value, end = _DECODER.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            value, end = None, start.end()
        for item in value if isinstance(value, list) else ():
            sender, body = text_field(item, "from"), text_field(item, "content") or text_field(item, "message")
            if sender and body:
                messages.append({"from": sender, "message": body})
        start = _INBOX_LIST.search(text, end)
    return messages


def token_ids(value: Any, name: str) -> list[int]:
    """Return a non-empty list of token ids (non-negative int32) as it is. Raises Unreadable: `bad_token_ids`."""
    if not isinstance(value, list) or not value or not all(type(i) is int and 0 <= i < 2**31 for i in value):
        raise Unreadable("bad_token_ids", f"{name} is not a non-empty list of token ids")
    return value


def set_ids(turn: Message | Turn, prompt: Any, output: Any, logprobs: Any, name: str) -> None:
    """Set a turn's prompt and output ids, and a log-probability for each output id as a float32 column holds it.

    Raises Unreadable: `bad_token_ids`, `bad_logprobs`.
    """
    turn.prompt_ids = token_ids(prompt, f"{name}, ids of the prompt")
    turn.output_ids = token_ids(output, f"{name}, ids of the output")
    turn.logprobs = None
    if logprobs:
        numbers = logprobs if isinstance(logprobs, list) else []
        if len(numbers) != len(turn.output_ids) or not all(
            type(x) in (int, float) and abs(x) <= _MOST_LOGPROB for x in numbers
        ):
            short = f"not one log-probability for each of the {len(turn.output_ids)} output ids"
            raise Unreadable("bad_logprobs", f"{name}, logprobs: {short}")
        turn.logprobs = np.asarray(numbers, np.float32).tolist()


def finish_of(reason: str | None) -> str | None:
    """Map a provider's finish reason to "stop" or "length"; others stay as written."""
    return _FINISHES.get(reason or "", reason)
