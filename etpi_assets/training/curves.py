"""Series of a training log over its steps, and their plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etpi_resources import charts

Curve = tuple[str, list[tuple[float, float]]]
_LOSS = (("train", "loss"), ("val", "val_loss"))
_SHARES = (("parsed", "parsed"), ("solved", "solved"), ("called", "called"))


def curves(log: Sequence[Mapping[str, Any]], series: Sequence[tuple[str, str]] = _LOSS) -> list[Curve]:
    """Rows of `training_log` as (name, [(step, value), ...]), one curve per seed and series, in step order.

    Args:
        series: (name, column) pairs.
    """
    rows = sorted(log, key=lambda row: (row["seed"], row["step"]))
    return [
        (name, points)
        for seed in dict.fromkeys(row["seed"] for row in rows)
        for name, column in series
        if (points := [(row["step"], row[column]) for row in rows if row["seed"] == seed and row[column] is not None])
    ]


def loss_plot(log: Sequence[Mapping[str, Any]]) -> str:
    """Return the losses as a markdown image of a few kilobytes, for an asset's page."""
    return charts.as_image(charts.line_chart("Loss", curves(log), "optimiser step", log_y=True), "loss over steps")


def rollout_shares_plot(log: Sequence[Mapping[str, Any]]) -> str:
    """Return the shares of reinforcement's rollouts that parse, solve their task and call tools, as `loss_plot`."""
    chart = charts.line_chart("Parsed, solved, called", curves(log, _SHARES), "optimiser step")
    return charts.as_image(chart, "shares of rollouts over steps")
