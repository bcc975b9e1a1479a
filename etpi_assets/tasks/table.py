"""Tasks as rows of the `tasks` table and back, without loss."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pyarrow as pa

from etpi_assets.tasks.family import RejectedInput, Task
from etpi_resources.lake.schemas import from_rows


def task_table(tasks: Sequence[Task]) -> pa.Table:
    """Return the `tasks` table, in the given order."""
    payloads = [json.dumps(task.payload, sort_keys=True, ensure_ascii=False) for task in tasks]
    return from_rows("tasks", [{**vars(task), "payload": p} for task, p in zip(tasks, payloads, strict=True)])


def rejected_table(rejected: Sequence[RejectedInput]) -> pa.Table:
    return from_rows("quarantined", [{"asset": "tasks", **vars(each)} for each in rejected])


def read_tasks(table: pa.Table, split: str = "all", limit: int | None = None) -> list[Task]:
    """Return the first `limit` tasks of a split ("all": every split) of a `tasks` table, in its order."""
    rows = [row for row in table.to_pylist() if split in ("all", row["split"])][:limit]
    return [Task(**{**row, "payload": json.loads(row["payload"])}) for row in rows]
