"""Token-in/token-out pairs: `{input_ids, output_ids, metadata}`, one row per assistant turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from etpi_assets.importers.calls import listed
from etpi_assets.importers.conversation import Options, fill_agent, token_ids
from etpi_assets.importers.format import Row
from etpi_assets.importers.normal import Message
from etpi_assets.importers.run_info import build_rollout, run_info
from etpi_assets.importers.source import Unreadable, field, text_field
from etpi_assets.importers.token_rows import entries_of
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord


def group(row: Row) -> Any:
    """Return the rollout that the row belongs to; None: the row is a rollout of its own."""
    return text_field(row, "metadata", "rollout_id")


def record(rows: list[Row], where: str, options: Options) -> RolloutRecord:
    """Join the turns of one rollout. Raises Unreadable: `bad_token_ids`, `needs_tokenizer`, `unknown_form`."""
    by_agent: dict[str, list[Row]] = {}
    for row in rows:
        if not isinstance(row.get("metadata"), Mapping | None):
            listed(row["metadata"], f"{where}, metadata")  # raises with the type that it has
        by_agent.setdefault(text_field(row, "metadata", "agent_id") or "agent1", []).append(row)
    agents = [_agent(name, turns, where, options) for name, turns in by_agent.items()]
    return build_rollout(agents, run_info(rows[0], options), where)


def _agent(name: str, rows: list[Row], where: str, options: Options) -> AgentRecord:
    turns: list[Message] = []
    conversation: list[Message] = []
    for number, row in enumerate(rows):
        what = f"{where}, {name}, turn {number}"
        prompt = token_ids(row.get("input_ids"), f"{what}, input_ids")
        output = token_ids(row.get("output_ids"), f"{what}, output_ids")
        capture = text_field(row, "metadata", "capture") or options.capture
        conversation = entries_of(
            [*prompt, *output], [(len(prompt), len(prompt) + len(output))], options, what, capture
        )
        turns.append(conversation[-1])
    # The last prompt shows the earlier turns as its last assistant messages; replace these by the turns with their ids.
    entries = conversation[:-1]
    shown = [i for i, entry in enumerate(entries) if entry.role == "assistant"]
    for at, turn in zip(reversed(shown), reversed(turns[:-1]), strict=False):
        entries[at] = turn
    if len(turns) - 1 > len(shown):
        found = f"{len(turns)} turns, but the last prompt shows {len(shown)}: they are no one conversation"
        remedy = "leave `rollout_id` out of `metadata` to import each as a row of its own"
        raise Unreadable("unknown_form", f"{where}, {name}: {found}; {remedy}")
    defaults = {"feature_id": "", "role": "solo", "exit_status": "unknown"}
    facts = {key: text_field(rows[0], "metadata", key) or default for key, default in defaults.items()}
    agent = fill_agent(AgentRecord(name, **facts), [*entries, turns[-1]], options, answers="last")
    numbers = [number if type(number := field(row, "metadata", "turn")) is int else i for i, row in enumerate(rows)]
    if numbers == sorted(set(numbers)):
        mapping = dict(enumerate(numbers))
        agent.turns = [replace(turn, turn=mapping[turn.turn]) for turn in agent.turns]
        agent.messages = [replace(m, turn=None if m.turn is None else mapping[m.turn]) for m in agent.messages]
    return agent
