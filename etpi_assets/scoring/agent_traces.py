"""Read the tables of a rollout set as one trace per agent, and find the files and functions that a task names.

`etpi_assets.scoring.behaviours` computes the behaviours from them.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from etpi_assets.agent.bash import split_command
from etpi_assets.scoring.entities import KnownFiles, Patterns
from etpi_assets.specs.rollout_set import ScoringSection

AgentKey = tuple[str, str]
"""(rollout_id, agent_id)."""
ReceivedMessage = tuple[int, str, str]
"""(turn whose observation showed the message, or -1 before the first turn; sender; text)."""

_TURN_COLUMNS = [
    "rollout_id",
    "agent_id",
    "turn",
    "actions",
    "inbox",
    "parse_error",
    "think_tokens",
    "post_think_tokens",
]
_SENDER = re.compile(r"(?:INBOX|Message|Reply) from (\w+)[^:\n]*: ?")


@dataclass
class AgentTrace:
    """The actions of one agent in a rollout, in order.

    Attributes:
        turns: assistant turns.
        unreadable_turns: turns whose action could not be parsed.
        tool_turns: turns whose action ran and has an observation; 0 if observations are not read.
        actions: (turn, action) of every readable action.
        inbox: every message that the agent was shown.
    """

    agent_id: str
    exit_status: str | None = None
    turns: int = 0
    unreadable_turns: int = 0
    output_tokens: int | None = None
    tool_turns: int = 0
    think_tokens: int | None = None
    post_think_tokens: int | None = None
    actions: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    inbox: list[ReceivedMessage] = field(default_factory=list)

    @property
    def plan(self) -> tuple[int, str] | None:
        """(index into `actions`, text) of the first message the agent sent; None if it sent none."""
        sent = ((i, a["message"] or "") for i, (_, a) in enumerate(self.actions) if a["kind"] == "send_message")
        return next(sent, None)

    def received(self, before: int) -> list[ReceivedMessage]:
        """Return the messages of other agents that were shown before turn `before` was generated."""
        return [(turn, sender, text) for turn, sender, text in self.inbox if turn < before and sender != self.agent_id]


@dataclass(frozen=True)
class TaskEntities:
    """The files and functions that a task's text names; `text` is None if the task is unknown."""

    text: str | None
    files: KnownFiles
    paths: frozenset[str]
    functions: frozenset[str]

    @classmethod
    def of(cls, text: str | None, patterns: Patterns) -> TaskEntities:
        """Read the entities of a task's text."""
        paths = patterns.paths(text or "")
        return cls(text, KnownFiles(paths), frozenset(paths), frozenset(patterns.functions(text or "")))

    def named_in(self, message: str, patterns: Patterns) -> list[str]:
        """Return the files a message names, then those of its functions that the task names too, each once."""
        paths = dict.fromkeys(self.files.canonical(path) for path in patterns.paths(message))
        functions = [name for name in patterns.functions(message) if self.text is None or name in self.functions]
        return [*paths, *functions]


def before_first_turn(messages: pa.Table | None) -> tuple[dict[str, str], Mapping[AgentKey, list[ReceivedMessage]]]:
    """Return each rollout's prompt text, and the messages each agent received before its first turn."""
    prompts: dict[str, str] = {}
    received: defaultdict[AgentKey, list[ReceivedMessage]] = defaultdict(list)
    if messages is None:
        return prompts, received
    early = messages.filter(messages["turn"].is_null()).select(["rollout_id", "agent_id", "content", "kind"])
    for row in early.to_pylist():
        content = row["content"] or ""
        if row["kind"] == "inbox":
            sender = _SENDER.search(content)
            text = content[sender.end() :] if sender else content
            received[row["rollout_id"], row["agent_id"]].append((-1, sender[1] if sender else "", text))
        elif row["kind"] == "prompt":
            prompts[row["rollout_id"]] = prompts.get(row["rollout_id"], "") + "\n" + content
    return prompts, received


def read_traces(
    agents: pa.Table,
    turns: pa.Table,
    early_messages: Mapping[AgentKey, list[ReceivedMessage]],
    scoring: ScoringSection,
    *,
    tools: bool = False,
) -> dict[str, list[AgentTrace]]:
    """Return the traces of each rollout's agents, in the order of `agents`.

    Args:
        tools: count the turns that called a tool; reads `turns.observation`.
    """
    traces: dict[AgentKey, AgentTrace] = {}
    by_rollout: defaultdict[str, list[AgentTrace]] = defaultdict(list)
    for row in agents.select(["rollout_id", "agent_id", "exit_status", "output_tokens"]).to_pylist():
        key = row["rollout_id"], row["agent_id"]
        traces[key] = AgentTrace(
            row["agent_id"],
            row["exit_status"],
            output_tokens=row["output_tokens"],
            inbox=list(early_messages.get(key, ())),
        )
        by_rollout[row["rollout_id"]].append(traces[key])
    for row in turns.select([*_TURN_COLUMNS, *(["observation"] if tools else [])]).to_pylist():
        _add_turn(traces[row["rollout_id"], row["agent_id"]], row, scoring)
    return by_rollout


def _add_turn(trace: AgentTrace, row: Mapping[str, Any], scoring: ScoringSection) -> None:
    trace.turns += 1
    trace.unreadable_turns += row["parse_error"] is not None
    if row["think_tokens"] is not None:
        trace.think_tokens = (trace.think_tokens or 0) + row["think_tokens"]
    if row["post_think_tokens"] is not None:
        trace.post_think_tokens = (trace.post_think_tokens or 0) + row["post_think_tokens"]
    actions = json.loads(row["actions"] or "[]")
    trace.tool_turns += bool(actions) and row.get("observation") is not None
    for action in actions:
        trace.actions.extend((row["turn"], part) for part in _split_messages(action, scoring))
    for message in json.loads(row["inbox"] or "[]"):
        trace.inbox.append((row["turn"], message["from"], message["message"]))


def _split_messages(action: dict[str, Any], scoring: ScoringSection) -> list[dict[str, Any]]:
    """Split a captured bash action that calls a message command which only the scoring section knows."""
    if action["kind"] != "bash" or not any(name in action["command"] for name in scoring.message_commands):
        return [action]
    split = split_command(action["command"], scoring.message_commands)
    if not split.sent:
        return [action]
    sent = [
        {"kind": "send_message", "command": action["command"], "message": s.message, "to": s.to, "pure": not split.rest}
        for s in split.sent
    ]
    rest = [{**action, "command": split.rest}] if split.rest else []
    return [*sent, *rest] if split.leads else [*rest, *sent]
