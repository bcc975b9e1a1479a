"""Claude Code's sessions: `~/.claude/projects/<folder>/<session>.jsonl`, and files of sub-agents.

Lines form a tree by `parentUuid`. A response is written as a line for each content block, all with its `message.id`;
the results of its calls hang on any of them. So one response is one node, and the results of its calls are the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etpi_assets.importers.calls import read_content
from etpi_assets.importers.conversation import Message, Options, finish_of
from etpi_assets.importers.sessions import Session, folder_name, paths, session_lines, session_rollout
from etpi_assets.importers.source import field as field_of
from etpi_assets.importers.source import list_field, text_field, text_inside, to_utc
from etpi_assets.trajectories.records import RolloutRecord
from etpi_resources.rows.bounded import Unreadable, parse_json

_SPEAKERS = ("user", "assistant")
_SYNTHETIC = "<synthetic>"
"""`model` of the harness's own messages, such as an error of the provider; they are not sent to the model."""
_DELEGATES = ("Task", "Agent")
_FALLBACK = "fallback"
"""Type of a block for the change to another model, which has no text."""


@dataclass
class _Node:
    """A message: the lines of one response, of the results of its calls, or one line of the user."""

    parent: str | None
    lines: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def is_turn(self) -> bool:
        return self.lines[0]["type"] == "assistant"


def record(unit: Path, root: Path, options: Options) -> RolloutRecord:
    """Read a session. Raises Unreadable: `empty`, `no_prompt`, `non_text_content`, or as `session_lines`."""
    lines = session_lines(unit, "claude_code", options)
    nodes, node_of = _tree(lines)
    session_id = next((name for line in lines if (name := text_field(line, "sessionId"))), unit.name.partition(".")[0])
    agent = next((name for line in lines if (name := text_field(line, "agentId"))), None)
    alone = agent is not None and all(line.get("isSidechain", True) for line in lines if line.get("type") in _SPEAKERS)
    session = Session(f"{session_id}/{agent}" if alone else session_id)
    cwd = next((folder for line in lines if (folder := text_field(line, "cwd"))), None)
    session.repo = folder_name(cwd) if cwd else None
    entries = {key: _entries(node, unit, session) for key, node in nodes.items()}
    kept, place = _preserved(lines, node_of), {key: number for number, key in enumerate(nodes)}
    branches = paths(
        {key: node.parent for key, node in nodes.items()}, {k for k, node in nodes.items() if node.is_turn}
    )
    # In the order of their roots; of each root, the one that was continued last comes first.
    for path in sorted(branches, key=lambda path: place[path[0]]):
        role = "subagent" if alone else _role(nodes, path, session)
        whole = [inner for key in path for inner in (key, *(k for k in kept.get(key, ()) if k not in path))]
        name = _starter(unit) if alone else _name(nodes, path, role, session)
        session.begin(role, [e for key in whole for e in entries[key]], name)
    return session_rollout(session, unit, options)


def _tree(lines: Sequence[Mapping[str, Any]]) -> tuple[dict[str, _Node], dict[str, str | None]]:
    """Return the nodes by key, in the order of the file; and uuid of a line -> the node that its children follow."""
    nodes: dict[str, _Node] = {}
    after: dict[str, str | None] = {}
    calls: dict[str, str] = {}  # id of a call -> the node of its response
    is_flat = not any(text_field(line, "parentUuid") for line in lines)
    last: str | None = None
    for number, line in enumerate(lines):
        uuid = text_field(line, "uuid") or f"line {number}"
        if uuid in after:  # resuming repeats lines
            continue
        parent = text_field(line, "parentUuid")
        content = field_of(line, "message", "content")
        blocks = [b for b in list_field(line, "message", "content") if isinstance(b, dict)]
        answered = next((calls[c] for b in blocks if (c := text_field(b, "tool_use_id")) in calls), None)
        above = last if is_flat else after.get(parent or "")
        of_harness = line.get("isApiErrorMessage") is True or text_field(line, "message", "model") == _SYNTHETIC
        if line.get("type") not in _SPEAKERS or content is None or of_harness:
            after[uuid] = above
            continue
        if line["type"] == "assistant":
            key = f"response {text_field(line, 'message', 'id') or uuid}"
            above = above or (last if parent is None else None)
            calls.update({c: key for b in blocks if b.get("type") == "tool_use" and (c := text_field(b, "id"))})
        elif answered is not None:
            key, above = f"results {answered}", answered
        else:
            key = uuid
        nodes.setdefault(key, _Node(above)).lines.append(line)
        after[uuid] = last = key
    for key, node in nodes.items():
        if (results := f"results {node.parent}") in nodes and key != results:
            node.parent = results
    return nodes, after


