"""The figures of an evaluation on the web page: base and student side by side, and floats that Dagster plots.

Dagster draws one plot for each label and joins the partitions of an asset in it. So a label names the figure, and its
plot has one point for each experiment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from etpi_assets.orchestration.webpage.preview import markdown_table

METRICS = ("solved", "plan_first", "plan_content", "follow_through", "called", "parsed", "submitted", "adherence")
"""The rates that the page shows, in order, where they were measured."""
STUDENTS = ("rl", "sft")
"""Roles of a trained checkpoint, the last trained first."""

Row = Mapping[str, Any]


def side_by_side(rows: Iterable[Row]) -> str:
    """Return the pooled rates of a `metrics` table as markdown: a row for each rate and decoding.

    Rates are percentages with their 95 % interval, changes are percentage points from the base. Empty if nothing was
    evaluated.
    """
    pooled = _pooled(rows)
    roles = [role for role in ("base", *reversed(STUDENTS)) if any(r == role for r, _, _ in pooled)]
    if not roles:
        return ""
    heads = ["metric", "decoding"]
    for role in roles:
        heads += [role, *(["change"] if role != "base" and "base" in roles else [])]
    lines = []
    for metric in METRICS:
        for decoding in _decodings(pooled):
            figures = {role: pooled.get((role, decoding, metric)) for role in roles}
            if not any(figures.values()):
                continue
            line = [metric, decoding]
            for role in roles:
                line.append(_rate(figures[role]))
                if role != "base" and "base" in roles:
                    change = _change(pooled, role, decoding, metric)
                    line.append("" if change is None else f"{100 * change:+.0f}")
            lines.append(line)
    return markdown_table(heads, lines)


def floats(rows: Iterable[Row]) -> dict[str, float]:
    """Return the pooled rates of a `metrics` table by "ROLE DECODING METRIC", and changes from the base."""
    pooled, values = _pooled(rows), {}
    for metric in METRICS:
        for role in ("base", *reversed(STUDENTS)):
            for decoding in _decodings(pooled):
                if row := pooled.get((role, decoding, metric)):
                    values[f"{role} {decoding} {metric}"] = round(float(row["value"]), 4)
                if role in STUDENTS and (change := _change(pooled, role, decoding, metric)) is not None:
                    values[f"{role} {decoding} {metric} minus base"] = round(change, 4)
    return values


def _pooled(rows: Iterable[Row]) -> dict[tuple[str, str, str], Row]:
    """Return (role, decoding, metric) -> the row that is pooled over seeds; rows without a value are left out."""
    return {
        (row["checkpoint_role"], row["decoding"] or "", row["metric"]): row
        for row in rows
        if row.get("seed") is None and row["value"] is not None and row["metric"]
    }


def _decodings(pooled: Mapping[tuple[str, str, str], Row]) -> list[str]:
    """Return the decodings of base and students, greedy first."""
    names = {decoding for role, decoding, _ in pooled if role in ("base", *STUDENTS)}
    return sorted(names, key=lambda name: (name != "greedy", name))


def _change(pooled: Mapping[tuple[str, str, str], Row], role: str, decoding: str, metric: str) -> float | None:
    student, base = pooled.get((role, decoding, metric)), pooled.get(("base", decoding, metric))
    return None if student is None or base is None else float(student["value"] - base["value"])


def _rate(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{100 * row['value']:.0f} % [{100 * row['ci_low']:.0f}, {100 * row['ci_high']:.0f}]"
