"""ShareGPT rows: `conversations` of `{from, value}`, with LLaMA-Factory's function calls and observations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etpi_assets.importers import messages
from etpi_assets.importers.conversation import Options
from etpi_assets.importers.format import FormatDoc, Row, row_format
from etpi_assets.importers.source import as_mapping
from etpi_assets.trajectories.records import RolloutRecord

_NAMES = {"chatgpt": "gpt", "bard": "gpt", "bing": "gpt"}
"""Senders -> a role that `chat_entries` knows."""


def record(row: Row, where: str, options: Options) -> RolloutRecord:
    """Read a row. Raises Unreadable: `preference`, `unknown_role`, `unknown_form`, `empty`, `no_prompt`."""
    items = messages.listed(row.get("conversations"), f"{where}, conversations")
    items = [_with_role(item, f"{where}, conversations[{i}]") for i, item in enumerate(items)]
    return messages.record({**row, "messages": items}, where, options)


def _with_role(raw: Any, name: str) -> Mapping[str, Any]:
    """Return a message of `{from, value}`, or of either with the other's key of a chat API, in the form of that API."""
    message = as_mapping(raw, name)
    sender = message.get("role") or message.get("from")
    role = _NAMES.get(sender, sender) if isinstance(sender, str) else sender
    content = message.get("value") if message.get("content") is None else message["content"]
    return {**message, "role": role, "content": content}


FORMAT = row_format(
    "sharegpt",
    FormatDoc(
        title="ShareGPT: `conversations` of `{from, value}`, including function calls and observations",
        keeps="roles, text, calls, tool schemas (`tools`), the `system` column, answers in words as turns, flags that "
        "keep a message out of training, as in `messages`; task, repository, model and reward if there are columns "
        "for them",
        loses="preferences (quarantined), other columns",
    ),
    claims=lambda row: "conversations" in row,
    record=record,
)
