"""A table of all experiments evaluated on one suite, with published figures next to ours.

`findings` tests whether differences are significant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from etpi_assets.reports.facts import ROLE_ORDER
from etpi_assets.reports.markdown import figure, markdown_table
from etpi_assets.scoring.published import in_reading
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.published import Published, figures

METRICS = ("plan_first", "plan_content", "follow_through", "solved")


@dataclass(frozen=True)
class Iteration:
    """One experiment's figures, by metric.

    Attributes:
        ours: the pooled rows of the last trained role under its first decoding.
            Behaviours are in the reading of the spec.
        published: the figures that others published.
    """

    name: str
    title: str
    ours: Mapping[str, Mapping[str, Any]]
    published: Mapping[str, Published]


def iterations(suite: str, specs: Mapping[str, ExperimentSpec], metrics: Mapping[str, pa.Table]) -> list[Iteration]:
    """Return the experiments of a suite that were run or published, by publication date and name.

    Returns an empty list if there is only one, since there is nothing to compare.

    Args:
        metrics: experiment -> its `metrics` table, for every evaluated experiment.
    """
    chosen = []
    for name, spec in specs.items():
        if spec.evaluate is None or spec.evaluate.suite != suite:
            continue
        student = _student(metrics[name].to_pylist()) if name in metrics else {}
        readings = {metric: student.get(in_reading(metric, spec.metrics.reading)) for metric in METRICS}
        ours = {metric: row for metric, row in readings.items() if row}
        published = {figure.metric: figure for figure in figures(spec.published)}
        if ours or published:
            chosen.append(Iteration(name, spec.title, ours, published))
    chosen.sort(key=lambda row: (str(specs[row.name].published.get("date", "")), row.name))
    return chosen if len(chosen) > 1 else []


def iterations_board(rows: Sequence[Iteration], most: int) -> str:
    """Format the experiments as a markdown table of at most `most` characters, with a column per metric."""
    lines = [[row.name, row.title, *(_cell(row, metric) for metric in METRICS)] for row in rows]
    return markdown_table(["experiment", "title", *METRICS], lines, most)


def _cell(iteration: Iteration, metric: str) -> str:
    cells = []
    if row := iteration.ours.get(metric):
        cells.append(figure(row["value"], row["ci_low"], row["ci_high"], row["n"]))
    if published := iteration.published.get(metric):
        of = f" ({published.hits:g} of {published.n})" if published.n else ""
        cells.append(f"published {published.value:.2f}{of}")
    return "; ".join(cells)


def _student(rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return metric -> the pooled row of the last trained role, under its first decoding by name."""
    pooled = [row for row in rows if row["seed"] is None and row["checkpoint_role"] in ("sft", "rl")]
    if not pooled:
        return {}
    role = max({row["checkpoint_role"] for row in pooled}, key=ROLE_ORDER.index)
    decoding = min(row["decoding"] for row in pooled if row["checkpoint_role"] == role)
    return {row["metric"]: row for row in pooled if (row["checkpoint_role"], row["decoding"]) == (role, decoding)}
