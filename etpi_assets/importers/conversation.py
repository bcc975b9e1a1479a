"""From a list of chat messages to one agent's record: its turns, their actions and their observations.

A turn is the model's output for one request. Most formats write one message per request, so a message is a turn. Some
write one message per content block (`blocks`); there an unbroken run of assistant messages is a turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any, Literal

from etpi_assets.agent.actions import NO_ACTION, read_actions
from etpi_assets.importers.source import (
    Unreadable,
    as_mapping,
    content_parts,
    content_text,
    field,
    text_field,
    to_utc,
    tool_calls,
    without_padding,
)
from etpi_assets.trajectories.records import Action, AgentRecord, Message, Turn

Role = Literal["system", "user", "assistant", "tool"]
Answers = Literal["none", "last", "answered", "all"]
"""Which texts of a conversation are answers: none, the last message, also those before a message of the user (not where
results come as such messages: that message may be the harness's, which found no call), or all, where the program
reads structured calls alone."""

ROLES: Mapping[str, Role] = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "ai": "assistant", "model": "assistant",
    "tool": "tool", "function": "tool", "ipython": "tool", "environment": "tool", "observation": "tool",
    "tool_response": "tool", "function_response": "tool", "tool_result": "tool",
}  # fmt: skip
"""Role names of other programs -> role in etpi."""
CALL_ROLES = ("tool_call", "tool_calls", "function_call")
"""Roles of messages that are only calls, as JSON (ms-swift, LLaMA-Factory)."""
_FLAGS = ("weight", "train", "loss", "loss_mask", "loss_weight", "trainable")
"""Keys that say whether a message is trained: OpenAI, axolotl, ms-swift, verl, LLaMA-Factory, and others."""
_PARTLY = ("train_detail", "training_detail")
_FLAG_KEYS = frozenset((*_FLAGS, *_PARTLY))
_TRUTH = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}

_INBOX_LINE = re.compile(r"^\[(?:Message|Reply) from (\w+)[^\]\n]*\]: ?", re.MULTILINE)
_INBOX_LIST = re.compile(r"\[\s*\{")
_EXIT_CODE = re.compile(r"\A\s*<returncode>(-?\d{1,6})</returncode>")
_FINISHES = {
    **dict.fromkeys(("tool_calls", "function_call", "tool_use", "end_turn", "stop_sequence", "STOP"), "stop"),
    **dict.fromkeys(("max_tokens", "max_output_tokens", "MAX_TOKENS", "model_context_window_exceeded"), "length"),
    **dict.fromkeys(("content_filter", "SAFETY", "RECITATION", "abort", "error"), "length"),  # cut too
}
_FINISH = frozenset({"finish_reason", "stop_reason", "response_metadata"})
_REASONING_TEXTS = ("reasoning_content", "reasoning", "thinking")
_REASONING_BLOCKS = ("thinking_blocks", "reasoning_details")
_REASONING = frozenset((*_REASONING_TEXTS, *_REASONING_BLOCKS))
_COMMON = frozenset({"role", "content", "tool_calls", "tool_call_id", "name"})
"""Keys of most messages."""
_TEXTS = ("text", "value", "output", "result")
"""Keys under which other programs write what is `content` in a chat API."""
_NAMES = (("id",), ("call_id",), ("name",), ("function", "name"))
"""Keys of a call with the name that its result repeats."""
_DECODER = json.JSONDecoder(strict=False)


@dataclass(slots=True)
class ChatEntry:
    """One message of an imported conversation.

    Attributes:
        learn: the message is a turn of the agent, not context.
        inbox: messages of other agents that it shows; None: `fill_agent` parses them from the text.
        actions: actions of the turn as the source recorded them; None: `fill_agent` parses them from the text.
        calls: the message calls a tool, even if the call cannot be parsed.
        answers: of a result, the id of the call that it answers, or the tool's name.
    """

    role: Role
    content: str
    tool_calls: list[dict[str, Any]] | None = None
    reasoning: str | None = None
    at: datetime | None = None
    learn: bool = True
    kind: str | None = None
    prompt_ids: list[int] | None = None
    output_ids: list[int] | None = None
    logprobs: list[float] | None = None
    capture: Literal["native", "retokenised"] = "native"
    finish_reason: str | None = None
    exit_code: int | None = None
    inbox: list[dict[str, str]] | None = None
    actions: list[Action] | None = None
    calls: bool = False
    answers: str | None = None


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


def chat_entries(messages: Iterable[Any], what: str) -> list[ChatEntry]:
    """Parse messages of a chat API, with the `extra` fields of mini-swe-agent and CooperBench.

    An assistant message that its own flag excludes from the loss (`is_trained`) becomes context, not a turn.

    Raises:
        Unreadable: `unknown_role`, `non_text_content`, `bad_token_ids`, `partly_trained` or `unknown_form`, naming the
            message.
    """
    entries: list[ChatEntry] = []
    messages = list(messages)
    if [m for m in messages if isinstance(m, dict) and m.get("role") == "user" and m.get("tool_calls", m) is None]:
        messages = without_padding(messages)  # only tables give the user's messages a key for calls
    for index, raw in enumerate(messages):
        message = raw if isinstance(raw, dict) else as_mapping(raw, f"{what}[{index}]")
        if "role" not in message and isinstance(message.get("data"), dict):  # as LangChain dumps messages
            message = {**message["data"], "type": message.get("type")}
        role = message["role"] if "role" in message else message.get("type")  # LangChain calls it `type`
        if role == "exit":  # mini-swe-agent's last entry records how the run ended; no model reads it
            continue
        content, name = message.get("content"), f"{what}[{index}]"
        if content is None and (keys := [k for k in _TEXTS if isinstance(message.get(k), str) and message[k]]):
            raise Unreadable(
                "unknown_form", f"{name} has its text in {keys[0]!r}: call it `content`, or name it in a map"
            )
        mapped = ROLES.get(role) if isinstance(role, str) else None
        if mapped is None:
            mapped = role_of(role, ROLES, name)
            if mapped == "call":
                add_calls(entries, content_text(content, name), message, name)
                continue
        if isinstance(content, str):
            entry = ChatEntry(mapped, content)
        else:
            parts = content_parts(content, name)
            if parts.results:  # Anthropic's results stand in a user message
                entries += [ChatEntry("tool", text, answers=answers) for answers, text in parts.results]
                if not parts.text:
                    continue
            entry = ChatEntry(mapped, parts.text, tool_calls(list(parts.calls), name), parts.reasoning)
        if len(message) > 2 or content is None:
            _read_extra_keys(entry, message, name)
        if entry.exit_code is None and mapped != "assistant" and (printed := _EXIT_CODE.match(entry.content)):
            entry.exit_code = int(printed[1])
        entries.append(entry)
    return entries


def role_of(role: Any, known: Mapping[str, Role], what: str) -> Role | Literal["call"]:
    """Return etpi's role for a name in any case, "call" for `CALL_ROLES`. Raises Unreadable: `unknown_role`."""
    name = role.lower() if isinstance(role, str) else ""
    if name in CALL_ROLES:
        return "call"
    if name not in known:
        raise Unreadable("unknown_role", f"{what} has role {role!r}; known are {', '.join([*known, *CALL_ROLES])}")
    return known[name]


def add_calls(entries: list[ChatEntry], text: str, message: Mapping[str, Any], what: str) -> None:
    """Add the calls of a message that is only calls, to the assistant's message before it if there is one."""
    learn = is_trained(message, what)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        entries.append(ChatEntry("assistant", text, learn=learn, calls=True))  # `parse_error` says why
        return
    calls = tool_calls(value if isinstance(value, list) else [value], what)
    last = entries[-1] if entries else None
    if last is not None and last.role == "assistant" and last.learn == learn and not last.calls:
        last.tool_calls = [*(last.tool_calls or ()), *(calls or ())]
    else:
        entries.append(ChatEntry("assistant", "", calls, learn=learn))


def is_trained(message: Mapping[str, Any], what: str) -> bool:
    """Return whether a message's own flags let it be trained: none of `_FLAGS` is 0 or false.

    Raises:
        Unreadable: `partly_trained` for another weight than 0 and 1, and for flags of parts of the message.
    """
    if _FLAG_KEYS.isdisjoint(message):
        return True
    trained = True
    for key in _FLAGS:
        if (value := message.get(key)) is None:
            continue
        values = value if isinstance(value, list) and value else [value]
        flags = {_TRUTH.get(str(v).lower()) for v in values}
        if flags not in ({True}, {False}):
            raise Unreadable(
                "partly_trained",
                f"{what} has {key} = {str(value)[:40]}; a message is trained (1) or context (0), so write one of them, "
                "or remove the key",
            )
        trained = trained and flags == {True}
    if any(message.get(key) for key in _PARTLY):
        raise Unreadable("partly_trained", f"{what} has {' or '.join(_PARTLY)}; only whole messages can be left out")
    return trained


def _read_extra_keys(entry: ChatEntry, message: Mapping[str, Any], name: str) -> None:
    """Set the entry's fields from the keys of a message other than role and content."""
    calls = message.get("tool_calls")
    if not calls and "function_call" in message and text_field(message, "function_call", "name"):
        calls = [{"function": message["function_call"]}]  # OpenAI's older form of a call
    if calls is not None:
        entry.tool_calls = tool_calls(calls, name) or entry.tool_calls
    if entry.role == "tool":
        entry.answers = answered_call(message)
    if message.keys() <= _COMMON:
        return
    if not _REASONING.isdisjoint(message):
        entry.reasoning = reasoning_of(message, name) or entry.reasoning
    entry.at = to_utc(message.get("timestamp"))
    if entry.role == "assistant":
        entry.content = entry.content or text_field(message, "refusal") or ""
        entry.learn = is_trained(message, name)
        if not _FINISH.isdisjoint(message):
            entry.finish_reason = _finish_reason(message)
    extra = message.get("extra")
    if not isinstance(extra, dict):
        return
    entry.at = to_utc(extra.get("timestamp")) or entry.at
    entry.learn = entry.learn and extra.get("summary") is not True
    entry.prompt_ids, entry.output_ids = _captured_ids(extra.get("token_capture"), name)
    choices = field(extra, "response", "choices")
    if isinstance(choices, list) and choices:
        entry.finish_reason = finish_of(text_field(choices[0], "finish_reason")) or entry.finish_reason
    code = extra.get("returncode")
    entry.exit_code = code if type(code) is int else None


def reasoning_of(message: Mapping[str, Any], what: str) -> str | None:
    """Return a message's reasoning, from the key that its API uses for it."""
    if text := next(filter(None, (text_field(message, key) for key in _REASONING_TEXTS)), None):
        return text
    for key in _REASONING_BLOCKS:
        if isinstance(blocks := message.get(key), list):
            return content_parts([b for b in blocks if isinstance(b, dict) and "data" not in b], what).reasoning
    return None


def answered_call(message: Mapping[str, Any]) -> str | None:
    """Return the id of the call that a result answers, or the tool's name."""
    if named := text_field(message, "tool_call_id"):
        return named
    ids = message.get("tool_call_ids")  # SWE-agent
    only = ids[0] if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], str) else None
    return only or text_field(message, "name")


