"""The rates of an evaluation as floats, which Dagster plots.

Dagster draws one plot for each label and joins the partitions of an asset in it. So a label names the figure, and its
plot has one point for each experiment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

METRICS = ("solved", "plan_first", "plan_content", "follow_through", "called", "parsed", "submitted", "adherence")
"""The rates that the page plots, in order, where they were measured."""
_ROLES = ("base", "sft", "rl")


def floats(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the rates of a `metrics` table, pooled over seeds, by "ROLE DECODING METRIC", and their changes."""
    pooled = {
        (row["metric"], row["decoding"] or "", row["checkpoint_role"]): float(row["value"])
        for row in rows
        if row.get("seed") is None and row["value"] is not None and row["checkpoint_role"] in _ROLES
    }
    decodings = sorted({decoding for _, decoding, _ in pooled}, key=lambda name: (name != "greedy", name))
    values = {}
    for key in ((metric, decoding, role) for metric in METRICS for role in _ROLES for decoding in decodings):
        metric, decoding, role = key
        base = pooled.get((metric, decoding, "base"))
        if key in pooled:
            values[f"{role} {decoding} {metric}"] = round(pooled[key], 4)
        if key in pooled and role != "base" and base is not None:
            values[f"{role} {decoding} {metric} minus base"] = round(pooled[key] - base, 4)
    return values
