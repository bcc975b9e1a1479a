"""From a list of chat messages to one agent's record: which messages are turns, what answers them, what they did.

Belongs here: what every chat-like format shares. Does not belong here: where a format keeps its messages and verdicts.

A turn is what the model generated for one request. Formats that write a message a request give one turn a message;
those that write a message a content block (`blocks`) give one turn for each unbroken run of assistant messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from etpi_assets.agent.actions import read_actions
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
"""Role names that are in use, and what they mean."""

_INBOX_LINE = re.compile(r"^\[(?:Message|Reply) from (\w+)[^\]\n]*\]: ?", re.MULTILINE)
_INBOX_LIST = re.compile(r"\[\s*\{")
_EXIT_CODE = re.compile(r"\A\s*<returncode>(-?\d{1,6})</returncode>")
_DECODER = json.JSONDecoder(strict=False)


@dataclass(slots=True)
class Entry:
    """One message on its way in. `learn`: an assistant message that the agent generated as a turn. `calls`: it means to
    call a tool, whether or not that can be read. `inbox`: the mail it
    shows, `actions`: what a turn did, where the source says so; None: they are read from the text."""

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
    """How an imported rollout set is read (`options` of its spec).

    Attributes:
        message_commands: shell commands and tools with which agents write to one another.
        receive_commands: shell commands that print the messages that came in, as a JSON list of {"from", "content"}.
        teacher: who acted, where the source does not say.
        repo: the repository, where the source does not say (CooperBench's folders do).
        tokenizer: the chat format ("tiny", "qwen3" or a folder) whose ids a data set of token ids holds.
        capture: what such ids are, where its rows do not say: "native" or "retokenised".
    """

    message_commands: tuple[str, ...] = ("send_message",)
    receive_commands: tuple[str, ...] = ()
    teacher: str | None = None
    repo: str | None = None
    tokenizer: str | None = None
    capture: str = "retokenised"


def chat_entries(messages: Iterable[Any], what: str) -> list[Entry]:
    """Messages in the manner of chat APIs, with what mini-swe-agent and CooperBench keep under `extra`.

    An assistant message of `weight` 0 (a fine-tuning API's word for "do not learn this") is read, never learnt.

    Raises:
        Unreadable: `unknown_role`, `non_text_content`, `bad_token_ids` or `unknown_form`, naming the message.
    """
    entries = []
    for index, raw in enumerate(messages):
        message = raw if isinstance(raw, dict) else as_mapping(raw, f"{what}[{index}]")
        role = message.get("role")
        if role == "exit":  # mini-swe-agent's last entry: how the run ended, which no model reads
            continue
        known = ROLES.get(role) if isinstance(role, str) else None
        if known is None:
            raise Unreadable("unknown_role", f"{what}[{index}] has role {role!r}; known are {', '.join(ROLES)}")
        content = message.get("content")
        if isinstance(content, str):
            entry = Entry(known, content)
        else:
            parts = content_parts(content, f"{what}[{index}]")
            calls = tool_calls(list(parts.calls), f"{what}[{index}]")
            entry = Entry(known, parts.text, calls, parts.reasoning)
        if len(message) > 2:
            _beside(entry, message, f"{what}[{index}]")
        if entry.exit_code is None and known != "assistant" and (printed := _EXIT_CODE.match(entry.content)):
            entry.exit_code = int(printed[1])
        entries.append(entry)
    return entries


def _beside(entry: Entry, message: Mapping[str, Any], name: str) -> None:
    """What a message holds besides its role and content."""
    given = message.get("tool_calls")
    if given is None and isinstance(message.get("function_call"), dict):  # what calls were before they had ids
        given = [{"function": message["function_call"]}]
    if given is not None:
        entry.tool_calls = tool_calls(given, name) or entry.tool_calls
    entry.reasoning = text_field(message, "reasoning_content") or text_field(message, "reasoning") or entry.reasoning
    entry.at = to_utc(message.get("timestamp"))
    weight = message.get("weight")
    entry.learn = not (isinstance(weight, int | float) and weight == 0)
    extra = message.get("extra")
    if not isinstance(extra, dict):
        return
    entry.at = to_utc(extra.get("timestamp")) or entry.at
    entry.learn = entry.learn and extra.get("summary") is not True
    entry.prompt_ids, entry.output_ids = _captured(extra.get("token_capture"), name)
    choices = field(extra, "response", "choices")
    entry.finish_reason = (
        finish_of(text_field(choices[0], "finish_reason")) if isinstance(choices, list) and choices else None
    )
    code = extra.get("returncode")
    entry.exit_code = code if type(code) is int else None


def build_agent(
    entries: Sequence[Entry],
    *,
    agent_id: str,
    feature_id: str,
    role: str,
    exit_status: str,
    options: Options,
    blocks: bool = False,
    bare_calls: bool = False,
    patch: str | None = None,
) -> AgentRecord:
    """One agent's record. `blocks`: consecutive assistant messages are blocks of one response. `bare_calls`: the
    agent's harness takes `<function=NAME>` for a call without a `<tool_call>` around it.

    Raises:
        Unreadable: `no_prompt` where the conversation begins with the assistant.
    """
    record = AgentRecord(agent_id, feature_id, role, exit_status, patch=patch)
    groups: list[list[Entry]] = []
    answers: list[list[Entry]] = []
    open_turn = False
    for entry in entries:
        learnt = entry.role == "assistant" and entry.learn
        if learnt and not record.messages and entry.prompt_ids is None:
            raise Unreadable(
                "no_prompt", f"{agent_id}: the conversation begins with the assistant, its prompt is missing"
            )
        if learnt and not (blocks and open_turn):
            groups.append([])
            answers.append([])
        if learnt:
            groups[-1].append(entry)
        elif groups and entry.role != "assistant":
            answers[-1].append(entry)
        open_turn = learnt
        turn = len(groups) - 1 if groups else None
        record.messages.append(
            Message(
                role=entry.role,
                content=entry.content,
                turn=turn,
                kind=entry.kind or _kind(entry, turn),
                reasoning=entry.reasoning,
                tool_calls=entry.tool_calls,
                at=entry.at,
            )
        )
    for number, (group, answer) in enumerate(zip(groups, answers, strict=True)):
        record.turns.append(_turn(number, group, answer, options, bare_calls))
    return record


def _turn(number: int, group: Sequence[Entry], answer: Sequence[Entry], options: Options, bare_calls: bool) -> Turn:
    content = "\n".join(entry.content for entry in group if entry.content)
    calls = [call for entry in group for call in entry.tool_calls or ()]
    given = [action for entry in group for action in entry.actions or ()]
    if given:
        actions, error = given, None
    else:
        actions, error = read_actions(content, calls or None, options.message_commands, bare_calls)
    reads = any(name in action.command for action in actions for name in options.receive_commands)
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
        inbox=[m for entry in answer for m in (_inbox(entry.content, reads) if entry.inbox is None else entry.inbox)],
        at=next((entry.at for entry in group if entry.at is not None), None),
    )


def _kind(entry: Entry, turn: int | None) -> str:
    if entry.role == "assistant":
        return "action" if entry.learn else "other"
    if entry.role == "user" and entry.content.startswith("[") and _INBOX_LINE.match(entry.content):
        return "inbox"
    return "prompt" if turn is None else "observation"


def _inbox(text: str, reads: bool) -> list[dict[str, str]]:
    """Messages shown in an observation: `[Message from NAME]: …`, `[Reply from NAME]: …`, and, where the turn asked for
    its mail, JSON lists of {"from", "content"}."""
    marks = list(_INBOX_LINE.finditer(text)) if "[Message from " in text or "[Reply from " in text else []
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    found = [
        {"from": mark[1], "message": text[mark.end() : end].partition("\n</output>")[0].strip()}
        for mark, end in zip(marks, ends, strict=False)
    ]
    start = _INBOX_LIST.search(text) if reads else None
    while start is not None:
        try:
            value, end = _DECODER.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            value, end = None, start.end()
        if isinstance(value, list):
            found.extend(
                {"from": sender, "message": body}
                for item in value
                if (sender := text_field(item, "from"))
                and (body := text_field(item, "content") or text_field(item, "message"))
            )
        start = _INBOX_LIST.search(text, end)
    return found


def _captured(capture: Any, what: str) -> tuple[list[int] | None, list[int] | None]:
    """Token ids as CooperBench 0.0.29 keeps them."""
    if capture is None:
        return None, None
    name = f"{what}.extra.token_capture"
    given = as_mapping(capture, name)
    prompt, output = (token_ids(given.get(key), f"{name}.{key}") for key in ("prompt_token_ids", "output_token_ids"))
    return prompt, output


def token_ids(value: Any, name: str) -> list[int]:
    """A list of token ids, int32 and not negative. An empty one is an error: it would pass for a native turn.

    Raises:
        Unreadable: `bad_token_ids`.
    """
    if not isinstance(value, list) or not value or not all(type(i) is int and 0 <= i < 2**31 for i in value):
        raise Unreadable("bad_token_ids", f"{name} is not a non-empty list of token ids")
    return value


def finish_of(reason: str | None) -> str | None:
    """A provider's word for why a turn ended, in etpi's: stop or length where it is one of those."""
    return {"tool_calls": "stop", "end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length"}.get(
        reason or "", reason
    )
