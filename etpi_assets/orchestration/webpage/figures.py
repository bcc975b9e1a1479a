"""The figures of an evaluation on the web page: base and student side by side, and floats that Dagster plots.

Dagster draws one plot for each label and joins the partitions of an asset in it. So a label of a partitioned asset
names the figure, and its plot has one point for each experiment. A label of the leaderboard names the experiment too,
and its plot is the line of that experiment over time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etpi_assets.orchestration.webpage.preview import markdown_table

METRICS = ("solved", "plan_first", "plan_content", "follow_through", "called", "parsed", "submitted", "adherence")
"""The rates that the page shows, in order, where they were measured."""
STUDENTS = ("rl", "sft")
"""Roles of a trained checkpoint, the last trained first."""
MOST_LINES = 90
"""Dagster plots the first 100 labels of an asset."""

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


def standings(rows: Sequence[Row]) -> str:
    """Return a `leaderboard` table as markdown: each experiment's main rate, of its base and of its student."""
    mains = sorted(_mains(rows), key=lambda main: -main.get("student", -1.0))
    lines = [
        [main["experiment"], main["metric"], main["role"], _percent(main.get("base")), _percent(main["student"])]
        for main in mains
    ]
    return markdown_table(["experiment", "metric", "student", "base", "trained"], lines) if lines else ""


def lines(rows: Sequence[Row]) -> dict[str, float]:
    """Return the main rate of each experiment of a `leaderboard` table by "EXPERIMENT: ROLE DECODING METRIC"."""
    mains = [main for main in _mains(rows) if "student" in main]
    return {f"{main['experiment']}: {main['role']} {main['metric']}": main["student"] for main in mains[:MOST_LINES]}


def _mains(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return for each experiment its last trained role, greedy if it was, and the first of METRICS that it has."""
    mains = []
    for experiment in dict.fromkeys(row["experiment"] for row in rows):
        pooled = _pooled(row for row in rows if row["experiment"] == experiment)
        measured = [
            (role, decoding, metric)
            for role in STUDENTS
            for decoding in _decodings(pooled)
            for metric in METRICS
            if (role, decoding, metric) in pooled
        ]
        if measured:
            role, decoding, metric = measured[0]
            main = {"experiment": experiment, "role": role, "metric": f"{decoding} {metric}"}
            values = {"student": pooled[measured[0]], "base": pooled.get(("base", decoding, metric))}
            mains.append(main | {name: round(float(row["value"]), 4) for name, row in values.items() if row})
    return mains


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
    return f"{_percent(row['value'])} [{100 * row['ci_low']:.0f}, {100 * row['ci_high']:.0f}]"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"
