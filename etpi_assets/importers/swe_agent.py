"""SWE-agent trajectories: `.traj` files with `history`, and mostly `trajectory` and `info`, in every action format.

The harness records the command that it parsed from each message and ran (`action`); that is the turn's action, the text
is not parsed again. Demonstrations in the history are part of the prompt, not turns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etpi_assets.importers.conversation import (
    ROLES,
    ChatEntry,
    Options,
    answered_call,
    fill_agent,
    is_trained,
    reasoning_of,
)
from etpi_assets.importers.format import DetectionInput, FormatDoc, run_format
from etpi_assets.importers.rows import files_below
from etpi_assets.importers.run_info import exit_name, imported, repo_of
from etpi_assets.importers.source import (
    Unreadable,
    as_mapping,
    content_text,
    read_json,
    text_field,
    to_utc,
    tool_calls,
)
from etpi_assets.trajectories.records import Action, AgentRecord, RolloutRecord

_TRAJ = (".traj", ".traj.gz", ".traj.zst")


def claims(source: DetectionInput) -> bool:
    return any(file.name.endswith(_TRAJ) for file in source.files)


def record(unit: Path, root: Path, options: Options) -> RolloutRecord:
    """Read one file. Raises Unreadable: `no_history`, `empty`, `unknown_role`, `unknown_form`, or as `read_json`."""
    data = as_mapping(read_json(unit), unit.name)
    if not isinstance(data.get("history"), list):
        raise Unreadable(
            "no_history", f"{unit.name} has {', '.join(map(str, list(data)[:8])) or 'no keys'}, no `history`"
        )
    entries = [_entry(raw, f"{unit.name}.history[{i}]") for i, raw in enumerate(data["history"])]
    if not any(entry.role == "assistant" and entry.learn for entry in entries):
        raise Unreadable("empty", f"{unit.name}: {len(entries)} message(s), none by the agent")
    exit_status = _exit(text_field(data, "info", "exit_status"), entries)
    agent = AgentRecord("agent1", "", "solo", exit_status, patch=text_field(data, "info", "submission"))
    fill_agent(agent, entries, options)
    task_id = unit.name.removesuffix(".gz").removesuffix(".zst").removesuffix(".traj")
    return imported(
        [agent],
        task_id,
        options.repo or repo_of(task_id),
        teacher=options.teacher or _model(data.get("replay_config")),
    )


def _entry(raw: Any, name: str) -> ChatEntry:
    message = as_mapping(raw, name)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise Unreadable("unknown_role", f"{name} has role {role!r}; known are {', '.join(ROLES)}")
    demo = message.get("is_demo") is True
    content = content_text(message.get("content"), name)
    calls = tool_calls(message.get("tool_calls"), name)
    command = text_field(message, "action")
    acts = ROLES[role] == "assistant" and not demo and command is not None and command.strip()
    return ChatEntry(
        role=ROLES[role],
        content=content,
        tool_calls=calls,
        reasoning=reasoning_of(message, name),
        at=to_utc(message.get("timestamp")),
        learn=not demo and is_trained(message, name),
        kind="prompt" if demo else None,
        answers=answered_call(message),
        actions=[Action("bash", command.strip(), form=_form(content, calls))] if acts and command else None,
    )


def _form(content: str, calls: list[dict[str, Any]] | None) -> str:
    if calls:
        return "tool_calls"
    return "xml" if "<command>" in content or "<tool_call>" in content else "fenced"


def _exit(status: str | None, entries: list[ChatEntry]) -> str:
    if status is None:  # no `info`: take the last command
        last = next((e.actions[-1].command for e in reversed(entries) if e.actions), "")
        return "Submitted" if last.split(maxsplit=1)[:1] == ["submit"] else "unknown"
    return exit_name(status) or "unknown"


def _model(config: Any) -> str | None:
    """Return the model's name from the replay configuration, an object or JSON text."""
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except (ValueError, RecursionError):
            return None
    return text_field(config, "agent", "model", "name") if isinstance(config, Mapping) else None


FORMAT = run_format(
    "swe_agent",
    FormatDoc(
        title="SWE-agent trajectories in every action format",
        files="`*.traj`, also with `.gz` or `.zst`",
        keeps="the history with its calls, the command that the harness parsed and ran as the turn's action, the "
        "submitted patch, exit status, the model's name; demonstrations become context, never turns",
        loses="`trajectory` (states, execution times), costs, the environment's configuration",
    ),
    claims=claims,
    units=lambda root: files_below(root, *_TRAJ),
    record=record,
)
