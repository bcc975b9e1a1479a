"""Results of tau2-bench: one document with all simulations, or one with a folder of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from etpi_assets.importers.conversation import Options, chat_entries
from etpi_assets.importers.format import FOLDERS, FormatDoc, Row, row_format
from etpi_assets.importers.messages import solo
from etpi_assets.importers.responses import instructed
from etpi_assets.importers.rows import files_below
from etpi_assets.importers.run_info import add_usage, run_info, sampler_of
from etpi_assets.importers.source import (
    Unreadable,
    as_list,
    as_mapping,
    field,
    int32_field,
    no_run,
    number_field,
    read_json,
    text_field,
    to_utc,
    tool_schemas_of,
)
from etpi_assets.trajectories.records import RolloutRecord

_FOLDER = "simulations"
_ENDS = {
    "user_stop": "Submitted",
    "agent_stop": "Submitted",
    "max_steps": "LimitsExceeded",
    "timeout": "LimitsExceeded",
    "too_many_errors": "Error",
    "agent_error": "Error",
    "user_error": "Error",
    "infrastructure_error": "Error",
}


def claims(row: Mapping[str, Any]) -> bool:
    return ("tasks" in row and field(row, "info", "environment_info") is not None) or _is_simulation(row)


def _is_simulation(row: Mapping[str, Any]) -> bool:
    return {"task_id", "termination_reason"} <= set(row) and ("messages" in row or "ticks" in row)


def units(root: Path) -> list[Path]:
    """Return the documents below the root, sorted; a folder of simulations belongs to the document beside it."""
    if not root.is_dir():
        return [root]
    files = files_below(root, ".json")
    return [f for f in files if f.parent.name != _FOLDER or not (f.parent.parent / "results.json").is_file()]


def iter_simulations(unit: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number, {"info": of the run, "simulation": ...}) or an Unreadable of each one. Raises Unreadable."""
    document = as_mapping(read_json(unit), unit.name)
    if _is_simulation(document):
        yield 0, {"info": {}, "simulation": document}
        return
    if not claims(document):
        raise no_run(document, f"{unit.name} is no result of tau2-bench")
    simulations: list[Any] = as_list(document.get(_FOLDER) or [], f"{unit.name}.{_FOLDER}")
    files = sorted((unit.parent / _FOLDER).glob("*.json")) if not simulations else []
    if not simulations and not files:
        raise Unreadable("empty", f"{unit.name} has no simulations")
    for number, simulation in enumerate(simulations or files):
        try:
            value = read_json(simulation) if isinstance(simulation, Path) else simulation
            yield number, {"info": document.get("info"), "simulation": value}
        except Unreadable as refused:
            yield number, refused


def record(row: Row, where: str, options: Options) -> RolloutRecord:
    """Read a simulation. Raises Unreadable: `empty`, `unknown_form` for one of audio, or as `chat_entries`."""
    info, simulation = row["info"], as_mapping(row["simulation"], where)
    if not simulation.get("messages") and simulation.get("ticks"):
        raise Unreadable("unknown_form", f"{where} is a simulation of audio, which has no messages")
    messages = as_list(simulation.get("messages"), f"{where}, messages")
    kept = [_with_call_id(message) for message in messages if not _is_of_user(message)]
    entries = chat_entries(kept, f"{where}, messages")
    for entry in entries:
        if entry.role == "user":
            break
        entry.learn = False  # the greeting is a constant of the program
    domain = text_field(info, "environment_info", "domain_name")
    reason = text_field(simulation, "termination_reason")
    name = text_field(simulation, "task_id") or where
    facts = {
        "instance_id": f"{domain}/{name}" if domain else name,
        "repo": domain,
        "teacher": text_field(info, "agent_info", "llm"),
        "reward": number_field(simulation, "reward_info", "reward"),
        "exit_status": _ENDS.get(reason or "", reason),
        "tools": tool_schemas_of(field(info, "environment_info", "tool_defs"), f"{where}, tool_defs"),
    }
    system = simulation.get("policy") or field(info, "environment_info", "policy")
    entries = instructed(system, entries)
    rollout = solo(entries, run_info(facts, options), where, options, "all")
    settings, usage = field(info, "agent_info", "llm_args"), Counter[str]()
    for message in kept:
        add_usage(usage, field(message, "usage") if field(message, "role") == "assistant" else None)
    rollout.sampler = sampler_of(settings if isinstance(settings, dict) else {}, dict(usage))
    rollout.sample_seed = int32_field(simulation, "seed")
    rollout.started_at = to_utc(simulation.get("start_time")) or rollout.started_at
    rollout.wall_seconds = number_field(simulation, "duration")
    return rollout


def _with_call_id(message: Any) -> Any:
    """Return a result with the id of its call where chat APIs have it."""
    is_result = field(message, "role") == "tool" and "tool_call_id" not in message
    return {**message, "tool_call_id": message.get("id")} if is_result else message


def _is_of_user(message: Any) -> bool:
    """Return whether a message is a call of the simulated user, or a result of one; the agent reads neither."""
    if field(message, "role") == "tool":
        return field(message, "requestor") == "user"
    return field(message, "role") == "user" and bool(field(message, "tool_calls"))


FORMAT = row_format(
    "tau2",
    FormatDoc(
        title="Results of tau2-bench",
        files="`results.json` or another name, with its `simulations` in it or in a folder beside it, and single "
        "simulations; one rollout per simulation",
        keeps="messages, calls and results of the agent, the policy as the system prompt, reward, the reason of "
        "the end, model, sampler, usage, times, seed; the greeting is context",
        loses="calls of the simulated user. Not in the files: the agent's instructions around the policy, and "
        "mostly the tool schemas (`options.tools`). Simulations of audio are quarantined",
    ),
    claims=claims,
    record=record,
    iter_rows=iter_simulations,
    count_rows=None,
    rank=FOLDERS,
    units=units,
)
