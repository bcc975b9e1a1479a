"""The iterations that an experiment stands among: all that are evaluated on its suite, ours and published.

Belongs here: which there are and the one figure of each that is shown. Does not belong here: layout (`html`), or
whether a difference means anything (`findings`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from etpi_assets.reports.facts import ROLE_ORDER
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.published import Published, figures

METRICS = ("plan_first", "plan_content", "follow_through", "solved")


@dataclass(frozen=True)
class Iteration:
    """One experiment: the pooled row of its last trained role under its first decoding and the figure published of it,
    by metric; and whether it is the one that is reported."""

    name: str
    title: str
    ours: Mapping[str, Mapping[str, Any]]
    published: Mapping[str, Published]
    here: bool


def iterations(name: str, specs: Mapping[str, ExperimentSpec], metrics: Mapping[str, pa.Table]) -> list[Iteration]:
    """Those that were run or published, by date of publication and name; none where the experiment stands alone.

    Args:
        metrics: experiment -> its `metrics` table, of all that stand evaluated.
    """
    section = specs[name].evaluate
    found = []
    for other, spec in specs.items():
        if section is None or spec.evaluate is None or spec.evaluate.suite != section.suite:
            continue
        ours = _student(metrics[other].to_pylist()) if other in metrics else {}
        published = {figure.metric: figure for figure in figures(spec.published)}
        if ours or published:
            found.append(Iteration(other, spec.title, ours, published, other == name))
    found.sort(key=lambda one: (str(specs[one.name].published.get("date", "")), one.name))
    return found if len(found) > 1 else []


def _student(rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Metric -> the pooled row of the last trained role, of its first decoding by name."""
    pooled = [row for row in rows if row["seed"] is None and row["checkpoint_role"] in ("sft", "rl")]
    if not pooled:
        return {}
    role = max({row["checkpoint_role"] for row in pooled}, key=ROLE_ORDER.index)
    decoding = min(row["decoding"] for row in pooled if row["checkpoint_role"] == role)
    return {row["metric"]: row for row in pooled if (row["checkpoint_role"], row["decoding"]) == (role, decoding)}
