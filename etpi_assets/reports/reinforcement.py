"""The held-out tasks that reinforcement changed: runs sql/reports/changed_by_reinforcement.sql on one experiment."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from etpi_assets.reports.queries import run_report

KINDS = ("newly_parsed", "parse_lost", "newly_solved", "newly_lost")


def changed(
    rollouts: pa.Table, scores: pa.Table, agent_scores: pa.Table, turns: pa.Table, tasks: pa.Table
) -> list[dict[str, Any]]:
    """Return the held-out tasks that the fine-tuned and the reinforced checkpoint parse or solve differently.

    Args:
        rollouts, scores, agent_scores, turns: tables of one experiment's evaluation.
        tasks: the tasks of its suites.

    Returns:
        The query's rows, in its order.
    """
    evaluated = {"rollouts": rollouts, "scores": scores, "agent_scores": agent_scores}
    return run_report("changed_by_reinforcement.sql", evaluated, {"turns": turns, "tasks": tasks})


def counts(rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """Count the tasks by kind of change, over decodings and seeds: (kind, count)."""
    return [(kind.replace("_", " "), sum(bool(row[kind]) for row in rows)) for kind in KINDS]
