"""Tables of conversations as an importer reads them, for tests of curation."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from etpi_assets.importers.conversation import Options, fill_agent
from etpi_assets.importers.generic import read_messages
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord
from etpi_assets.trajectories.tables import to_tables


class NoDefault:
    """No first prompt of a student is known, as for imported runs."""

    def __call__(self, task_id: str | None, agent_id: str) -> None:
        return None

    def steering(self, task_id: str, agent_id: str) -> set[str]:
        return set()


def tables_of(*conversations: list[dict[str, Any]], tools: list[Any] | None = None) -> dict[str, pa.Table]:
    """Return the tables of conversations as an importer reads them."""
    records = []
    for number, messages in enumerate(conversations):
        agent = AgentRecord("agent1", "", "solo", "unknown")
        entries = read_messages(messages, "messages")
        fill_agent(agent, entries, Options(), answers="last")
        record = RolloutRecord(f"r{number}", "set", None, None, None, [agent], tools=tools)
        records.append(record)
    return to_tables(records)
