"""Figures of a training run over its steps.

Belongs here: picking series out of a training log. Does not belong here: drawing (`etpi_resources.charts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etpi_resources import charts

Curve = tuple[str, list[tuple[float, float]]]
_LOSS = (("train", "loss"), ("val", "val_loss"))
_RATES = (("parsed", "parsed"), ("solved", "solved"), ("called", "called"))


def curves(log: Sequence[Mapping[str, Any]], series: Sequence[tuple[str, str]] = _LOSS) -> list[Curve]:
    """Rows of `training_log` as (name, [(step, value), ...]), one curve a seed and series, in step order; `series` are
    names and columns, the losses by default."""
    rows = sorted(log, key=lambda row: (row["seed"], row["step"]))
    return [
        (name, points)
        for seed in dict.fromkeys(row["seed"] for row in rows)
        for name, column in series
        if (points := [(row["step"], row[column]) for row in rows if row["seed"] == seed and row[column] is not None])
    ]


def rates(log: Sequence[Mapping[str, Any]]) -> list[Curve]:
    """What reinforcement's rollouts parse, solve and call tools in, as `curves` gives it."""
    return curves(log, _RATES)


def loss_plot(log: Sequence[Mapping[str, Any]]) -> str:
    """The same as a markdown image of a few kilobytes, for an asset's page."""
    return charts.as_image(charts.line_chart("Loss", curves(log), "optimiser step", log_y=True), "loss over steps")


def rates_plot(log: Sequence[Mapping[str, Any]]) -> str:
    """What reinforcement's rollouts parse, solve and call tools in, against the step, as a markdown image."""
    return charts.as_image(
        charts.line_chart("Parsed, solved, called", rates(log), "optimiser step"), "shares of rollouts over steps"
    )
