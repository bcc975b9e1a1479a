"""ShareGPT rows: `conversations` of `{from, value}`, with LLaMA-Factory's function calls and observations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etpi_assets.importers.conversation import Options, chat_entries
from etpi_assets.importers.format import FormatDoc, Row, row_format
from etpi_assets.importers.messages import listed, refuse_preference, solo, with_system
from etpi_assets.importers.run_info import run_info
from etpi_assets.importers.source import as_mapping
from etpi_assets.trajectories.records import RolloutRecord

_NAMES = {"chatgpt": "gpt", "bard": "gpt", "bing": "gpt"}
"""Senders -> a role that `chat_entries` knows."""


def claims(row: Row) -> bool:
    return "conversations" in row


def record(rows: list[Row], where: str, options: Options) -> RolloutRecord:
    """Read a row. Raises Unreadable: `preference`, `unknown_role`, `unknown_form`, `empty`, `no_prompt`."""
    (row,) = rows
    refuse_preference(row, where)
    name = f"{where}, conversations"
    messages = listed(row.get("conversations"), name)
    if any(isinstance(message, dict) and message.get("role") is not None for message in messages):
        entries = chat_entries(messages, name)
    else:
        entries = chat_entries([_with_role(raw, f"{name}[{i}]") for i, raw in enumerate(messages)], name)
    return solo(with_system(entries, row), run_info(row, options), where, options)


def _with_role(raw: Any, name: str) -> Mapping[str, Any]:
    """Return a message of `{from, value}` in the form of a chat API."""
    message = as_mapping(raw, name)
    sender = message.get("from")
    role = _NAMES.get(sender, sender) if isinstance(sender, str) else sender
    return {**message, "role": role, "content": message.get("value")}


FORMAT = row_format(
    "sharegpt",
    FormatDoc(
        title="ShareGPT: `conversations` of `{from, value}`, including function calls and observations",
        keeps="roles, text, calls, tool schemas (`tools`), the `system` column, answers in words as turns, flags that "
        "keep a message out of training, as in `messages`; task, repository, model and reward if there are columns "
        "for them",
        loses="preferences (quarantined), other columns",
    ),
    claims=claims,
    record=record,
)
