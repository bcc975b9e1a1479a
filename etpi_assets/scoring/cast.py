"""Who took part in a rollout, what they did and saw, and the task as its text names things.

Belongs here: reading the tables of a rollout set into what the behaviours look at. Does not belong here: any judgement.
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
from etpi_assets.scoring.entities import Files, Patterns
from etpi_assets.specs.rollout_set import ScoringSection

AgentKey = tuple[str, str]
Mail = tuple[int, str, str]
"""The turn whose observation showed it (-1: before the first turn), the sender, the text."""

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
class Agent:
    """What one agent did, in order.

    Attributes:
        steps: (turn, action) of every readable action.
        tool_turns: turns whose action ran and was answered; counted where observations are read.
        inbox: (turn, sender, text) of every message it was shown; turn -1 before its first turn.
    """

    agent_id: str
    turns: int = 0
    unread: int = 0
    output_tokens: int | None = None
    tool_turns: int = 0
    think_tokens: int | None = None
    post_think_tokens: int | None = None
    steps: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    inbox: list[Mail] = field(default_factory=list)

    @property
    def plan(self) -> tuple[int, str] | None:
        """Index among `steps`, and text, of the first message sent."""
        found = ((i, a["message"] or "") for i, (_, a) in enumerate(self.steps) if a["kind"] == "send_message")
        return next(found, None)

    def received(self, before: int) -> list[Mail]:
        """Messages of others shown in observations before turn `before` was generated."""
        return [(turn, sender, text) for turn, sender, text in self.inbox if turn < before and sender != self.agent_id]


@dataclass(frozen=True)
class Scene:
    """The task as its readers saw it: its text (None where it is unknown), the files and functions it names."""

    text: str | None
    files: Files
    paths: frozenset[str]
    functions: frozenset[str]

    @classmethod
    def of(cls, text: str | None, patterns: Patterns) -> Scene:
        paths = patterns.paths(text or "")
        return cls(text, Files(paths), frozenset(paths), frozenset(patterns.functions(text or "")))

    def entities(self, message: str, patterns: Patterns) -> list[str]:
        """Files a message names, then functions that occur in the task, each once."""
        paths = dict.fromkeys(self.files.same(path) for path in patterns.paths(message))
        known = [name for name in patterns.functions(message) if self.text is None or name in self.functions]
        return [*paths, *known]


def before_first_turn(messages: pa.Table | None) -> tuple[dict[str, str], Mapping[AgentKey, list[Mail]]]:
    """Prompt text of each rollout, and the mail each agent had before its first turn."""
    prompts: dict[str, str] = {}
    mail: defaultdict[AgentKey, list[Mail]] = defaultdict(list)
    if messages is None:
        return prompts, mail
    early = messages.filter(messages["turn"].is_null()).select(["rollout_id", "agent_id", "content", "kind"])
    for row in early.to_pylist():
        content = row["content"] or ""
        if row["kind"] == "inbox":
            sender = _SENDER.search(content)
            text = content[sender.end() :] if sender else content
            mail[row["rollout_id"], row["agent_id"]].append((-1, sender[1] if sender else "", text))
        elif row["kind"] == "prompt":
            prompts[row["rollout_id"]] = prompts.get(row["rollout_id"], "") + "\n" + content
    return prompts, mail


def read_agents(
    agents: pa.Table,
    turns: pa.Table,
    early: Mapping[AgentKey, list[Mail]],
    scoring: ScoringSection,
    *,
    tools: bool = False,
) -> dict[str, list[tuple[Agent, dict[str, Any]]]]:
    """Rollout -> its agents with their rows of `agents`, in order. `tools`: count the turns with a tool, for which
    observations are read."""
    cast: dict[AgentKey, Agent] = {}
    by_rollout: defaultdict[str, list[tuple[Agent, dict[str, Any]]]] = defaultdict(list)
    for row in agents.select(["rollout_id", "agent_id", "exit_status", "output_tokens"]).to_pylist():
        key = row["rollout_id"], row["agent_id"]
        cast[key] = Agent(row["agent_id"], output_tokens=row["output_tokens"], inbox=list(early.get(key, ())))
        by_rollout[row["rollout_id"]].append((cast[key], row))
    for row in turns.select([*_TURN_COLUMNS, *(["observation"] if tools else [])]).to_pylist():
        agent = cast[row["rollout_id"], row["agent_id"]]
        agent.turns += 1
        agent.unread += row["parse_error"] is not None
        if row["think_tokens"] is not None:
            agent.think_tokens = (agent.think_tokens or 0) + row["think_tokens"]
        if row["post_think_tokens"] is not None:
            agent.post_think_tokens = (agent.post_think_tokens or 0) + row["post_think_tokens"]
        actions = json.loads(row["actions"] or "[]")
        agent.tool_turns += bool(actions) and row.get("observation") is not None
        for action in actions:
            agent.steps.extend((row["turn"], found) for found in _reread(action, scoring))
        for message in json.loads(row["inbox"] or "[]"):
            agent.inbox.append((row["turn"], message["from"], message["message"]))
    return by_rollout


def _reread(action: dict[str, Any], scoring: ScoringSection) -> list[dict[str, Any]]:
    """An action as captured; a bash action split further where the scoring section names message commands that the
    capture did not know."""
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
