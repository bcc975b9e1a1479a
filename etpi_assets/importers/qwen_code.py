"""Qwen Code's sessions: `~/.qwen/projects/<folder>/chats/<session>.jsonl`.

Lines form a tree by `parentUuid`, with contents in parts of the Gemini API. A compaction records the history that the
next prompt begins with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etpi_assets.importers.calls import read_content
from etpi_assets.importers.conversation import Message, Options
from etpi_assets.importers.sessions import Session, folder_name, paths, session_lines, session_rollout
from etpi_assets.importers.source import as_list, field, text_field, to_utc
from etpi_assets.importers.spec import load
from etpi_assets.trajectories.records import RolloutRecord
from etpi_resources.rows.bounded import Unreadable

_SPEAKERS = ("user", "assistant", "tool_result")


def record(unit: Path, root: Path, options: Options) -> RolloutRecord:
    """Read a session. Raises Unreadable: `empty`, `unknown_form`, `non_text_content`, or as `session_lines`."""
    nodes: dict[str, list[Mapping[str, Any]]] = {}
    for number, line in enumerate(session_lines(unit, "qwen_code", options)):
        nodes.setdefault(text_field(line, "uuid") or f"line {number}", []).append(line)
    first = next(iter(nodes.values()))[0]
    session = Session(text_field(first, "sessionId") or unit.name.partition(".")[0])
    session.repo = folder_name(text_field(first, "cwd") or "") or None
    entries = {key: _entries(lines, f"{unit.name}, {key}", session) for key, lines in nodes.items()}
    turns = {key for key, lines in nodes.items() if lines[0].get("type") == "assistant"}
    for path in paths({key: text_field(lines[0], "parentUuid") for key, lines in nodes.items()}, turns):
        conversation = session.begin("branch" if session.conversations else "solo")
        for key in path:
            if nodes[key][0].get("type") == "system":
                if entries[key]:  # the history with which the prompt after a compaction begins
                    conversation = session.begin("continuation", entries[key])
            else:
                conversation.entries.extend(entries[key])
    return session_rollout(session, unit, options)


def _entries(lines: Sequence[Mapping[str, Any]], name: str, session: Session) -> list[Message]:
    """Return the messages of the lines with one uuid, which are parts of one response; of a compaction its history."""
    kind, last = lines[0].get("type"), lines[-1]
    if kind == "system":
        history = as_list(field(lines[0], "systemPayload", "compressedHistory") or [], f"{name}, compressedHistory")
        of_model = [(field(content, "role") == "model", field(content, "parts")) for content in history]
        return [m for is_model, parts in of_model for m in _spoken(parts, name, is_model, trained=False)]
    if kind not in _SPEAKERS:
        raise Unreadable("unknown_role", f"{name} has type {kind!r}; known are {', '.join(_SPEAKERS)}, system")
    if kind == "assistant":
        session.add_response(text_field(last, "model"), last.get("usageMetadata"))
    parts = field(last, "message", "parts") or []
    if len(lines) > 1:
        parts = [p for line in lines for p in as_list(field(line, "message", "parts") or [], f"{name}, parts")]
    return _spoken(parts, name, kind == "assistant", lines[0].get("timestamp"))


def _spoken(parts: Any, name: str, is_model: bool, at: Any = None, *, trained: bool = True) -> list[Message]:
    """Return the messages of a content: results, and then its text with the calls."""
    moment, content = to_utc(at), read_content(as_list(parts, f"{name}, parts"), name, load("gemini_cli")[0])
    spoken = [Message("tool", text, time=moment, result_of=answers) for answers, text in content.results]
    if is_model:
        spoken.append(Message("assistant", content.text, list(content.calls), content.thought, moment, trained))
    elif content.text:
        spoken.append(Message("user", content.text, time=moment))
    return spoken
