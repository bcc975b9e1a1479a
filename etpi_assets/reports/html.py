"""Render the experiment report as a self-contained HTML page and as markdown.

`facts` computes the figures, `etpi_resources.charts` draws the charts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pyarrow as pa
from markupsafe import Markup, escape

from etpi_assets.curation.merge import merge_savings
from etpi_assets.curation.upweight import loss_share_by_turn
from etpi_assets.reports import facts, reinforcement
from etpi_assets.reports.facts import ReportTables
from etpi_assets.reports.leaderboard import CEILING_METRICS
from etpi_assets.scoring.intervals import clears, wilson
from etpi_assets.scoring.published import in_reading
from etpi_assets.specs.published import Published
from etpi_assets.specs.rollout_set import Reading
from etpi_resources import charts

TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=jinja2.select_autoescape(["html.jinja"]),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)
TEMPLATES.filters["percent"] = facts.percent
TEMPLATES.filters["code"] = lambda text: Markup(re.sub(r"`([^`\n]+)`", r"<code>\1</code>", str(escape(text))))

_WORDS = {True: "clears the threshold", False: "below the threshold", None: "undecided at this n"}


@dataclass(frozen=True)
class ReportedExperiment:
    """The experiment that a report describes.

    Attributes:
        name, title, notes: as in its spec.
        spec: the resolved spec, as plain values.
        thresholds: metric -> the rate it has to reach, in the spec's reading.
        inputs: "asset/key" -> data version of every input.
        checks: check outcomes as JSON, each with its "asset".
        seeds: training seeds.
        published: figures that others published of the experiment.
        published_source: where and when they did, and their note.
        reading: of the behaviours that the headline shows; the other one is among the details.
    """

    name: str
    title: str
    notes: str
    spec: Mapping[str, Any]
    thresholds: Mapping[str, float]
    inputs: Mapping[str, str]
    checks: Sequence[Mapping[str, Any]]
    seeds: Sequence[int]
    published: Sequence[Published] = ()
    published_source: str = ""
    reading: Reading = "hardened"


def render(
    experiment: ReportedExperiment, tables: ReportTables, decode: Callable[[Sequence[int]], str]
) -> tuple[str, str]:
    """Render a report as (HTML, markdown). The page is self-contained: it loads nothing and needs no script."""
    names = facts.headline_metrics(experiment.reading)
    headline = facts.metric_rows(tables.metrics, names)
    changed = reinforcement.changed(
        tables.eval_rollouts, tables.eval_scores, tables.eval_agent_scores, tables.eval_turns, tables.tasks
    )
    values = {
        "experiment": experiment,
        "headline": headline,
        "table": _by_metric(headline),
        "detail": facts.metric_rows(tables.metrics, facts.detail_metrics(experiment.reading)),
        "per_seed": [row for seed in experiment.seeds for row in facts.metric_rows(tables.metrics, names, seed)],
        "verdicts": _verdicts(headline, experiment.thresholds),
        "published": _published(experiment.published, tables.metrics),
        "funnel": facts.funnel(tables),
        "drops": facts.drops(tables),
        "tokens": merge_savings(tables.dataset_rows, tables.pairs, tables.sequences),
        "probes": tables.probes.to_pylist(),
        "checkpoints": tables.checkpoints.to_pylist(),
        "pairs": facts.pair_details(tables),
        "transcripts": facts.coloured_tokens(tables.sequences, decode),
        "cost": facts.cost(tables),
        "metrics_plot": _metrics_plot(headline, experiment.thresholds),
        "teacher_plot": _teacher_plot(facts.metric_rows(tables.metrics, facts.HEADLINE)),
        "loss_plot": charts.line_chart("Loss", facts.loss_curves(tables.training_log), "optimiser step", log_y=True),
        "rates_plot": charts.line_chart("Rollouts of reinforcement", facts.rl_curves(tables.rl_log), "optimiser step")
        if tables.rl_log.num_rows
        else "",
        "changed": changed,
        "changes": reinforcement.counts(changed),
        "share_plot": charts.bars(
            "Share of the loss by turn",
            [(f"turn {t}", 100 * s) for t, s in list(loss_share_by_turn(tables.dataset_rows).items())[:16]],
            " %",
        ),
    }
    return (
        TEMPLATES.get_template("report.html.jinja").render(**values),
        TEMPLATES.get_template("report.md.jinja").render(**values),
    )


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((r["checkpoint_role"], r["decoding"]) for r in sorted(rows, key=_column_order)))


def _column_order(row: Mapping[str, Any]) -> tuple[int, str]:
    return facts.ROLE_ORDER.index(row["checkpoint_role"]), row["decoding"]


def _by_metric(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    cells = {(r["metric"], r["checkpoint_role"], r["decoding"]): r for r in rows}
    columns = _columns(rows)
    names = list(dict.fromkeys(r["metric"] for r in rows))
    return {"columns": columns, "rows": [(name, [cells.get((name, *column)) for column in columns]) for name in names]}


def _published(stated: Sequence[Published], metrics: pa.Table) -> list[dict[str, Any]]:
    """Return each published figure with the interval of its counts, and our trained checkpoints', in its reading."""
    rows_of_table = []
    for figure in stated:
        interval = wilson(figure.hits, figure.n) if figure.hits is not None and figure.n else None
        rows = facts.metric_rows(metrics, [in_reading(figure.metric, "published")])
        ours = [row for row in rows if row["checkpoint_role"] in ("sft", "rl")]
        rows_of_table.append({"figure": figure, "interval": interval, "ours": ours})
    return rows_of_table


def _verdicts(rows: Sequence[Mapping[str, Any]], thresholds: Mapping[str, float]) -> list[dict[str, Any]]:
    verdicts = []
    for row in rows:
        if row["metric"] in thresholds and row["checkpoint_role"] in ("sft", "rl"):
            threshold = thresholds[row["metric"]]
            word = _WORDS[clears(row["ci_low"], row["ci_high"], threshold)]
            verdicts.append({**row, "threshold": threshold, "word": word})
    return verdicts


def _metrics_plot(rows: Sequence[Mapping[str, Any]], thresholds: Mapping[str, float]) -> str:
    grouped: dict[str, list[tuple[str, float, float, float]]] = {}
    for row in rows:
        grouped.setdefault(row["metric"], []).append(
            (row["checkpoint_role"], row["value"], row["ci_low"], row["ci_high"])
        )
    return charts.interval_plot("Held-out rates with 95 % intervals", list(grouped.items()), {**thresholds})


def _teacher_plot(rows: Sequence[Mapping[str, Any]]) -> str:
    """Plot each rate of the student against its teacher's over all rollouts; empty if there are no common rates."""
    teacher = {row["metric"]: row["value"] for row in rows if row["checkpoint_role"] == "teacher"}
    student = [row for row in rows if row["checkpoint_role"] in ("sft", "rl") and row["metric"] in CEILING_METRICS]
    points = [
        (
            f"{row['metric']}, {row['decoding']}, {row['checkpoint_role']}",
            row["checkpoint_role"],
            teacher[row["metric"]],
            row["value"],
            row["ci_low"],
            row["ci_high"],
        )
        for row in student
        if row["metric"] in teacher
    ]
    return charts.teacher_plot("Student against teacher", points) if points else ""
