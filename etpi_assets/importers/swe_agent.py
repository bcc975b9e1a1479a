"""SWE-agent trajectories: `.traj` files with `history`, and mostly `trajectory` and `info`, in every action format.

The harness records the command that it parsed from each message and ran (`action`); that is the turn's action, the text
is not parsed again. Demonstrations in the history are part of the prompt, not turns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from etpi_assets.importers.conversation import ChatEntry, Options, chat_entries, fill_agent
from etpi_assets.importers.format import DetectionInput, FormatDoc, run_format
from etpi_assets.importers.rows import files_below
from etpi_assets.importers.run_info import exit_by_action, exit_name, imported, repo_of
from etpi_assets.importers.source import Unreadable, as_mapping, read_json, text_field
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
    entries = [e for i, raw in enumerate(data["history"]) for e in _entries(raw, f"{unit.name}.history[{i}]")]
    if not any(entry.role == "assistant" and entry.learn for entry in entries):
        raise Unreadable("empty", f"{unit.name}: {len(entries)} message(s), none by the agent")
    agent = AgentRecord("agent1", "", "solo", "unknown", patch=text_field(data, "info", "submission"))
    fill_agent(agent, entries, options)
    status = text_field(data, "info", "exit_status")
    agent.exit_status = exit_name(status) or exit_by_action(agent.turns[-1].actions)
    task_id = unit.name.removesuffix(".gz").removesuffix(".zst").removesuffix(".traj")
    return imported(
        [agent],
        task_id,
        options.repo or repo_of(task_id),
        teacher=options.teacher or _model(data.get("replay_config")),
    )


def _entries(raw: Any, name: str) -> Iterator[ChatEntry]:
    message = as_mapping(raw, name)
    demo = message.get("is_demo") is True
    command = (text_field(message, "action") or "").strip()
    for entry in chat_entries([message], name):
        if demo:
            entry.learn, entry.kind = False, "prompt"
        elif entry.role == "assistant" and command:
            entry.actions = [Action("bash", command, form=_form(entry))]
        yield entry


def _form(entry: ChatEntry) -> str:
    if entry.tool_calls:
        return "tool_calls"
    return "xml" if "<command>" in entry.content or "<tool_call>" in entry.content else "fenced"


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
