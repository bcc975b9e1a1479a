"""Imported rollouts that are the same row again: the same task, messages, tools, token ids and reward.

The task of a row without one is its place (`RunInfo`), which does not count.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from etpi_resources.lake.stored import Rows, batches

_CONTENT = {
    "rollouts": ("tools",),
    "turns": ("agent_id", "turn", "suffix_ids", "output_ids", "finish_reason"),
    "messages": ("agent_id", "role", "kind", "content", "reasoning", "tool_calls"),
}
"""Table of raw rollouts -> its columns that make a conversation."""


def digests(
    rollouts: pa.Table, scores: pa.Table, tokens: Mapping[str, int], stored: Callable[[str], Rows]
) -> dict[str, bytes]:
    """Return rollout id -> hash of the conversation, for the imported rollouts that may have an equal one.

    Only rollouts with the task, reward, and numbers of turns and output tokens of another are read.

    Args:
        tokens: output tokens of the rollouts whose score has none.
        stored: a table of the raw rollouts.
    """
    imported = rollouts.filter((pc.field("origin") == "set") & (pc.field("engine") == "imported"))
    tasks = {
        row["rollout_id"]: task_of(row) for row in imported.select(["rollout_id", "task_id", "source"]).to_pylist()
    }
    alike: defaultdict[str, list[str]] = defaultdict(list)
    rows = scores.filter(pc.field("rollout_id").isin(pa.array(list(tasks), pa.string())))
    for row in rows.select(["rollout_id", "turns", "output_tokens", "reward"]).to_pylist():
        name = row["rollout_id"]
        count = tokens.get(name) if row["output_tokens"] is None else row["output_tokens"]
        alike[repr((tasks[name], row["turns"], count, row["reward"]))].append(name)
    facts = {name: key for key, names in alike.items() if len(names) > 1 for name in names}
    hashes = {name: hashlib.blake2b(key.encode(), digest_size=16) for name, key in facts.items()}
    wanted = pc.field("rollout_id").isin(pa.array(list(hashes), pa.string()))
    for table, columns in _CONTENT.items() if hashes else ():
        for batch in batches(stored(table), ["rollout_id", *columns]):
            for row in pa.Table.from_batches([batch]).filter(wanted).to_pylist():
                name, *values = row.values()
                hashes[name].update(orjson.dumps(values))
    return {name: value.digest() for name, value in hashes.items()}


def task_of(rollout: Mapping[str, Any]) -> str | None:
    """Return the task of a row of `rollouts` (columns source and task_id); None if its name is only its place."""
    place = (rollout["source"] or "").rpartition("#")
    return None if rollout["task_id"] == f"{place[0]}, row {place[2]}" else rollout["task_id"]
