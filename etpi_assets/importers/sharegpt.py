"""ShareGPT rows: `conversations` of `{from, value}`, with LLaMA-Factory's function calls and observations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from etpi_assets.importers.conversation import ROLES, ChatEntry, Options, chat_entries
from etpi_assets.importers.format import FormatDoc, Row, row_format
from etpi_assets.importers.messages import listed, solo
from etpi_assets.importers.run_info import run_info
from etpi_assets.importers.source import Unreadable, as_mapping, content_text, text_field, tool_calls
from etpi_assets.trajectories.records import RolloutRecord

_ROLES: Mapping[str, Literal["system", "user", "assistant", "tool"]] = {
    **ROLES,
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "observation": "tool",
}


def claims(row: Row) -> bool:
    return "conversations" in row


def record(rows: list[Row], where: str, options: Options) -> RolloutRecord:
    """Read a row. Raises Unreadable: `unknown_role`, `unknown_form`, `empty`, `no_prompt`."""
    (row,) = rows
    messages = listed(row.get("conversations"), f"{where}, conversations")
    if any(isinstance(message, dict) and message.get("role") is not None for message in messages):
        entries = chat_entries(messages, f"{where}, conversations")
    else:
        entries = [_entry(raw, f"{where}, conversations[{i}]") for i, raw in enumerate(messages)]
    if system := text_field(row, "system"):
        entries.insert(0, ChatEntry("system", system))
    return solo(entries, run_info(row, options), where, options)


def _entry(raw: Any, name: str) -> ChatEntry:
    message = as_mapping(raw, name)
    sender, value = message.get("from"), content_text(message.get("value"), name)
    if sender == "function_call":
        try:
            calls = json.loads(value)
        except (ValueError, RecursionError):
            return ChatEntry("assistant", value, calls=True)  # `parse_error` says that it cannot be parsed
        return ChatEntry("assistant", "", tool_calls(calls if isinstance(calls, list) else [calls], name))
    if not isinstance(sender, str) or sender not in _ROLES:
        raise Unreadable("unknown_role", f"{name} is from {sender!r}; known are {', '.join(_ROLES)}, function_call")
    weight = message.get("weight")
    return ChatEntry(_ROLES[sender], value, learn=not (isinstance(weight, int | float) and weight == 0))


FORMAT = row_format(
    "sharegpt",
    FormatDoc(
        title="ShareGPT: `conversations` of `{from, value}`, including function calls and observations",
        keeps="roles, text, calls, tool schemas (`tools`), the `system` column, a final answer as a turn; task, "
        "repository, model and reward if there are columns for them",
        loses="other columns",
    ),
    claims=claims,
    record=record,
)
