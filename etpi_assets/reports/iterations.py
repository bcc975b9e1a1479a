"""The experiments that are evaluated on one suite, ours and published, side by side.

Belongs here: which there are, the one figure of each that is shown, and the table. Does not belong here: whether a
difference means anything (`findings`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from etpi_assets.reports.facts import ROLE_ORDER
from etpi_assets.reports.markdown import figure, markdown_table
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.published import Published, figures

METRICS = ("plan_first", "plan_content", "follow_through", "solved")


@dataclass(frozen=True)
class Iteration:
    """One experiment: the pooled row of its last trained role under its first decoding and the figure published of it,
    by metric."""

    name: str
    title: str
    ours: Mapping[str, Mapping[str, Any]]
    published: Mapping[str, Published]


def iterations(suite: str, specs: Mapping[str, ExperimentSpec], metrics: Mapping[str, pa.Table]) -> list[Iteration]:
    """The experiments of a suite that were run or published, by date of publication and name; none where there is only
    one.

    Args:
        metrics: experiment -> its `metrics` table, of all that are evaluated.
    """
    found = []
    for name, spec in specs.items():
        if spec.evaluate is None or spec.evaluate.suite != suite:
            continue
        ours = _student(metrics[name].to_pylist()) if name in metrics else {}
        published = {figure.metric: figure for figure in figures(spec.published)}
        if ours or published:
            found.append(Iteration(name, spec.title, ours, published))
    found.sort(key=lambda one: (str(specs[one.name].published.get("date", "")), one.name))
    return found if len(found) > 1 else []


def iterations_board(found: Sequence[Iteration], most: int) -> str:
    """The experiments as a markdown table of at most `most` characters, a column a metric."""
    lines = [[one.name, one.title, *(_cell(one, metric) for metric in METRICS)] for one in found]
    return markdown_table(["experiment", "title", *METRICS], lines, most)


def _cell(one: Iteration, metric: str) -> str:
    cells = []
    if row := one.ours.get(metric):
        cells.append(figure(row["value"], row["ci_low"], row["ci_high"], row["n"]))
    if published := one.published.get(metric):
        of = f" ({published.hits:g} of {published.n})" if published.n else ""
        cells.append(f"published {published.value:.2f}{of}")
    return "; ".join(cells)


def _student(rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Metric -> the pooled row of the last trained role, of its first decoding by name."""
    pooled = [row for row in rows if row["seed"] is None and row["checkpoint_role"] in ("sft", "rl")]
    if not pooled:
        return {}
    role = max({row["checkpoint_role"] for row in pooled}, key=ROLE_ORDER.index)
    decoding = min(row["decoding"] for row in pooled if row["checkpoint_role"] == role)
    return {row["metric"]: row for row in pooled if (row["checkpoint_role"], row["decoding"]) == (role, decoding)}
