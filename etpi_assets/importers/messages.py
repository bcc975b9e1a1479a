"""Rows of chat messages: OpenAI's fine-tuning files, and the many hub data sets with a `messages` column."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from etpi_assets.importers.conversation import ChatEntry, Options, accept_answer, chat_entries, fill_agent
from etpi_assets.importers.format import PLAIN, FormatDoc, Row, row_format
from etpi_assets.importers.run_info import RunInfo, build_rollout, exit_by_action, run_info
from etpi_assets.importers.source import Unreadable, as_list
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord


def claims(row: Row) -> bool:
    return "messages" in row


def record(rows: list[Row], where: str, options: Options) -> RolloutRecord:
    """Read a row. Raises Unreadable: `empty` if it has no turn, or as `chat_entries`."""
    (row,) = rows
    entries = chat_entries(listed(row.get("messages"), f"{where}, messages"), f"{where}, messages")
    return solo(entries, run_info(row, options), where, options)


def listed(value: Any, name: str) -> list[Any]:
    """Return a list, parsed from JSON text if the column holds text. Raises Unreadable: `unknown_form`."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise Unreadable("unknown_form", f"{name} is text that is not JSON") from error
    return as_list(value, name)


def solo(entries: Sequence[ChatEntry], info: RunInfo, where: str, options: Options) -> RolloutRecord:
    """Build the rollout of one agent. Raises Unreadable: `empty`, `no_prompt`."""
    if not any(entry.role == "assistant" and entry.learn for entry in entries):
        raise Unreadable("empty", f"{where}: {len(entries)} message(s), none that the assistant is to learn from")
    agent = AgentRecord("agent1", "", "solo", info.exit_status or "unknown", patch=info.patch)
    fill_agent(agent, entries, options, bare_calls=True)
    if info.exit_status is None:
        agent.exit_status = exit_by_action(agent.turns[-1].actions)
    accept_answer(agent, entries)
    return build_rollout([agent], info, where)


FORMAT = row_format(
    "messages",
    FormatDoc(
        title="Chat messages: OpenAI's fine-tuning files and hub data sets with a `messages` column (a list or "
        "JSON text)",
        keeps="roles, text, calls (arguments as text or objects, without null padding), tool schemas (`tools`, "
        "`functions`), a final answer as a turn, reasoning, times; messages of `weight` 0 and those before "
        "the first assistant message become context, never turns; task, repository, model, reward, patch "
        "and exit status under their usual column names, also within `metadata`",
        loses="names of participants, call ids of results, images (such a row is quarantined), other columns",
    ),
    claims=claims,
    record=record,
    rank=PLAIN,
)
