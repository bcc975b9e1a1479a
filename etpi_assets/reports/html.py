"""The experiment report: one self-contained HTML page, and the same in markdown.

Belongs here: turning facts into the page. Does not belong here: which figures it shows (`facts`) or drawing
(`etpi_resources.charts`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from etpi_assets.curation.merge import merge_savings
from etpi_assets.curation.upweight import loss_share_by_turn
from etpi_assets.reports import facts, reinforcement
from etpi_assets.reports.facts import Sources
from etpi_assets.reports.leaderboard import CEILING_METRICS
from etpi_assets.scoring.intervals import clears, wilson
from etpi_assets.specs.experiment import Threshold
from etpi_assets.specs.published import Published
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

_WORDS = {True: "clears", False: "below", None: "undecided at this n"}


@dataclass(frozen=True)
class Subject:
    """What the report is about.

    Attributes:
        name, title, notes: of the experiment.
        spec: the resolved spec, as plain values.
        thresholds: metric -> the bar it has to clear.
        inputs: "asset/key" -> data version of everything it was made from.
        checks: check outcomes as JSON, each with the "asset" it stands in.
        seeds: training seeds.
        published: figures that others published of it.
        published_source: where, when, and what they said of it.
    """

    name: str
    title: str
    notes: str
    spec: Mapping[str, Any]
    thresholds: Mapping[Threshold, float]
    inputs: Mapping[str, str]
    checks: Sequence[Mapping[str, Any]]
    seeds: Sequence[int]
    published: Sequence[Published] = ()
    published_source: str = ""


def render(subject: Subject, sources: Sources, decode: Callable[[Sequence[int]], str]) -> tuple[str, str]:
    """(html, markdown). The page carries its style and charts and needs no network and no script."""
    headline = facts.metric_rows(sources.metrics, facts.HEADLINE)
    changed = reinforcement.changed(
        sources.eval_rollouts, sources.eval_scores, sources.eval_agent_scores, sources.tasks
    )
    values = {
        "subject": subject,
        "headline": headline,
        "table": _by_metric(headline),
        "detail": facts.metric_rows(sources.metrics, facts.DETAIL),
        "per_seed": [row for seed in subject.seeds for row in facts.metric_rows(sources.metrics, facts.HEADLINE, seed)],
        "verdicts": _verdicts(headline, subject.thresholds),
        "published": _published(subject.published, headline),
        "funnel": facts.funnel(sources),
        "drops": facts.drops(sources),
        "tokens": merge_savings(sources.dataset_rows, sources.pairs, sources.sequences),
        "probes": sources.probes.to_pylist(),
        "checkpoints": sources.checkpoints.to_pylist(),
        "pairs": facts.pair_details(sources),
        "transcripts": facts.coloured_tokens(sources.sequences, decode),
        "cost": facts.cost(sources),
        "metrics_plot": _metrics_plot(headline, subject.thresholds),
        "teacher_plot": _teacher_plot(headline),
        "loss_plot": charts.line_chart("Loss", facts.loss_curves(sources.training_log), "optimiser step", log_y=True),
        "rates_plot": charts.line_chart("Rollouts of reinforcement", facts.rl_curves(sources.rl_log), "optimiser step")
        if sources.rl_log.num_rows
        else "",
        "changed": changed,
        "changes": reinforcement.counts(changed),
        "share_plot": charts.bars(
            "Share of the loss by turn",
            [(f"turn {t}", 100 * s) for t, s in list(loss_share_by_turn(sources.dataset_rows).items())[:16]],
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


def _published(stated: Sequence[Published], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each published figure, with the interval its counts allow, and the trained student's figures of the metric."""
    found = []
    for figure in stated:
        interval = wilson(figure.hits, figure.n) if figure.hits is not None and figure.n else None
        ours = [r for r in rows if r["metric"] == figure.metric and r["checkpoint_role"] in ("sft", "rl")]
        found.append({"figure": figure, "interval": interval, "ours": ours})
    return found


def _verdicts(rows: Sequence[Mapping[str, Any]], thresholds: Mapping[Threshold, float]) -> list[dict[str, Any]]:
    verdicts = []
    for row in rows:
        if row["metric"] in thresholds and row["checkpoint_role"] in ("sft", "rl"):
            bar = thresholds[row["metric"]]
            word = _WORDS[clears(row["ci_low"], row["ci_high"], bar)]
            verdicts.append({**row, "threshold": bar, "word": word})
    return verdicts


def _metrics_plot(rows: Sequence[Mapping[str, Any]], thresholds: Mapping[Threshold, float]) -> str:
    grouped: dict[str, list[tuple[str, float, float, float]]] = {}
    for row in rows:
        grouped.setdefault(row["metric"], []).append(
            (row["checkpoint_role"], row["value"], row["ci_low"], row["ci_high"])
        )
    return charts.interval_plot("Held-out rates with 95 % intervals", list(grouped.items()), {**thresholds})


def _teacher_plot(rows: Sequence[Mapping[str, Any]]) -> str:
    """Each rate of the student against its teacher's, as the teacher rolled out; empty where either has none."""
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
