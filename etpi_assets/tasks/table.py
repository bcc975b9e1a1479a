"""Tasks as rows of the `tasks` table and back, without loss; the licences of their data."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import pyarrow as pa

from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_assets.tasks.family import RejectedInput, Task
from etpi_resources.lake.schemas import from_rows


def task_table(tasks: Sequence[Task]) -> pa.Table:
    """Return the `tasks` table, in the given order."""
    payloads = [json.dumps(task.payload, sort_keys=True, ensure_ascii=False) for task in tasks]
    return from_rows("tasks", [{**vars(task), "payload": p} for task, p in zip(tasks, payloads, strict=True)])


def rejected_table(rejected: Sequence[RejectedInput], asset: str = "tasks") -> pa.Table:
    return from_rows("quarantined", [{"asset": asset, **vars(each)} for each in rejected])


def read_tasks(table: pa.Table, split: str = "all") -> list[Task]:
    """Return the tasks of a split ("all": every split) of a `tasks` table, in its order."""
    rows = [row for row in table.to_pylist() if split in ("all", row["split"])]
    return [Task(**{**row, "payload": json.loads(row["payload"])}) for row in rows]


def data_sources(tasks: pa.Table, rollout_sets: Sequence[tuple[str, RolloutSetSpec]]) -> list[tuple[str, str, str]]:
    """Return (source, licence, amount) of the imported rollouts and training tasks that state a licence.

    Args:
        tasks: a table `tasks`.
        rollout_sets: (name, spec) of the rollout sets that an experiment selects from.
    """
    stated = [(name, spec.license, "imported rollouts") for name, spec in rollout_sets if spec.license]
    counted: Counter[tuple[str, str]] = Counter()
    for row in tasks.to_pylist():
        payload = json.loads(row["payload"] or "{}")
        if row["split"] == "train" and payload.get("license"):
            counted[payload["source"], payload["license"]] += 1
    return [*stated, *((source, licence, f"{n:,} tasks") for (source, licence), n in sorted(counted.items()))]
