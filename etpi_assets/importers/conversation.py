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
from typing import Any, Literal

from etpi_assets.agent.actions import NO_ACTION, read_actions
from etpi_assets.importers.source import (
    Unreadable,
    as_mapping,
    content_parts,
    field,
    text_field,
    to_utc,
    tool_calls,
)
from etpi_assets.trajectories.records import Action, AgentRecord, Message, Turn

ROLES: Mapping[str, Literal["system", "user", "assistant", "tool"]] = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "ai": "assistant", "model": "assistant",
    "tool": "tool", "function": "tool", "ipython": "tool", "environment": "tool",
}  # fmt: skip
"""Role names of other programs -> role in etpi."""

_INBOX_LINE = re.compile(r"^\[(?:Message|Reply) from (\w+)[^\]\n]*\]: ?", re.MULTILINE)
_INBOX_LIST = re.compile(r"\[\s*\{")
_EXIT_CODE = re.compile(r"\A\s*<returncode>(-?\d{1,6})</returncode>")
_DECODER = json.JSONDecoder(strict=False)


@dataclass(slots=True)
class ChatEntry:
    """One message of an imported conversation.

    Attributes:
        learn: the message is a turn of the agent, not context.
        inbox: messages of other agents that it shows; None: `fill_agent` parses them from the text.
        actions: actions of the turn as the source recorded them; None: `fill_agent` parses them from the text.
        calls: the message calls a tool, even if the call cannot be parsed.
    """

    role: Literal["system", "user", "assistant", "tool"]
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


@dataclass(frozen=True)
class Options:
    """How to read an imported rollout set (`options` of its spec).

    Attributes:
        message_commands: shell commands and tools that send messages to other agents.
        receive_commands: shell commands that print received messages, as a JSON list of {"from", "content"}.
        teacher: name of the model, if the source does not record it.
        repo: the repository, if the source does not record it (CooperBench's folders do).
        tokenizer: chat format of token ids in the source: "tiny", "qwen3" or a folder.
        capture: how those ids were captured, if the rows do not say: "native" or "retokenised".
    """

    message_commands: tuple[str, ...] = ("send_message",)
    receive_commands: tuple[str, ...] = ()
    teacher: str | None = None
    repo: str | None = None
    tokenizer: str | None = None
    capture: str = "retokenised"


def chat_entries(messages: Iterable[Any], what: str) -> list[ChatEntry]:
    """Parse messages of a chat API, with the `extra` fields of mini-swe-agent and CooperBench.

    An assistant message of `weight` 0 (fine-tuning APIs exclude it from the loss) becomes context, not a turn.

    Raises:
        Unreadable: `unknown_role`, `non_text_content`, `bad_token_ids` or `unknown_form`, naming the message.
    """
    entries = []
    for index, raw in enumerate(messages):
        message = raw if isinstance(raw, dict) else as_mapping(raw, f"{what}[{index}]")
        role = message.get("role")
        if role == "exit":  # mini-swe-agent's last entry records how the run ended; no model reads it
            continue
        mapped = ROLES.get(role) if isinstance(role, str) else None
        if mapped is None:
            raise Unreadable("unknown_role", f"{what}[{index}] has role {role!r}; known are {', '.join(ROLES)}")
        content = message.get("content")
        if isinstance(content, str):
            entry = ChatEntry(mapped, content)
        else:
            parts = content_parts(content, f"{what}[{index}]")
            calls = tool_calls(list(parts.calls), f"{what}[{index}]")
            entry = ChatEntry(mapped, parts.text, calls, parts.reasoning)
        if len(message) > 2:
            _read_extra_keys(entry, message, f"{what}[{index}]")
        if entry.exit_code is None and mapped != "assistant" and (printed := _EXIT_CODE.match(entry.content)):
            entry.exit_code = int(printed[1])
        entries.append(entry)
    return entries


