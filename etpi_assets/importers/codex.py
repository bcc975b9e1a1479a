"""Codex's sessions: `~/.codex/sessions/YYYY/MM/DD/rollout-*.jsonl`, lines with a payload, and the older bare items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etpi_assets.importers.calls import count_keys, read_tools
from etpi_assets.importers.conversation import Message, Options
from etpi_assets.importers.responses import response_messages
from etpi_assets.importers.sessions import Session, folder_name, session_lines, session_rollout
from etpi_assets.importers.source import field as field_of
from etpi_assets.importers.source import list_field, text_field
from etpi_assets.importers.spec import at
from etpi_assets.trajectories.records import RolloutRecord

_CONTEXT = ("<", "# AGENTS.md")
"""Beginnings of the user's messages that the program wrote."""


def claims(line: Mapping[str, Any]) -> bool:
    is_meta = line.get("type") == "session_meta" and isinstance(line.get("payload"), dict)
    return is_meta or ("instructions" in line and {"id", "timestamp"} <= set(line) and "messages" not in line)


@dataclass
class _Part:
    """A conversation: its items, of which the first `inherited` are context, or all if their prompts are unknown."""

    role: str
    items: list[Mapping[str, Any]] = field(default_factory=list)
    inherited: int = 0
    is_lost: bool = False


def record(unit: Path, root: Path, options: Options) -> RolloutRecord:
    """Read one session. Raises Unreadable: `empty`, or as `session_lines` and `response_messages`."""
    session, parts = Session(unit.name.partition(".")[0]), [_Part("solo")]
    meta, counted = dict[str, Any](), dict[str, int]()
    for line in session_lines(unit, "codex", options):
        payload = line.get("payload")
        kind, item = (line.get("type"), payload) if isinstance(payload, dict) else ("response_item", line)
        if claims(line):
            meta = meta or {**item}
        elif kind == "response_item" and ("type" in item or "role" in item):
            parts[-1].items.append({**item, "timestamp": line.get("timestamp")})
        elif kind == "turn_context":
            session.add_response(text_field(item, "model"))
        elif kind == "compacted":
            parts.append(_after_compaction(item))
        elif kind == "event_msg" and item.get("type") == "thread_rolled_back":
            kept = _without_questions(parts[-1].items, item.get("num_turns"))
            parts.append(_Part("branch", kept, len(kept), parts[-1].is_lost))
        elif kind == "event_msg" and item.get("type") == "token_count":
            session.add_response(usage=_new_tokens(item.get("info"), counted))
    name, parent = text_field(meta, "id"), text_field(meta, "source", "subagent", "thread_spawn", "parent_thread_id")
    session.id = "/".join(filter(None, (parent, name))) or session.id
    if place := text_field(meta, "git", "repository_url") or text_field(meta, "cwd"):
        session.repo = folder_name(place).removesuffix(".git")
    session.tools = read_tools(meta.get("dynamic_tools"), "dynamic_tools")
    system = text_field(meta, "base_instructions", "text") or text_field(meta, "instructions")
    for part in parts:
        context, later = part.items[: part.inherited], part.items[part.inherited :]
        count_keys(later, "codex", options.unread)
        entries = [Message("system", system)] if system else []
        entries += response_messages(context, unit.name, is_context=True)
        entries += response_messages(later, unit.name, is_context=part.is_lost)
        session.begin("subagent" if "/" in session.id else part.role, entries, session.agent_id(part.role))
    return session_rollout(session, unit, options)


def _new_tokens(info: Any, counted: dict[str, int]) -> Any:
    """Return the tokens since the event before: some events repeat the last response, or estimate a prompt.

    Args:
        counted: the session's tokens so far; updated.
    """
    last, total = field_of(info, "last_token_usage"), field_of(info, "total_token_usage")
    if not isinstance(total, dict):
        return last
    new = {key: count for key, count in total.items() if type(count) is int}
    added = {key: count - counted.get(key, 0) for key, count in new.items()} if counted else last
    counted |= new
    return added


def _after_compaction(item: Mapping[str, Any]) -> _Part:
    """Return the conversation after a compaction; its prompts are unknown if its beginning is not recorded as text."""
    items: list[Mapping[str, Any]] = [i for i in list_field(item, "replacement_history") if isinstance(i, dict)]
    readable = [i for i in items if "compaction" not in str(i.get("type"))]
    return _Part("continuation", readable, len(readable), is_lost=not items or len(readable) < len(items))


def _without_questions(items: list[Mapping[str, Any]], count: Any) -> list[Mapping[str, Any]]:
    """Return the items before the user's last `count` messages."""
    texts = ((n, at(item, ("content", 0, "text"))) for n, item in enumerate(items) if item.get("role") == "user")
    questions = [n for n, text in texts if not (isinstance(text, str) and text.startswith(_CONTEXT))]
    return items[: questions[-count]] if type(count) is int and 0 < count <= len(questions) else list(items)
