"""Run files of sql/reports on the evaluation of one experiment, without the catalog."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from etpi_resources.lake.catalog import sql_folder


def run_report(report: str, evaluated: Mapping[str, pa.Table], further: Mapping[str, pa.Table]) -> list[dict[str, Any]]:
    """Run a report and return its rows, in its order.

    Args:
        report: the name of the file, "failures.sql". Callers write it out, so that the file is part of their code
            version.
        evaluated: rollouts, scores, agent_scores of one experiment's evaluation; they get the columns `experiment` (an
            empty text) and `origin`, which the catalog's views have.
        further: further tables that the report reads, as they are.
    """
    import duckdb

    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        for name, table in evaluated.items():
            table = table.drop_columns([c for c in ("experiment", "origin") if c in table.column_names])
            connection.register(f"{name}_table", table)
            connection.execute(f"CREATE VIEW {name} AS SELECT *, '' AS experiment, 'eval' AS origin FROM {name}_table")
        for name, table in further.items():
            connection.register(name, table)
        query = (sql_folder() / "reports" / report).read_text(encoding="utf-8")
        return connection.execute(query).to_arrow_table().to_pylist()
