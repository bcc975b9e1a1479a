"""Qwen Code's sessions: `~/.qwen/projects/<folder>/chats/<session>.jsonl`.

Lines form a tree by `parentUuid`, with contents in parts of the Gemini API. A compaction records the history that the
next prompt begins with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etpi_assets.importers.calls import read_content
from etpi_assets.importers.conversation import Options
from etpi_assets.importers.normal import Message
from etpi_assets.importers.sessions import (
    Session,
    as_context,
    folder_name,
    paths,
    session_lines,
    session_rollout,
)
from etpi_assets.importers.source import Unreadable, as_list, field, text_field, to_utc
from etpi_assets.importers.spec import load
from etpi_assets.trajectories.records import RolloutRecord

_SPEAKERS = ("user", "assistant", "tool_result")


def record(unit: Path, root: Path, options: Options) -> RolloutRecord:
    """Read a session. Raises Unreadable: `empty`, `unknown_form`, `non_text_content`, or as `session_lines`."""
    nodes: dict[str, list[Mapping[str, Any]]] = {}
    for number, line in enumerate(session_lines(unit, "qwen_code", options)):
        nodes.setdefault(text_field(line, "uuid") or f"line {number}", []).append(line)
    first = next(iter(nodes.values()))[0]
    session = Session(text_field(first, "sessionId") or unit.name.partition(".")[0])
    session.repo = folder_name(text_field(first, "cwd") or "") or None
    entries = {key: list(_entries(lines, f"{unit.name}, {key}", session)) for key, lines in nodes.items()}
    histories = {key: _history(lines[0], f"{unit.name}, {key}") for key, lines in nodes.items()}
    turns = {key for key, spoken in entries.items() if any(entry.role == "assistant" for entry in spoken)}
    shared = set[str]()
    for path in paths({key: text_field(lines[0], "parentUuid") for key, lines in nodes.items()}, turns):
        conversation = session.begin("branch" if session.conversations else "solo")
        for key in path:
            if history := histories[key]:
                conversation = session.begin("continuation")
                conversation.entries += history
            conversation.entries += as_context(entries[key]) if key in shared else entries[key]
        shared.update(path)
    return session_rollout(session, unit, options)


def _entries(lines: Sequence[Mapping[str, Any]], name: str, session: Session) -> Iterator[Message]:
    """Yield the messages of the lines with one uuid, which are parts of one response."""
    kind = lines[0].get("type")
    if kind == "system":
        return
    if kind not in _SPEAKERS:
        raise Unreadable("unknown_role", f"{name} has type {kind!r}; known are {', '.join(_SPEAKERS)}, system")
    parts = [part for line in lines for part in as_list(field(line, "message", "parts") or [], f"{name}, parts")]
    if kind == "assistant":
        session.add_response(text_field(lines[-1], "model"), lines[-1].get("usageMetadata"))
    yield from _spoken(parts, name, kind == "assistant", lines[0].get("timestamp"))


def _history(line: Mapping[str, Any], name: str) -> list[Message]:
    """Return the messages with which the prompt after a compaction begins, as context."""
    history = as_list(field(line, "systemPayload", "compressedHistory") or [], f"{name}, compressedHistory")
    return [
        entry
        for content in history
        for entry in as_context(
            _spoken(as_list(field(content, "parts"), f"{name}, parts"), name, field(content, "role") == "model")
        )
    ]


def _spoken(parts: Sequence[Any], name: str, is_model: bool, at: Any = None) -> Iterator[Message]:
    """Yield the messages of a content: results, and then its text with the calls."""
    moment, content = to_utc(at), read_content(parts, name, load("gemini_cli")[0])
    yield from (Message("tool", text, time=moment, result_of=answers) for answers, text in content.results)
    if is_model:
        yield Message("assistant", content.text, list(content.calls), content.thought, moment)
    elif content.text:
        yield Message("user", content.text, time=moment)
