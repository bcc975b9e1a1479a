"""All experiments side by side, and each student beside its teacher.

Belongs here: the two tables across experiments. Does not belong here: any single experiment's figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from etpi_assets.reports.facts import DETAIL, HEADLINE, ROLE_ORDER
from etpi_assets.reports.markdown import figure, markdown_table
from etpi_assets.scoring.intervals import rate
from etpi_resources.lake.schemas import from_rows

CEILING_METRICS = ("plan_first", "plan_content", "follow_through", "solved")
BOARD_METRICS = (*CEILING_METRICS, "called")
"""The board has a column for those of them that some experiment was measured by."""
PAGE_CHARACTERS = 40_000
"""Of a board; the web page's store takes 50 KB an entry."""


@dataclass(frozen=True)
class Entry:
    """One evaluated experiment: its title and its `metrics` table."""

    experiment: str
    title: str
    metrics: pa.Table


@dataclass(frozen=True)
class Lesson:
    """What an experiment's student was shown: `scores` of all its rollouts, the ids selected among them, the teachers'
    names, and the predicates that selection filtered on."""

    scores: pa.Table
    selected: frozenset[str]
    teachers: Sequence[str]
    filtered_on: frozenset[str]


def leaderboard(entries: Iterable[Entry]) -> pa.Table:
    """The pooled figures of every experiment, one row a (experiment, role, decoding, metric)."""
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
                kept = ("experiment", "checkpoint_role", "decoding", "metric", "value", "n", "ci_low", "ci_high")
                rows.append({**{k: row[k] for k in kept}, "title": entry.title, "seeds": len(seeds.get(key, ()))})
    return from_rows("leaderboard", rows)


def teacher_ceiling(entries: Iterable[Entry], lessons: Mapping[str, Lesson]) -> pa.Table:
    """The teacher's rate as rolled out, its rate among what was trained on, and each student's, by metric and decoding.

    "Bounded by the teacher" can be claimed only where `filtered` is false: a filtered student saw selected rollouts.
    """
    rows = []
    for entry in sorted(entries, key=lambda e: e.experiment):
        lesson = lessons.get(entry.experiment)
        if lesson is None:
            continue
        scores = [r for r in lesson.scores.to_pylist() if not r["infrastructure_error"]]
        chosen = [r for r in scores if r["rollout_id"] in lesson.selected]
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
                    "teacher": ", ".join(lesson.teachers),
                    "filtered": row["metric"] in lesson.filtered_on,
                    "checkpoint_role": row["checkpoint_role"],
                    "decoding": row["decoding"],
                    "metric": row["metric"],
                    "teacher_value": _rate(scores, row["metric"]),
                    "selected_value": _rate(chosen, row["metric"]),
                    "student_value": row["value"],
                    "student_ci_low": row["ci_low"],
                    "student_ci_high": row["ci_high"],
                    "n": row["n"],
                }
            )
    return from_rows("teacher_ceiling", rows)


def board(table: pa.Table) -> str:
    """The leaderboard as people read it: a line an (experiment, role, decoding), a column a headline rate."""
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in table.to_pylist():
        key = row["experiment"], row["checkpoint_role"], row["decoding"] or ""
        found.setdefault(key, {})[row["metric"]] = figure(row["value"], row["ci_low"], row["ci_high"], row["n"])
    order = sorted(found, key=lambda key: (key[0], ROLE_ORDER.index(key[1]), key[2]))
    shown = [metric for metric in BOARD_METRICS if any(metric in figures for figures in found.values())]
    lines = [[*key, *(found[key].get(metric, "") for metric in shown)] for key in order]
    return markdown_table(["experiment", "who", "decoding", *shown], lines, PAGE_CHARACTERS)


def ceiling_board(table: pa.Table) -> str:
    """Each student beside its teacher, a line a role, metric and decoding."""
    lines = [[row["experiment"], row["teacher"] or "", *ceiling_cells(row, unknown="")] for row in table.to_pylist()]
    head = ["experiment", "teacher", "role", "metric", "decoding", "filtered", "as rolled out", "trained on", "student"]
    return markdown_table(head, lines, PAGE_CHARACTERS)


def ceiling_cells(row: Mapping[str, Any], unknown: str) -> list[str]:
    """What a row of `teacher_ceiling` says: role, metric, decoding, filtered or not, the teacher's two rates and the
    student's; `unknown` for a rate that there is none of."""
    return [
        row["checkpoint_role"],
        row["metric"],
        row["decoding"] or "",
        "yes" if row["filtered"] else "no",
        *(unknown if row[value] is None else f"{row[value]:.2f}" for value in ("teacher_value", "selected_value")),
        figure(row["student_value"], row["student_ci_low"], row["student_ci_high"], row["n"]) or unknown,
    ]


def _rate(scores: Sequence[Mapping], metric: str) -> float | None:
    """The pair-level mean of a metric over scores; follow_through is already a share of the pair's agents."""
    if metric == "solved":
        values = [float(r["reward"] == 1.0) for r in scores if r["reward"] is not None]
    else:
        values = [float(r[metric]) for r in scores if r[metric] is not None]
    estimate = rate(values, [str(i) for i in range(len(values))])
    return estimate.value if estimate else None
