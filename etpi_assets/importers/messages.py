"""Rows of chat messages: OpenAI's fine-tuning files, and the many hub data sets with a `messages` column.

Belongs here: a row whose conversation stands under `messages`, and making a solo rollout of any row's messages. Does
not belong here: columns of one program (`verl`, `trl`, `openhands`, …).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from etpi_assets.agent.actions import NO_ACTION
from etpi_assets.importers.conversation import Entry, Options, build_agent, chat_entries
from etpi_assets.importers.facts import Facts, exit_by_action, facts, made_of
from etpi_assets.importers.format import PLAIN, Row, of_rows
from etpi_assets.importers.source import Unreadable, as_list
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord


def claims(row: Row) -> bool:
    return "messages" in row


def record(rows: list[Row], where: str, options: Options) -> RolloutRecord:
    """Raises Unreadable: `empty` where nothing is the assistant's, or as the messages say."""
    (row,) = rows
    entries = chat_entries(listed(row.get("messages"), f"{where}, messages"), f"{where}, messages")
    return solo(entries, facts(row, options), where, options)


def listed(value: Any, name: str) -> list[Any]:
    """A list, or one that a column holds as JSON text. Raises Unreadable: `unknown_form`."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise Unreadable("unknown_form", f"{name} is text that is not JSON") from error
    return as_list(value, name)


def solo(entries: Sequence[Entry], found: Facts, where: str, options: Options) -> RolloutRecord:
    """The rollout of one agent's messages. Raises Unreadable: `empty`, `no_prompt`."""
    if not any(entry.role == "assistant" and entry.learn for entry in entries):
        raise Unreadable("empty", f"{where}: {len(entries)} message(s), none that the assistant is to learn from")
    agent = build_agent(
        entries,
        agent_id="agent1",
        feature_id="",
        role="solo",
        exit_status=found.exit_status or "unknown",
        options=options,
        bare_calls=True,
        patch=found.patch,
    )
    if found.exit_status is None:
        agent.exit_status = exit_by_action(agent.turns[-1].actions)
    if _answered(entries, agent) and found.exit_status in (None, "Submitted"):
        agent.turns[-1].parse_error, agent.exit_status = None, "Submitted"
    return made_of([agent], found, where)


def _answered(entries: Sequence[Entry], agent: AgentRecord) -> bool:
    """Whether the conversation ends in a final answer: an assistant's text without any call, not cut, that nothing
    follows. A student that never reads one never learns to stop."""
    last, turn = entries[-1], agent.turns[-1]
    speaks = last.role == "assistant" and last.learn and not last.calls and bool(last.content.strip())
    return speaks and turn.parse_error == NO_ACTION and turn.finish_reason != "length"


FORMAT = of_rows(
    "messages",
    title="Chat messages: OpenAI's fine-tuning files and hub data sets with a `messages` column (list or JSON text)",
    keeps="roles, text, calls (arguments as text or objects, null padding taken off), tool schemas (`tools`, "
    "`functions`), a final answer as a turn, reasoning, times; `weight` 0 and "
    "everything before the first assistant message is read, never learnt; task, repository, model, reward, patch and "
    "exit status by the names such columns have, also within `metadata`",
    loses="names of participants, call ids of results, images (such a row is quarantined), other columns",
    claims=claims,
    record=record,
    rank=PLAIN,
)
