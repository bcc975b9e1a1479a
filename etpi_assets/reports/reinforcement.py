"""What reinforcement changed, task by task.

Belongs here: asking `sql/reports/changed_by_reinforcement.sql` of one experiment's tables. Does not belong here: the
query, which a person asks of the catalog, or layout.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from etpi_resources.lake.catalog import sql_folder

KINDS = ("newly_parsed", "parse_lost", "newly_solved", "newly_lost")


def changed(rollouts: pa.Table, scores: pa.Table, agent_scores: pa.Table, tasks: pa.Table) -> list[dict[str, Any]]:
    """Held-out tasks that the fine-tuned and the reinforced checkpoint parse or solve differently, in the query's
    order. The tables are an experiment's evaluation and its suites' tasks, named as in `lake.schemas`."""
    import duckdb

    with duckdb.connect() as connection:
        for name, table in (("rollouts", rollouts), ("scores", scores), ("agent_scores", agent_scores)):
            kept = table.drop_columns([c for c in ("experiment", "origin") if c in table.column_names])
            connection.register(f"{name}_given", kept)
            connection.execute(f"CREATE VIEW {name} AS SELECT *, '' AS experiment, 'eval' AS origin FROM {name}_given")
        connection.register("tasks", tasks)
        query = sql_folder() / "reports" / "changed_by_reinforcement.sql"
        return connection.execute(query.read_text(encoding="utf-8")).to_arrow_table().to_pylist()


def counts(rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """How many tasks changed in which way, over decodings and seeds, as (what, how many)."""
    return [(kind.replace("_", " "), sum(bool(row[kind]) for row in rows)) for kind in KINDS]