def _finish_reason(message: Mapping[str, Any]) -> str | None:
    """Return why the model stopped, from the message itself or from LangChain's metadata."""
    places = (message, message.get("response_metadata"))
    reasons = (text_field(place, key) for place in places for key in ("finish_reason", "stop_reason"))
    return finish_of(next(filter(None, reasons), None))


def fill_agent(
    record: AgentRecord,
    entries: Sequence[ChatEntry],
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

    Raises:
        Unreadable: `no_prompt` if the conversation begins with the assistant.
    """
    turns: list[list[ChatEntry]] = []
    results: list[list[ChatEntry]] = []
    in_turn = False
    for entry in in_call_order(entries):
        is_turn = entry.role == "assistant" and entry.learn
        if is_turn and not record.messages and entry.prompt_ids is None:
            raise Unreadable(
                "no_prompt", f"{record.agent_id}: the conversation begins with the assistant, its prompt is missing"
            )
        if is_turn and not (blocks and in_turn):
            turns.append([])
            results.append([])
        if is_turn:
            turns[-1].append(entry)
        elif turns and entry.role != "assistant":
            results[-1].append(entry)
        in_turn = is_turn
        record.messages.append(_message(entry, len(turns) - 1 if turns else None))
    for number, (group, result) in enumerate(zip(turns, results, strict=True)):
        record.turns.append(_turn(number, group, result, options, bare_calls))
    if answers != "none":
        _accept_answers(record, entries, answers)
    return record


def in_call_order(entries: Sequence[ChatEntry]) -> Sequence[ChatEntry]:
    """Return the entries with parallel results in the order of their calls, since templates write no ids.

    Results keep their order where one of them names no call or several, and in a conversation with recorded ids.
    """
    parallel = [start for start, entry in enumerate(entries) if entry.tool_calls and len(entry.tool_calls) > 1]
    if not parallel or any(entry.prompt_ids is not None for entry in entries):
        return entries
    ordered = list(entries)
    for start in parallel:
        end = start + 1
        while end < len(entries) and entries[end].role == "tool":
            end += 1
        names = [
            {name for keys in _NAMES if (name := text_field(call, *keys))} for call in entries[start].tool_calls or ()
        ]
        places = [[i for i, of in enumerate(names) if result.answers in of] for result in entries[start + 1 : end]]
        firsts = [place[0] for place in places if len(place) == 1]
        if len(set(firsts)) == len(places):
            results = zip(firsts, range(start + 1, end), strict=True)
            ordered[start + 1 : end] = [entries[at] for _, at in sorted(results)]
    return ordered


def _accept_answers(record: AgentRecord, entries: Sequence[ChatEntry], answers: Answers) -> None:
    """Record a conversation that ends in a final answer as finished, and turns that are answers as readable.

    A final answer is assistant text without a call, not truncated. A model trained without them does not learn to stop.
    """
    if not record.turns or record.exit_status not in ("unknown", "Submitted"):
        ended = False
    elif ended := _accept(record.turns[-1], entries[-1]):
        record.exit_status = "Submitted"
    if answers == "all" or (ended and answers == "answered"):
        spoken = ((e, after) for e, after in pairwise([*entries, None]) if e and e.role == "assistant" and e.learn)
        texts = [
            (turn, entry)
            for turn, (entry, after) in zip(record.turns, spoken, strict=True)
            if answers == "all" or (after is not None and after.role == "user")
        ]
        if answers == "all" or not any(turn.actions for turn, _ in texts):
            for turn, entry in texts:
                _accept(turn, entry)


def _accept(turn: Turn, entry: ChatEntry) -> bool:
    """Clear the parse error of a turn that is an answer in words; return whether it is one."""
    is_text = entry.role == "assistant" and entry.learn and not entry.calls and bool(entry.content.strip())
    accepted = is_text and turn.parse_error == NO_ACTION and turn.finish_reason != "length"
    if accepted:
        turn.parse_error = None
    return accepted


def _message(entry: ChatEntry, turn: int | None) -> Message:
    return Message(
        role=entry.role,
        content=entry.content,
        turn=turn,
        kind=entry.kind or _kind(entry, turn),
        reasoning=entry.reasoning,
        tool_calls=entry.tool_calls,
        at=entry.at,
    )


def _turn(
    number: int, group: Sequence[ChatEntry], answer: Sequence[ChatEntry], options: Options, bare_calls: bool
) -> Turn:
    entry = group[0] if len(group) == 1 else joined(group)
    native = entry.output_ids is not None
    actions, error = entry.actions, None
    if not actions:
        actions, error = read_actions(entry.content, entry.tool_calls, options.message_commands, bare_calls)
    receives = any(name in action.command for name in options.receive_commands for action in actions)
    codes = [entry.exit_code for entry in answer if entry.exit_code is not None]
    return Turn(
        turn=number,
        content=entry.content,
        prompt_ids=entry.prompt_ids if native else None,
        output_ids=entry.output_ids,
        logprobs=entry.logprobs if native else None,
        capture=entry.capture if native else "none",
        finish_reason=entry.finish_reason,
        reasoning=entry.reasoning or None,
        actions=actions,
        parse_error=error,
        observation="\n".join([entry.content for entry in answer]) if answer else None,
        exit_code=codes[-1] if codes else None,
        inbox=[message for entry in answer for message in _inbox(entry, receives)],
        at=entry.at,
    )


def joined(group: Sequence[ChatEntry]) -> ChatEntry:
    """Return the blocks of one response as one message, without ids."""
    return ChatEntry(
        "assistant",
        "\n".join(entry.content for entry in group if entry.content),
        [call for entry in group for call in entry.tool_calls or ()],
        "\n".join(entry.reasoning for entry in group if entry.reasoning),
        next((entry.at for entry in group if entry.at is not None), None),
        finish_reason=group[-1].finish_reason,
        actions=[action for entry in group for action in entry.actions or ()],
    )


def _kind(entry: ChatEntry, turn: int | None) -> str:
    if entry.role == "assistant":
        return "action" if entry.learn else "other"
    if entry.role == "user" and entry.content.startswith("[") and _INBOX_LINE.match(entry.content):
        return "inbox"
    return "prompt" if turn is None else "observation"


def _inbox(entry: ChatEntry, receives: bool) -> list[dict[str, str]]:
    """Return the entry's inbox, or parse its text: `[Message from NAME]: …` and `[Reply from NAME]: …`.

    `receives`: the turn ran a receive command, so JSON lists of {"from", "content"} are messages too.
    """
    if entry.inbox is not None:
        return entry.inbox
    text = entry.content
    marked = "[Message from " in text or "[Reply from " in text
    if not marked and not receives:
        return []
    marks = list(_INBOX_LINE.finditer(text)) if marked else []
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    messages = [
        {"from": mark[1], "message": text[mark.end() : end].partition("\n</output>")[0].strip()}
        for mark, end in zip(marks, ends, strict=False)
    ]
    start = _INBOX_LIST.search(text) if receives else None
    while start is not None:
        try:
            value, end = _DECODER.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            value, end = None, start.end()
        if isinstance(value, list):
            messages.extend(
                {"from": sender, "message": body}
                for item in value
                if (sender := text_field(item, "from"))
                and (body := text_field(item, "content") or text_field(item, "message"))
            )
        start = _INBOX_LIST.search(text, end)
    return messages


def _captured_ids(capture: Any, what: str) -> tuple[list[int] | None, list[int] | None]:
    """Return prompt and output ids in the form of CooperBench 0.0.29."""
    if capture is None:
        return None, None
    name = f"{what}.extra.token_capture"
    ids = as_mapping(capture, name)
    prompt, output = (token_ids(ids.get(key), f"{name}.{key}") for key in ("prompt_token_ids", "output_token_ids"))
    return prompt, output


def token_ids(value: Any, name: str) -> list[int]:
    """Return `value` if it is a non-empty list of token ids (non-negative int32).

    Raises:
        Unreadable: `bad_token_ids`.
    """
    if not isinstance(value, list) or not value or not all(type(i) is int and 0 <= i < 2**31 for i in value):
        raise Unreadable("bad_token_ids", f"{name} is not a non-empty list of token ids")
    return value


def finish_of(reason: str | None) -> str | None:
    """Map a provider's finish reason to "stop" or "length"; others stay as written."""
    return _FINISHES.get(reason or "", reason)
