"""Sessions of coding assistants: a file is a rollout, and each branch, continuation and sub-agent in it an agent.

A message that two conversations share is trained in the first one; in the others it is context. Roles of agents:
"solo", "branch" (a retry), "continuation" (after a compaction) and "subagent" (its id ends with that of its call).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from etpi_assets.importers.calls import count_keys
from etpi_assets.importers.conversation import Message, Options, fill_agent
from etpi_assets.importers.run_info import add_usage, imported, sampler_of
from etpi_assets.importers.source import as_mapping
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord
from etpi_resources.rows import files_below, iter_rows
from etpi_resources.rows.bounded import Unreadable

Node = TypeVar("Node", str, int)
_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_MOST_COPIED = 1_000_000
"""Messages of all branches of a file; a file of this size whose branches repeat more was made to exhaust memory."""


class Conversation(NamedTuple):
    """One path through a session. `role`: see the module."""

    agent_id: str
    role: str
    entries: list[Message]


@dataclass
class Session:
    """The conversations of a file and its facts. `usage`: the sum of the responses' token counts."""

    id: str
    conversations: list[Conversation] = field(default_factory=list)
    repo: str | None = None
    models: Counter[str] = field(default_factory=Counter)
    usage: Counter[str] = field(default_factory=Counter)
    tools: list[dict[str, Any]] | None = None

    def add_response(self, model: str | None = None, usage: Any = None) -> None:
        """Add the model and the token counts of one response, as far as the file has them."""
        if model:
            self.models[model] += 1
        add_usage(self.usage, usage)

    def agent_id(self, role: str) -> str:
        """Return the id of the next agent with a role."""
        number = 1 + sum(conversation.role == role for conversation in self.conversations)
        return "agent1" if role == "solo" else f"agent1-{role}{number}"

    def begin(self, role: str, entries: Iterable[Message] = (), agent_id: str | None = None) -> Conversation:
        """Add a conversation, and return it. `agent_id`: by default `agent_id` of the role."""
        self.conversations.append(Conversation(agent_id or self.agent_id(role), role, list(entries)))
        return self.conversations[-1]


def session_rollout(session: Session, unit: Path, options: Options) -> RolloutRecord:
    """Build the rollout of a session. Raises Unreadable: `empty`, `no_prompt`."""
    agents: dict[str, AgentRecord] = {}
    shared = set[int]()
    for agent_id, role, entries in session.conversations:
        messages = [replace(e, trained=False) if e.trained and id(e) in shared else e for e in entries]
        shared.update(map(id, entries))
        if any(entry.role == "assistant" and entry.trained for entry in messages):
            names = (f"{agent_id}_{n}" if n else agent_id for n in count())
            name = next(name for name in names if name not in agents)
            agents[name] = fill_agent(AgentRecord(name, "", role, "unknown"), messages, options, answers="all")
    if not agents:
        raise Unreadable("empty", f"{unit.name}: no answer of a model")
    times = [message.at for agent in agents.values() for message in agent.messages if message.at]
    return imported(
        list(agents.values()),
        session.id,
        options.repo or session.repo or "unknown",
        teacher=options.teacher or next((model for model, _ in session.models.most_common(1)), None),
        sampler=sampler_of({}, dict(session.usage)),
        started_at=min(times, default=None),
        wall_seconds=(max(times) - min(times)).total_seconds() if times else None,
        tools=session.tools,
    )


def folder_name(path: str) -> str:
    """Return the last part of a path of any system, or of a URL."""
    return path.replace("\\", "/").rstrip("/").rpartition("/")[2]


def jsonl_units(root: Path) -> list[Path]:
    """Return the files of JSON lines below the root, sorted; the root itself if it is a file."""
    return files_below(root, *_LINES)


def session_lines(unit: Path, format: str, options: Options) -> list[Mapping[str, Any]]:
    """Return the lines of a file; one that a crash cut at the end is dropped. Raises Unreadable: as `read_json`."""
    lines = [line for _, line in iter_rows(unit)]
    if len(lines) > 1 and isinstance(lines[-1], Unreadable) and lines[-1].reason == "truncated_json":
        lines.pop()
    for number, line in enumerate(lines):
        if isinstance(line, Unreadable):
            raise line
        as_mapping(line, f"{unit.name}, line {number + 1}")
    count_keys(lines, format, options.unread)
    return lines


def paths(parents: Mapping[Node, Node | None], turns: Set[Node]) -> Iterator[list[Node]]:
    """Yield the path from a root to each leaf that has a turn of its own, the last leaf first.

    Args:
        parents: node -> the node before it, in the order of the file. A path begins after a node that is not recorded.
        turns: the nodes that a model wrote.

    Raises Unreadable: `too_large` if the paths repeat far more messages than a session has.
    """
    inner, seen, copied = set(parents.values()), set[Node](), 0
    for leaf in reversed([node for node in parents if node not in inner]):
        path: list[Node] = []
        node: Node | None = leaf
        while node is not None and node in parents and node not in seen:
            seen.add(node)
            path.append(node)
            node = parents.get(node)
        if not turns.isdisjoint(path):
            on_path = set(path)
            while node is not None and node in parents and node not in on_path:
                on_path.add(node)
                path.append(node)
                node = parents.get(node)
            copied += len(path)
            if copied > _MOST_COPIED:
                raise Unreadable("too_large", f"its branches repeat more than {_MOST_COPIED:,} messages")
            yield path[::-1]
