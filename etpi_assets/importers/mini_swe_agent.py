"""mini-swe-agent trajectories: the bare list of messages, and `{info, messages, trajectory_format}` (1.0, 1.1)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from etpi_assets.importers.conversation import Options, chat_entries, fill_agent
from etpi_assets.importers.format import DetectionInput, FormatDoc, run_format
from etpi_assets.importers.rows import files_below
from etpi_assets.importers.run_info import exit_by_action, imported, repo_of
from etpi_assets.importers.source import Unreadable, as_list, holds_conversation, read_json, text_field
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord

_JSON = (".json", ".json.gz", ".json.zst")
_RUN = ".traj.json"
"""Part of the names of trajectories."""


def claims(source: DetectionInput) -> bool:
    return any(_RUN in file.name and file.name.endswith(_JSON) for file in source.files)


def record(unit: Path, root: Path, options: Options) -> RolloutRecord:
    """Read one file.

    Raises:
        Unreadable: `not_a_rollout`, `empty`, `unknown_form`, or as `read_json` and `chat_entries`.
    """
    data = read_json(unit)
    if _RUN not in unit.name and isinstance(data, dict | list) and not holds_conversation(data):
        raise Unreadable("not_a_rollout", f"{unit.name} is no trajectory: its name has no {_RUN}, and it no messages")
    if isinstance(data, Mapping) and "messages" not in data:
        raise Unreadable(
            "unknown_form", f"{unit.name} is an object with {', '.join(map(str, list(data)[:8])) or 'no keys'}"
        )
    messages = as_list(data.get("messages") if isinstance(data, Mapping) else data, unit.name)
    if messages and not any(isinstance(message, Mapping) and "role" in message for message in messages):
        raise Unreadable("unknown_form", f"{unit.name} is an array of something other than chat messages")
    entries = chat_entries(messages, unit.name)
    if not any(entry.role == "assistant" for entry in entries):
        raise Unreadable("empty", f"{unit.name}: {len(messages)} message(s), none by the assistant")
    agent = AgentRecord("agent1", "", "solo", "unknown", patch=text_field(data, "info", "submission"))
    fill_agent(agent, entries, options)
    agent.exit_status = text_field(data, "info", "exit_status") or exit_by_action(
        agent.turns[-1].actions if agent.turns else []
    )
    task_id = text_field(data, "instance_id") or unit.name.partition(".")[0]
    return imported(
        [agent],
        task_id,
        options.repo or repo_of(task_id),
        teacher=options.teacher or text_field(data, "info", "config", "model", "model_name"),
        started_at=next((turn.at for turn in agent.turns if turn.at), None),
    )


FORMAT = run_format(
    "mini_swe_agent",
    FormatDoc(
        title="mini-swe-agent trajectories: a bare list of messages, and `{info, messages, trajectory_format}` "
        "(1.0, 1.1)",
        files="`*.traj.json`, also with `.gz` or `.zst`; other JSON files in the same folders are quarantined",
        keeps="messages, calls, reasoning, token ids if captured, return codes, times, the submitted patch, exit "
        "status, the model's name",
        loses="costs, the configuration, the raw provider responses",
    ),
    claims=claims,
    units=lambda root: files_below(root, *_JSON),
    record=record,
)
