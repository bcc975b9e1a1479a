"""The two tables across experiments: the leaderboard, and each student beside its teacher."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from etpi_assets.reports.facts import DETAIL, HEADLINE, ROLE_ORDER
from etpi_assets.reports.markdown import figure, markdown_table
from etpi_assets.scoring.intervals import rate
from etpi_resources.lake.schemas import from_rows

CEILING_METRICS = ("plan_first", "plan_content", "follow_through", "solved")
BOARD_METRICS = (*CEILING_METRICS, "called")
"""The columns of the board; metrics that no experiment measured are left out."""
PAGE_CHARACTERS = 40_000
"""The most characters of a board; the store of Dagster's web page takes 50 KB per entry."""


@dataclass(frozen=True)
class EvaluatedExperiment:
    """One evaluated experiment: its title, its `metrics` table, and whether its spec is loaded, missing or invalid."""

    experiment: str
    title: str
    metrics: pa.Table
    spec: str = "loaded"


@dataclass(frozen=True)
class TeacherData:
    """The rollouts that an experiment's student was trained on.

    Attributes:
        scores: `scores` of all rollouts that the experiment could select from.
        selected: ids of the selected rollouts.
        teachers: names of the teachers.
        filtered_on: the metrics that selection filtered on.
    """

    scores: pa.Table
    selected: frozenset[str]
    teachers: Sequence[str]
    filtered_on: frozenset[str]


def leaderboard(
    entries: Iterable[EvaluatedExperiment], tainted: Mapping[tuple[str, str], float] = MappingProxyType({})
) -> pa.Table:
    """Collect the pooled figures of every experiment, a row per (experiment, role, decoding, metric).

    Args:
        tainted: (experiment, role) -> share of its training that rests on flipped verdicts.
    """
    rows = []
    for entry in sorted(entries, key=lambda e: e.experiment):
        metrics = entry.metrics.to_pylist()
        seeds: dict[tuple[str, str, str], set[int]] = {}
        for row in metrics:
            if row["seed"] is not None:
                seeds.setdefault((row["checkpoint_role"], row["decoding"], row["metric"]), set()).add(row["seed"])
        for row in metrics:
            if row["seed"] is None and row["metric"] in (*HEADLINE, *DETAIL):
                key = (row["checkpoint_role"], row["decoding"], row["metric"])
                columns = ("experiment", "checkpoint_role", "decoding", "metric", "value", "n", "ci_low", "ci_high")
                figures = {name: row[name] for name in (*columns, "judge")}
                seen = len(seeds.get(key, ()))
                rows.append({**figures, "title": entry.title, "spec": entry.spec, "seeds": seen})
                rows[-1]["tainted"] = tainted.get((entry.experiment, row["checkpoint_role"]))
    return from_rows("leaderboard", rows)


def teacher_ceiling(entries: Iterable[EvaluatedExperiment], teachers: Mapping[str, TeacherData]) -> pa.Table:
    """Compare each student with its teacher, over all rollouts and over the selected ones, by metric and decoding.

    A student is "bounded by the teacher" only where `filtered` is false; otherwise it saw only rollouts that passed.
    """
    rows = []
    for entry in sorted(entries, key=lambda e: e.experiment):
        teacher = teachers.get(entry.experiment)
        if teacher is None:
            continue
        scores = [r for r in teacher.scores.to_pylist() if not r["infrastructure_error"]]
        selected = [r for r in scores if r["rollout_id"] in teacher.selected]
        for row in entry.metrics.to_pylist():
            if (
                row["seed"] is not None
                or row["checkpoint_role"] not in ("sft", "rl")
                or row["metric"] not in CEILING_METRICS
            ):
                continue
            rows.append(
                {
                    "experiment": entry.experiment,
                    "teacher": ", ".join(teacher.teachers),
                    "filtered": row["metric"] in teacher.filtered_on,
                    "checkpoint_role": row["checkpoint_role"],
                    "decoding": row["decoding"],
                    "metric": row["metric"],
                    "teacher_value": _rate(scores, row["metric"]),
                    "selected_value": _rate(selected, row["metric"]),
                    "student_value": row["value"],
                    "student_ci_low": row["ci_low"],
                    "student_ci_high": row["ci_high"],
                    "n": row["n"],
                }
            )
    return from_rows("teacher_ceiling", rows)


def board(table: pa.Table) -> str:
    """Format the leaderboard: a line per (experiment, role, decoding), a column per headline rate.

    An experiment without a valid spec is marked, and one that rests on flipped verdicts.
    """
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in table.to_pylist():
        mark = "" if row["spec"] == "loaded" else f" (spec {row['spec']})"
        mark += f" (tainted: {100 * row['tainted']:.3g} %)" if row.get("tainted") else ""
        key = f"{row['experiment']}{mark}", row["checkpoint_role"], row["decoding"] or ""
        cells.setdefault(key, {})[row["metric"]] = figure(row["value"], row["ci_low"], row["ci_high"], row["n"])
    order = sorted(cells, key=lambda key: (key[0], ROLE_ORDER.index(key[1]), key[2]))
    shown = [metric for metric in BOARD_METRICS if any(metric in figures for figures in cells.values())]
    lines = [[*key, *(cells[key].get(metric, "") for metric in shown)] for key in order]
    return markdown_table(["experiment", "role", "decoding", *shown], lines, PAGE_CHARACTERS)


def ceiling_board(table: pa.Table) -> str:
    """Format `teacher_ceiling`: a line per role, metric and decoding."""
    lines = [[row["experiment"], row["teacher"] or "", *ceiling_cells(row, unknown="")] for row in table.to_pylist()]
    head = ["experiment", "teacher", "role", "metric", "decoding", "filtered"]
    head += ["teacher, all rollouts", "teacher, selected", "student"]
    return markdown_table(head, lines, PAGE_CHARACTERS)


def ceiling_cells(row: Mapping[str, Any], unknown: str) -> list[str]:
    """Format a row of `teacher_ceiling`: role, metric, decoding, filtered, the teacher's two rates, the student's rate.

    `unknown` stands for a rate that was not measured.
    """
    return [
        row["checkpoint_role"],
        row["metric"],
        row["decoding"] or "",
        "yes" if row["filtered"] else "no",
        *(unknown if row[value] is None else f"{row[value]:.2f}" for value in ("teacher_value", "selected_value")),
        figure(row["student_value"], row["student_ci_low"], row["student_ci_high"], row["n"]) or unknown,
    ]


def _rate(scores: Sequence[Mapping], metric: str) -> float | None:
    """Return the mean of a metric over pairs; follow_through is already a share of the pair's agents."""
    if metric == "solved":
        values = [float(r["reward"] == 1.0) for r in scores if r["reward"] is not None]
    else:
        values = [float(r[metric]) for r in scores if r[metric] is not None]
    estimate = rate(values, [str(i) for i in range(len(values))])
    return estimate.value if estimate else None