def _preserved(lines: Sequence[Mapping[str, Any]], node_of: Mapping[str, str | None]) -> dict[str, list[str]]:
    """Return, for the summary of each compaction, the nodes that the next prompt has after it."""
    segments = [field_of(line, "compactMetadata", "preservedSegment") for line in lines if "compactMetadata" in line]
    parents = {text_field(line, "uuid"): text_field(line, "parentUuid") for line in lines} if segments else {}
    kept: dict[str, list[str]] = {}
    for segment in segments:
        anchor = node_of.get(text_field(segment, "anchorUuid") or "")
        uuid, first = text_field(segment, "tailUuid"), text_field(segment, "headUuid")
        uuids = {uuid: None}
        while uuid != first and (uuid := parents.get(uuid)) and uuid not in uuids:
            uuids[uuid] = None
        if anchor is not None and uuid == first:
            keys = (node_of.get(uuid or "") for uuid in reversed(uuids))
            kept[anchor] = list(dict.fromkeys(key for key in keys if key is not None))
    return kept


def _starter(unit: Path) -> str:
    """Return the name of a sub-agent in a file of its own: the id of the call that started it, or the sub-agent's."""
    name, facts = unit.name.partition(".")[0], None
    with suppress(Unreadable):
        facts = parse_json((text_inside(unit.parent, f"{name}.meta.json") or "{}").encode(), unit.name)
    return f"agent1.{text_field(facts, 'toolUseId') or name.removeprefix('agent-')}"


def _role(nodes: Mapping[str, _Node], path: Sequence[str], session: Session) -> str:
    first = nodes[path[0]].lines[0]
    if first.get("isSidechain") is True:
        return "subagent"
    if first.get("isCompactSummary") is True:
        summary = _prompt(nodes[path[0]])  # another conversation that begins with it is a branch
        if not any(conversation.entries[0].text == summary for conversation in session.conversations):
            return "continuation"
    return "branch" if any(c.role != "subagent" for c in session.conversations) else "solo"


def _prompt(node: _Node) -> str:
    return read_content(field_of(node.lines[0], "message", "content"), "prompt").text


def _name(nodes: Mapping[str, _Node], path: Sequence[str], role: str, session: Session) -> str:
    """Return the agent's id, which names the agent or the call that it comes from."""
    if role != "subagent":
        return session.agent_id(role)
    first = nodes[path[0]]
    calls = (b for node in nodes.values() if node.is_turn for line in node.lines for b in line["message"]["content"])
    delegates = (b for b in calls if text_field(b, "name") in _DELEGATES)
    call = next((b for b in delegates if text_field(b, "input", "prompt") == _prompt(first)), None)
    name = text_field(call, "id") or text_field(first.lines[0], "agentId") or session.agent_id(role).rpartition("-")[2]
    return f"agent1.{name}"


def _entries(node: _Node, unit: Path, session: Session) -> list[Message]:
    at, name = to_utc(node.lines[0].get("timestamp")), f"{unit.name}, {text_field(node.lines[0], 'uuid')}"
    contents = [field_of(line, "message", "content") for line in node.lines]
    blocks = [b for content in contents for b in (content if isinstance(content, list) else [{"text": content}])]
    parts = read_content([b for b in blocks if field_of(b, "type") != _FALLBACK], name)
    if not node.is_turn:
        results = dict(reversed(parts.results))  # the first result of a call counts
        answers = [Message("tool", text, time=at, result_of=call) for call, text in reversed(results.items())]
        return [*answers, Message("user", parts.text, time=at)] if parts.text or not answers else answers
    message = node.lines[-1]["message"]
    session.add_response(text_field(message, "model"), field_of(message, "usage"))
    stop = next((reason for line in node.lines if (reason := text_field(line, "message", "stop_reason"))), None)
    return [Message("assistant", parts.text, list(parts.calls), parts.thought, at, finish=finish_of(stop))]
