"""Gemini CLI's sessions: `~/.gemini/tmp/<project>/chats/session-*.json` or `.jsonl`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etpi_assets.importers.calls import calls_with_results, count_keys, read_content
from etpi_assets.importers.conversation import Message, Options
from etpi_assets.importers.sessions import Session, session_lines, session_rollout
from etpi_assets.importers.source import as_list, as_mapping, no_run, text_field, to_utc
from etpi_assets.importers.spec import load, silent
from etpi_assets.trajectories.records import RolloutRecord
from etpi_resources.rows import files_below
from etpi_resources.rows.bounded import Unreadable, read_json

_JSON = (".json", ".jsonl")
_SILENT = ("info", "error", "warning")


def units(root: Path) -> list[Path]:
    """Return the files of sessions below the root; the root itself if it is a file."""
    return [path for path in files_below(root, *_JSON) if path == root or path.name != "logs.json"]


def record(unit: Path, root: Path, options: Options) -> RolloutRecord:
    """Read one session. Raises Unreadable: `empty`, `unknown_form`, `non_text_content`, or as `read_json`."""
    records = session_lines(unit, "gemini_cli", options) if unit.name.endswith(".jsonl") else [read_json(unit)]
    facts: dict[str, Any] = {}
    session, seen = Session(unit.name.partition(".")[0]), set[str]()
    for role, messages in _histories(records, unit, facts):
        count_keys(messages.values(), "gemini_cli", options.unread)
        entries: list[Message] = []
        for key, message in messages.items():
            entries += _entries(message, f"{unit.name}, {key}", key not in seen, session)
        seen.update(key for key, message in messages.items() if "id" in message)
        is_helper = facts.get("kind") == "subagent"
        session.begin("subagent" if is_helper else role, entries, session.agent_id(role))
    if not facts:
        raise no_run(records, f"{unit.name} is no session: it has no `sessionId`")
    session.id = text_field(facts, "sessionId") or session.id
    if facts.get("kind") == "subagent":
        session.id = f"{unit.parent.name}/{session.id}"
    session.repo = text_field(facts, "projectHash")
    return session_rollout(session, unit, options)


def _histories(
    records: Sequence[Any], unit: Path, facts: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Mapping[str, Any]]]]:
    """Yield (role, messages by id) of each conversation; a rewind or a new list of messages begins another.

    Args:
        facts: the session's own keys; added to.
    """
    role, messages = "solo", dict[str, Mapping[str, Any]]()
    for number, value in enumerate(records):
        line = as_mapping(value, f"{unit.name}, record {number}")
        update = line.get("$set")
        update = update if isinstance(update, dict) else line if "sessionId" in line else {}
        facts |= {key: value for key, value in update.items() if key != "messages"}
        if "messages" in update:
            listed = _by_id(as_list(update["messages"], f"{unit.name}, messages"), unit)
            if not set(messages) <= set(listed):
                yield role, messages
                role = "continuation"
            messages = listed
        elif target := text_field(line, "$rewindTo"):
            yield role, messages
            kept = list(messages)[: list(messages).index(target)] if target in messages else []
            role, messages = "branch", {name: messages[name] for name in kept}
        elif text_field(line, "id"):
            messages |= _by_id([line], unit)
    yield role, messages


def _by_id(values: Sequence[Any], unit: Path) -> dict[str, Mapping[str, Any]]:
    messages = [as_mapping(value, f"{unit.name}, message {number}") for number, value in enumerate(values)]
    return {text_field(message, "id") or f"message {number}": message for number, message in enumerate(messages)}


def _entries(message: Mapping[str, Any], name: str, is_own: bool, session: Session) -> Iterator[Message]:
    kind, at = message.get("type"), to_utc(message.get("timestamp"))
    if kind in _SILENT:
        return
    if kind not in ("user", "gemini", "model"):
        raise Unreadable("unknown_role", f"{name} has type {kind!r}; known are user, gemini, {', '.join(_SILENT)}")
    spec = load("gemini_cli")[0]
    content = read_content(message.get("content"), name, spec)
    if kind == "user":
        if content.text or not content.results:  # results of the calls before are there again
            yield Message("user", content.text, time=at)
        return
    if is_own:
        session.add_response(text_field(message, "model"), message.get("tokens"))
    held = message.get("toolCalls") or []
    called = calls_with_results(held, name, spec, silent)
    thoughts = as_list(message.get("thoughts") or [], f"{name}.thoughts")
    texts = [": ".join(filter(None, (text_field(t, "subject"), text_field(t, "description")))) for t in thoughts]
    reasoning = "\n".join(filter(None, texts)) or None
    yield Message("assistant", content.text, [call for call, _ in called], reasoning, at, trained=is_own)
    for (call, result), raw in zip(called, held, strict=True):
        if result is not None:
            output = read_content(result, f"{name}.result", spec)
            text = "\n".join(filter(None, (*(text for _, text in output.results), output.text)))
            yield Message("tool", text, time=to_utc(raw.get("timestamp")), result_of=call.id)
