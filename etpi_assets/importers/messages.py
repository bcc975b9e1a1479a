"""Rows of chat messages: OpenAI's fine-tuning files, and the many hub data sets with a `messages` column."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from etpi_assets.importers.conversation import Answers, ChatEntry, Options, Role, chat_entries, fill_agent
from etpi_assets.importers.format import PLAIN, FormatDoc, Row, row_format
from etpi_assets.importers.run_info import RunInfo, build_rollout, exit_by_action, run_info
from etpi_assets.importers.source import Unreadable, as_list, field, parameters_of, text_field, tool_schemas_of
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord


def record(row: Row, where: str, options: Options) -> RolloutRecord:
    """Read a row. Raises Unreadable: `preference`, `empty` if it has no turn, or as `chat_entries`."""
    check_row(row, where)
    if "messages" not in row:
        raise Unreadable("unknown_form", f"{where} has no `messages`; it has {', '.join(map(str, list(row)[:12]))}")
    messages = listed(row["messages"], f"{where}, messages")
    info = run_info(row, options)
    if info.tools is None:  # some write them into a message
        info = replace(
            info, tools=next((t for m in messages if (t := tool_schemas_of(field(m, "tools"), where))), None)
        )
    entries = chat_entries(messages, f"{where}, messages")
    return solo(with_system(entries, row), info, where, options)


def _is_message(row: Any) -> bool:
    """Return whether a row is one message, as in a file that is the array of a run's messages (Cline's).

    Rows with the id of a conversation are messages of many.
    """
    if not isinstance(row, dict) or not row.keys() >= {"role", "content"} or "messages" in row:
        return False
    return not any(key.endswith("_id") for key in row)


def with_system(entries: list[ChatEntry], row: Row) -> list[ChatEntry]:
    """Return the conversation with the row's `system` column, unless it has a system prompt of its own."""
    system = text_field(row, "system")
    has_prompt = bool(entries) and entries[0].role == "system"
    return entries if has_prompt or system is None else [ChatEntry("system", system), *entries]


_MEDIA = ("images", "videos", "audios")
"""Columns of files that the messages show."""
_PREFERENCES = ("chosen", "rejected", "rejected_response", "rejected_messages", "chosen_messages")


def check_row(row: Row, where: str) -> None:
    """Raise Unreadable for a row that compares answers (`preference`), or shows files (`non_text_content`)."""
    if compared := [key for key in _PREFERENCES if row.get(key) and isinstance(row[key], str | list | dict)]:
        raise Unreadable(
            "preference",
            f"{where} compares answers to one prompt ({', '.join(compared)}), which is no trajectory; to train on the "
            "chosen answers, write rows whose `messages` end with the chosen one, without these columns",
        )
    if shown := [key for key in _MEDIA if isinstance(row.get(key), list) and row[key]]:
        raise Unreadable("non_text_content", f"{where} shows {', '.join(shown)}; only text can be imported")


def listed(value: Any, name: str) -> list[Any]:
    """Return a list, parsed from JSON text if the column holds text. Raises Unreadable: `unknown_form`."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise Unreadable("unknown_form", f"{name} is text that is not JSON") from error
    return as_list(value, name)


def text_entries(value: Any, role: Role, name: str) -> list[ChatEntry]:
    """Parse messages, which may be JSON text, or one message's text."""
    if isinstance(value, str):
        return chat_entries(written, name) if (written := _written(value)) else [ChatEntry(role, value)]
    return chat_entries(listed(value, name), name)


def _written(text: str) -> list[Any] | None:
    """Return the messages that a text is the JSON of; None for any other text."""
    if not text.startswith("[{"):
        return None
    try:
        items = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return items if all(isinstance(item, dict) and "role" in item and "content" in item for item in items) else None


def prompt_entries(value: Any, name: str) -> list[ChatEntry]:
    """Parse a prompt, messages or a text, as context."""
    entries = text_entries(value, "user", name)
    for entry in entries:
        entry.learn, entry.kind = False, "prompt"
    return entries


def solo(
    entries: Sequence[ChatEntry], info: RunInfo, where: str, options: Options, answers: Answers = "answered"
) -> RolloutRecord:
    """Build the rollout of one agent. Raises Unreadable: `empty`, `no_prompt`."""
    spoken = [entry for entry in entries if entry.role == "assistant" and entry.learn]
    if not spoken:
        raise Unreadable("empty", f"{where}: {len(entries)} message(s), none that the assistant is to learn from")
    if info.truncated:
        spoken[-1].finish_reason = "length"
    _drop_padding(spoken, info.tools)
    agent = AgentRecord("agent1", "", "solo", info.exit_status or "unknown", patch=info.patch)
    fill_agent(agent, entries, options, bare_calls=True, answers=answers)
    if agent.exit_status == "unknown":
        agent.exit_status = exit_by_action(agent.turns[-1].actions)
    return build_rollout([agent], info, where)


def _drop_padding(entries: Sequence[ChatEntry], tools: Sequence[Any] | None) -> None:
    """Remove the null arguments that a call has only because another tool declares them.

    JSON that was written from a table has them; a null of an argument of the tool itself is a value.
    """
    padded = [
        function
        for entry in entries
        for call in entry.tool_calls or ()
        if None in _arguments(function := call["function"] if isinstance(call.get("function"), dict) else call)
    ]
    if not tools or not padded:
        return
    declared = {text_field(tool.get("function", tool), "name"): parameters_of(tool) for tool in tools}
    names = {name for of_tool in declared.values() for name in of_tool or ()}
    for function in padded:
        if (parameters := declared.get(text_field(function, "name"))) is not None:
            function["arguments"] = {
                k: v for k, v in function["arguments"].items() if v is not None or k in parameters or k not in names
            }


def _arguments(function: Mapping[str, Any]) -> Collection[Any]:
    """Return the values of a call's arguments, if they are an object."""
    arguments = function.get("arguments")
    return arguments.values() if isinstance(arguments, dict) else ()


FORMAT = row_format(
    "messages",
    FormatDoc(
        title="Chat messages: OpenAI's fine-tuning files, hub data sets with a `messages` column (a list or JSON "
        "text), and files that are one array of messages, as Cline's `api_conversation_history.json`",
        keeps="roles, text, the `system` column, calls (arguments as text or objects; nulls are kept, null padding of "
        "tables is not), tool schemas (`tools`, `functions`), answers in words as turns, reasoning, times, finish "
        "reasons; parallel results stand in the order of the calls whose ids they have; messages whose `weight`, "
        "`train`, `loss`, `loss_mask`, `loss_weight` or `trainable` is 0 or false and those before the first assistant "
        "message become context, never turns; task, repository, model, reward, patch and exit status under their usual "
        "column names, also within `metadata` and `info`",
        files="`.jsonl`, `.json`, `.parquet`, also with `.gz` or `.zst`; one rollout per row, or per array of messages",
        loses="names of participants, other columns; a row with images, of preferences, or with a message that is "
        "trained in part or with a weight between 0 and 1 is quarantined",
    ),
    claims=lambda row: "messages" in row or _is_message(row),
    record=record,
    rank=PLAIN,
    part=(_is_message, "messages"),
)