def _read_extra_keys(entry: ChatEntry, message: Mapping[str, Any], name: str) -> None:
    """Set the entry's fields from the keys of a message other than role and content."""
    calls = message.get("tool_calls")
    if calls is None and isinstance(message.get("function_call"), dict):  # OpenAI's older form of a call
        calls = [{"function": message["function_call"]}]
    if calls is not None:
        entry.tool_calls = tool_calls(calls, name) or entry.tool_calls
    entry.reasoning = text_field(message, "reasoning_content") or text_field(message, "reasoning") or entry.reasoning
    entry.at = to_utc(message.get("timestamp"))
    weight = message.get("weight")
    entry.learn = not (isinstance(weight, int | float) and weight == 0)
    entry.finish_reason = finish_of(text_field(message, "finish_reason"))
    extra = message.get("extra")
    if not isinstance(extra, dict):
        return
    entry.at = to_utc(extra.get("timestamp")) or entry.at
    entry.learn = entry.learn and extra.get("summary") is not True
    entry.prompt_ids, entry.output_ids = _captured_ids(extra.get("token_capture"), name)
    choices = field(extra, "response", "choices")
    if isinstance(choices, list) and choices:
        entry.finish_reason = finish_of(text_field(choices[0], "finish_reason"))
    code = extra.get("returncode")
    entry.exit_code = code if type(code) is int else None


def fill_agent(
    record: AgentRecord,
    entries: Sequence[ChatEntry],
    options: Options,
    *,
    blocks: bool = False,
    bare_calls: bool = False,
) -> AgentRecord:
    """Add the messages and turns of a conversation to `record`, and return it.

    Args:
        blocks: consecutive assistant messages are content blocks of one response.
        bare_calls: `<function=NAME>` without a `<tool_call>` around it is a call; some harnesses accept it.

    Raises:
        Unreadable: `no_prompt` if the conversation begins with the assistant.
    """
    turns: list[list[ChatEntry]] = []
    answers: list[list[ChatEntry]] = []
    in_turn = False
    for entry in entries:
        is_turn = entry.role == "assistant" and entry.learn
        if is_turn and not record.messages and entry.prompt_ids is None:
            raise Unreadable(
                "no_prompt", f"{record.agent_id}: the conversation begins with the assistant, its prompt is missing"
            )
        if is_turn and not (blocks and in_turn):
            turns.append([])
            answers.append([])
        if is_turn:
            turns[-1].append(entry)
        elif turns and entry.role != "assistant":
            answers[-1].append(entry)
        in_turn = is_turn
        record.messages.append(_message(entry, len(turns) - 1 if turns else None))
    for number, (group, answer) in enumerate(zip(turns, answers, strict=True)):
        record.turns.append(_turn(number, group, answer, options, bare_calls))
    return record


def accept_answer(record: AgentRecord, entries: Sequence[ChatEntry]) -> None:
    """Record a conversation that ends in a final answer as finished, and its last turn as readable.

    A final answer is assistant text without a call, not truncated. A model trained without them does not learn to stop.
    """
    if not record.turns or record.exit_status not in ("unknown", "Submitted"):
        return
    last, turn = entries[-1], record.turns[-1]
    is_text = last.role == "assistant" and last.learn and not last.calls and bool(last.content.strip())
    if is_text and turn.parse_error == NO_ACTION and turn.finish_reason != "length":
        turn.parse_error, record.exit_status = None, "Submitted"


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
    content = "\n".join(entry.content for entry in group if entry.content)
    calls = [call for entry in group for call in entry.tool_calls or ()]
    actions, error = [action for entry in group for action in entry.actions or ()], None
    if not actions:
        actions, error = read_actions(content, calls or None, options.message_commands, bare_calls)
    receives = any(name in action.command for action in actions for name in options.receive_commands)
    reasoning = "\n".join(entry.reasoning for entry in group if entry.reasoning)
    native = len(group) == 1 and group[0].output_ids is not None
    return Turn(
        turn=number,
        content=content,
        prompt_ids=group[0].prompt_ids if native else None,
        output_ids=group[0].output_ids if native else None,
        logprobs=group[0].logprobs if native else None,
        capture=group[0].capture if native else "none",
        finish_reason=group[-1].finish_reason,
        reasoning=reasoning or None,
        actions=actions,
        parse_error=error,
        observation="\n".join(entry.content for entry in answer) if answer else None,
        exit_code=next((e.exit_code for e in reversed(answer) if e.exit_code is not None), None),
        inbox=[message for entry in answer for message in _inbox(entry, receives)],
        at=next((entry.at for entry in group if entry.at is not None), None),
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
    marks = list(_INBOX_LINE.finditer(text)) if "[Message from " in text or "[Reply from " in text else []
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
    return {"tool_calls": "stop", "end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length"}.get(
        reason or "", reason
    )
