"""Loss and reward over the steps of trainings: of experiments, overlaid, and of those under way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from starlette.requests import Request

from etpi.view.catalog_file import Queries
from etpi.view.pages.page import Page
from etpi_resources.charts import CURVES, line_chart
from etpi_resources.lake.lake import Lake

FIGURES = {
    "loss": "Training loss",
    "val_loss": "Validation loss",
    "reward": "Mean reward of a step's rollouts",
    "constant_groups": "Share of groups with equal rewards",
    "logprob_gap": "Mean difference of rollout and trainer log-probabilities, nats a token",
    "entropy": "Mean entropy of a token's distribution, nats",
}
_FIRST = 3
"""Experiments that the page opens with."""


def curves(queries: Queries, lake: Lake, request: Request) -> Page:
    every = [row["experiment"] for row in queries.kept_rows("trained")]
    chosen = request.query_params.getlist("experiment") or every[:_FIRST]
    rows = queries.rows("training_log", experiments=chosen) if chosen else []
    named = [row | {"curve": f"{row['experiment']} {row['role']} {row['seed']}"} for row in rows]
    values = {"chosen": chosen, "experiments": every, "charts": plots(named)}
    return Page("curves.html.jinja", values)


def plots(steps: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return (title, chart) of each figure of steps: `curve`, `step` and FIGURES; those of a curve are adjacent."""
    series = [(name, list(rows)) for name, rows in groupby(steps, lambda row: row["curve"])]
    colours = {name: CURVES[number % len(CURVES)] for number, (name, _) in enumerate(series)}
    charts = []
    for column, title in FIGURES.items():
        points = [(name, [(r["step"], r[column]) for r in rows if r.get(column) is not None]) for name, rows in series]
        if drawn := [curve for curve in points if curve[1]]:
            charts.append((title, line_chart(title, drawn, "optimiser step", colours=colours)))
    return charts
