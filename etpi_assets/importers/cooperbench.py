"""CooperBench run folders: `<run>/<setting>/<repo>/<task>/f<a>_f<b>/` with one trajectory per agent, result, verdict.

Messages come in two forms. CooperBench's own agent writes chat messages with `extra` (token ids in
`extra.token_capture`). Adapters of other agents flatten them to text, one message per content block: `[thinking] …`,
text, `[tool_use NAME] {…}`, `[tool_result] …`. There an unbroken run of assistant messages is one turn. If a harness
streams tool results, a result may come between two calls of one response; such a response counts as two turns.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from etpi_assets.importers.conversation import Message, Options, fill_agent
from etpi_assets.importers.generic import read_messages
from etpi_assets.importers.run_info import imported
from etpi_assets.importers.source import (
    as_list,
    as_mapping,
    content_hash,
    field,
    list_field,
    no_run,
    number_field,
    text_field,
    text_inside,
    to_utc,
)
from etpi_assets.importers.spec import load
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord
from etpi_resources.inside import is_file_inside
from etpi_resources.rows import files_below
from etpi_resources.rows.bounded import Unreadable, read_json

_TRAJECTORY = re.compile(r"(?:agent(\d+)|solo)_traj\.json(?:\.gz|\.zst)?")
_MARKERS = ("result.json", "eval.json")
_JSON = (".json", ".json.gz", ".json.zst")
_HARNESS_ERROR = re.compile(r"API Error: \d{3}\b")
"""Text that an adapter writes as the assistant when the provider fails; no model wrote it."""


def claims(root: Path) -> bool:
    return any(_TRAJECTORY.fullmatch(file.name) for file in files_below(root))


def units(root: Path) -> list[Path]:
    """Return run folders, and JSON files outside of run folders."""
    folders: set[Path] = set()
    outside: list[Path] = []
    for folder, _, names in os.walk(root):
        if any(name in _MARKERS or _TRAJECTORY.fullmatch(name) for name in names):
            folders.add(Path(folder))
        else:
            outside += [Path(folder, name) for name in names if name.endswith(_JSON)]
    strays = [file for file in outside if folders.isdisjoint(file.parents)]
    return sorted([*folders, *strays])


def record(unit: Path, root: Path, options: Options) -> RolloutRecord:
    """Read one run folder as a rollout.

    Raises Unreadable: as `no_run`, `missing_trajectory`, `duplicate_agent`, `errored`, `empty`, `compacted`, or as
    the readers of its files.
    """
    if unit.is_file():
        raise no_run(read_json(unit), f"{unit.name} stands in no run folder")
    result, verdict = (_object(unit / name) if (unit / name).exists() else None for name in _MARKERS)
    files = {path: _object(path) for path in sorted(unit.iterdir()) if _TRAJECTORY.fullmatch(path.name)}
    errors = _check_agents(unit, result, files)
    if not any(_messages(data, path) for path, data in files.items()):
        _refuse_empty(files, errors)
    conversation = _conversation(unit)
    order = list(dict.fromkeys(sender for _, sender, _ in conversation))  # the first to write is the proposer
    by_agent = sorted(files.items(), key=lambda item: text_field(item[1], "agent_id") or "")
    agents = [_agent(path, data, unit, order, options, errors) for path, data in by_agent]
    if not any(agent.turns for agent in agents):
        _refuse_empty(files, errors)
    _date_messages(agents, conversation)
    repo, models = text_field(result, "repo"), (text_field(data, "model") for data in (result, *files.values()))
    repo = repo or unit.parent.parent.name
    task = text_field(result, "task_id") or unit.parent.name
    rollout = imported(
        agents,
        f"{repo}/{task}/{unit.name}",
        repo,
        teacher=options.teacher or next(filter(None, models), None),
        outcome=None if verdict is None else outcome(verdict),
        started_at=to_utc(field(result, "started_at")),
        wall_seconds=number_field(result, "duration_seconds"),
        error="; ".join(f"{name}: {error}" for name, error in errors.items()) or None,
    )
    hashed = sorted([*files, *(file for name in _MARKERS if (file := unit / name).exists())])
    rollout.rollout_id = content_hash(unit.relative_to(root).as_posix(), hashed)
    return rollout


def _object(path: Path) -> Mapping[str, Any]:
    return as_mapping(read_json(path), path.name)


def _check_agents(unit: Path, result: Any, files: Mapping[Path, Mapping[str, Any]]) -> dict[str, str]:
    """Return agent -> error of `result.json`. Raises Unreadable: `missing_trajectory`, `duplicate_agent`."""
    names = [_name(path, data) for path, data in files.items()]
    stated = field(result, "agents")
    stated = stated if isinstance(stated, Mapping) else {}
    missing = sorted(set(map(str, stated)) - set(names))
    if not files or missing:
        lacking = f"no trajectory of {', '.join(missing)}" if missing else "no trajectory"
        raise Unreadable("missing_trajectory", f"{lacking} beside {', '.join(sorted(p.name for p in unit.iterdir()))}")
    if len(set(names)) < len(names):
        raise Unreadable("duplicate_agent", f"two trajectories of one agent: {', '.join(sorted(names))}")
    errors = {name: error for name in sorted(map(str, stated)) if (error := text_field(stated, name, "error"))}
    if single := text_field(result, "agent", "error"):
        errors["solo"] = single
    return errors


def outcome(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """Map CooperBench's verdict: reward 1.0 if both features pass on the merged tree, None if the evaluation failed.

    `independent` says whether a feature passes on its own agent's tree, which the reward of a merge conflict hides.
    """
    merge, error = text_field(verdict, "merge", "status"), text_field(verdict, "error")
    passed = field(verdict, "both_passed") is True
    reasons = [text_field(verdict, f"feature{i}_independent", "reason") for i in (1, 2)]
    applied = field(verdict, "apply_status")
    skipped = isinstance(applied, Mapping) and bool(applied) and all(v == "skipped" for v in applied.values())
    codes = {
        "passed": passed,
        "infrastructure": error,
        "no_patch": skipped or reasons == ["no_patch", "no_patch"],
        "merge_conflict": merge is not None and merge.startswith("conflict"),
    }
    code = next((name for name, holds in codes.items() if holds), "failed_tests")
    features = {
        str(field(verdict, key, "feature_id")): {
            "passed": field(verdict, key, "passed") is True,
            "tests_passed": number_field(verdict, key, "tests_passed"),
            "tests_failed": number_field(verdict, key, "tests_failed"),
            "independent": field(verdict, f"{key}_independent", "passed"),
        }
        for key in ("feature1", "feature2")
        if isinstance(field(verdict, key), Mapping)
    }
    at = to_utc(field(verdict, "evaluated_at"))
    return {
        "reward": None if code == "infrastructure" else float(passed),
        "verdict": code,
        "merge": merge,
        "features": features,
        "error": error,
        "evaluated_at": None if at is None else at.isoformat(),
    }


def _name(path: Path, data: Mapping[str, Any]) -> str:
    return text_field(data, "agent_id") or path.name.partition("_traj")[0]


def _messages(data: Mapping[str, Any], path: Path) -> list[Any]:
    return as_list(data.get("messages"), f"{path.name}.messages")


def _refuse_empty(files: Mapping[Path, Mapping[str, Any]], errors: Mapping[str, str]) -> None:
    statuses = sorted({text_field(data, "status") or "no status" for data in files.values()})
    if errors or "Error" in statuses:
        text = "; ".join(dict.fromkeys(error[:300] for error in errors.values())) or "no error text"
        raise Unreadable("errored", f"no agent took a turn; status {', '.join(statuses)}: {text}")
    raise Unreadable("empty", f"no agent took a turn; status {', '.join(statuses)}")


def _agent(
    path: Path, data: Mapping[str, Any], unit: Path, order: Sequence[str], options: Options, errors: dict[str, str]
) -> AgentRecord:
    agent_id, status = _name(path, data), text_field(data, "status") or "unknown"
    messages, spec = _messages(data, path), load("cooperbench")[0]
    flattened = not any(isinstance(m, dict) and ("extra" in m or m.get("tool_calls")) for m in messages)
    whole = _all_segments(unit, agent_id, messages)
    entries = read_messages(whole, f"{path.name}.messages", spec, options.unread)
    if flattened:
        for entry in entries:
            _unflatten(entry)
        last = entries[-1] if entries else None
        if status == "Error" and last and last.role == "assistant" and _HARNESS_ERROR.search(last.text):
            last.trained = False
            errors.setdefault(agent_id, last.text)
    position = order.index(agent_id) if agent_id in order else len(order)
    feature = text_field(data, "feature_id")
    role = "solo" if agent_id == "solo" else "proposer" if position == 0 else "responder"
    patch = text_inside(unit, "solo.patch" if agent_id == "solo" else f"agent{feature}.patch")
    feature = feature or "+".join(map(str, list_field(data, "features")))
    agent = AgentRecord(agent_id, feature, role, status, patch=patch)
    return fill_agent(agent, entries, options, blocks=flattened, answers="last")


def _unflatten(entry: Message) -> None:
    """Restore the role and the reasoning that flattening put into the text."""
    if entry.role == "assistant" and entry.text.startswith("[thinking] "):
        entry.thought, _, rest = entry.text.removeprefix("[thinking] ").partition("\n[tool_use ")
        entry.text = f"[tool_use {rest}" if rest else ""
    elif entry.role == "user" and entry.text.startswith("[tool_result]"):
        entry.role = "tool"


def _all_segments(unit: Path, agent_id: str, messages: list[Any]) -> list[Any]:
    """Return the agent's messages, including those before a compaction.

    After a compaction the prompt of a turn is not the messages before it, so a compacted conversation is imported only
    if every turn has its own token ids.
    """
    compacted = any(field(m, "extra", "summary") is True for m in messages)
    whole = unit / f"{agent_id}_full_traj.json"
    exists = is_file_inside(unit, whole.name)
    if not compacted and not exists:
        return messages
    collected: list[Any] = []
    for segment in as_list(field(read_json(whole), "segments"), f"{whole.name}.segments") if exists else ():
        if field(segment, "kind") != "summarizer":
            part = as_list(field(segment, "messages"), f"{whole.name}.segments[].messages")
            collected = _join_segments(collected, part)
    spoken = [m for m in collected or messages if field(m, "role") == "assistant"]
    turns = [m for m in spoken if field(m, "extra", "summary") is not True]
    bare = sum(field(m, "extra", "token_capture") is None for m in turns)
    if not collected or bare:
        lost = f"{bare} of {len(turns)} turns have no token ids, so what they read is lost"
        remedy = "record with capture_token_ids, or with compaction off"
        raise Unreadable("compacted", f"{agent_id}: its context was compacted and {lost}; {remedy}")
    return collected


def _join_segments(before: list[Any], segment: list[Any]) -> list[Any]:
    """Append a segment, which begins with the prompt and a summary and then repeats the last messages of `before`."""
    if not before:
        return segment
    summary = next((i for i, m in enumerate(segment) if field(m, "extra", "summary") is True), None)
    if summary is None:
        raise Unreadable("compacted", "a segment after the first has no summary, so nothing joins it to the one before")
    rest = segment[summary + 1 :]
    shared = next((n for n in range(min(len(before), len(rest)), 0, -1) if before[-n:] == rest[:n]), 0)
    return [*before, segment[summary], *rest[shared:]]


# --- the messages between the agents ---------------------------------------------------------------------------------


def _conversation(unit: Path) -> list[tuple[datetime | None, str, str]]:
    """Return (time, sender, text) of `conversation.json` in the order of time.

    An event without a time stays after the event before it.
    """
    if not (unit / "conversation.json").exists():
        return []
    events = []
    for raw in as_list(read_json(unit / "conversation.json"), "conversation.json"):
        event = as_mapping(raw, "conversation.json[]")
        sender, text = text_field(event, "from"), text_field(event, "message")
        if sender and text and field(event, "received") is not True:
            events.append((to_utc(field(event, "timestamp")), sender, text))
    last = datetime.min.replace(tzinfo=UTC)
    known = [last := event[0] or last for event in events]
    return [event for _, event in sorted(zip(known, events, strict=True), key=lambda pair: pair[0])]


def _date_messages(agents: Sequence[AgentRecord], conversation: Sequence[tuple[datetime | None, str, str]]) -> None:
    """Date turns without a time by the message they sent, matched by sender and text."""
    unmatched = list(conversation)
    for agent, turn, action in ((a, t, action) for a in agents for t in a.turns for action in t.actions):
        sent = next((e for e in unmatched if e[1:] == (agent.agent_id, action.message)), None)
        if sent is not None:
            unmatched.remove(sent)
            turn.at = turn.at or sent[0]
