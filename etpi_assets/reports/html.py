"""The experiment report: one self-contained HTML page, and the same in markdown.

Belongs here: turning facts into the page. Does not belong here: which figures it shows (`facts`) or drawing (`svg`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from etpi_assets.reports import facts, svg
from etpi_assets.reports.facts import Sources

TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=jinja2.select_autoescape(["html.jinja"]),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)
TEMPLATES.filters["percent"] = facts.percent


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
    """

    name: str
    title: str
    notes: str
    spec: Mapping[str, Any]
    thresholds: Mapping[str, float]
    inputs: Mapping[str, str]
    checks: Sequence[Mapping[str, Any]]
    seeds: Sequence[int]


def render(subject: Subject, sources: Sources, decode: Callable[[Sequence[int]], str]) -> tuple[str, str]:
    """(html, markdown). The page carries its style and charts and needs no network and no script."""
    headline = facts.metric_rows(sources.metrics, facts.HEADLINE)
    values = {
        "subject": subject,
        "headline": headline,
        "table": _by_metric(headline),
        "detail": facts.metric_rows(sources.metrics, facts.DETAIL),
        "per_seed": [row for seed in subject.seeds for row in facts.metric_rows(sources.metrics, facts.HEADLINE, seed)],
        "verdicts": _verdicts(headline, subject.thresholds),
        "funnel": facts.funnel(sources),
        "drops": facts.drops(sources),
        "tokens": facts.tokens_saved(sources),
        "probes": sources.probes.to_pylist(),
        "checkpoints": sources.checkpoints.to_pylist(),
        "pairs": facts.pair_details(sources),
        "transcripts": facts.coloured_tokens(sources.sequences, decode),
        "cost": facts.cost(sources),
        "metrics_plot": _metrics_plot(headline, subject.thresholds),
        "loss_plot": svg.line_chart("Loss", facts.curves(sources.training_log), "optimiser step", log_y=True),
        "share_plot": svg.bars(
            "Share of the loss by turn",
            [(f"turn {t}", 100 * s) for t, s in facts.loss_share(sources.dataset_rows)[:16]],
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


def _verdicts(rows: Sequence[Mapping[str, Any]], thresholds: Mapping[str, float]) -> list[dict[str, Any]]:
    verdicts = []
    for row in rows:
        if row["metric"] in thresholds and row["checkpoint_role"] in ("sft", "rl"):
            bar = thresholds[row["metric"]]
            word = "clears" if row["ci_low"] >= bar else "below" if row["ci_high"] < bar else "undecided at this n"
            verdicts.append({**row, "threshold": bar, "word": word})
    return verdicts


def _metrics_plot(rows: Sequence[Mapping[str, Any]], thresholds: Mapping[str, float]) -> str:
    grouped: dict[str, list[tuple[str, float, float, float]]] = {}
    for row in rows:
        grouped.setdefault(row["metric"], []).append(
            (row["checkpoint_role"], row["value"], row["ci_low"], row["ci_high"])
        )
    return svg.interval_plot("Held-out rates with 95 % intervals", list(grouped.items()), dict(thresholds))
