"""The table that a run ends with: metrics of teacher, base and student, their changes, and which fell."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from etpi.run.columns import GAP, WIDTH, aligned, figure
from etpi_assets.reports.changes import Change, between, changes
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.links import regressions_page, view_url

METRICS = ("plan_first", "follow_through", "solved", "called", "plan_content", "parse_rate")
"""In order of importance."""
MOST_METRICS = 3
"""Metrics that the table shows of an experiment; those that fell are named in any case."""
_ROLES = ("teacher", "base", "sft", "rl")

Rows = Mapping[tuple[str, str, str], Mapping[str, Any]]
"""(metric, decoding, role) -> row of the table `metrics`, pooled over seeds; a teacher's decoding is ""."""


def metrics_table(lake: Lake, experiments: Sequence[str], width: int = WIDTH) -> str:
    """Tabulate every experiment's metrics, a line for each metric and decoding; below, sentences say which fell.

    Args:
        width: characters in a line; intervals of roles are left out where they do not fit, that of the change is not.
    """
    rows = {name: _rows(lake, name) for name in experiments}
    changed = {name: _changes(lake, name) for name in experiments}
    first = {name: _headline(lake, name) for name in experiments}
    roles = [role for role in _ROLES if any(role == measured for of in rows.values() for _, _, measured in of)]
    students = [role for role in roles if role != "teacher"]
    head = ["", "", "n", *roles, *(["change"] if any(changed.values()) else [])]
    for with_interval in (students or roles, students[1:], []):
        cells = {name: _cells(rows[name], changed[name], first[name], head, with_interval) for name in experiments}
        lines = aligned([head, *(line for of in cells.values() for line in of)], right=(2,)).split("\n")
        if max(map(len, lines)) <= width:
            break
    text = lines[:1] if roles else []
    for name in experiments:
        shown, lines = lines[1 : 1 + len(cells[name])], [lines[0], *lines[1 + len(cells[name]) :]]
        text += [name, *shown, *_sentences(name, changed[name], rows[name])] if shown else [_missing(lake, name)]
    judges = {name: judge for name in experiments if (judge := _judges(rows[name]))}
    if len(set(judges.values())) > 1 or any("|" in judge for judge in judges.values()):
        text += ["verdicts of several judges, so rewards do not compare (etpi rejudge):"]
        text += [f"  {name}: {judge}" for name, judge in judges.items()]
    return "\n".join(text)


def _judges(rows: Rows) -> str:
    """Return the judges of the students' rewards."""
    solved = [row for (metric, _, role), row in rows.items() if metric == "solved" and role != "teacher"]
    return " | ".join(sorted({row["judge"] for row in solved if row["judge"]}))


def _rows(lake: Lake, experiment: str) -> Rows:
    ref = Ref("eval_metrics", "experiment", experiment)
    if lake.blocked(ref) or lake.current(ref) is None:
        return {}
    return {
        (
            row["metric"],
            "" if row["checkpoint_role"] == "teacher" else row["decoding"] or "",
            row["checkpoint_role"],
        ): row
        for row in lake.read(ref, "metrics").to_pylist()
        if row["seed"] is None and row["value"] is not None
    }


def _headline(lake: Lake, experiment: str) -> Sequence[str]:
    """Return the metrics that the experiment's spec puts first."""
    manifest = lake.current(Ref("eval_metrics", "experiment", experiment))
    return manifest.spec.get("metrics", {}).get("headline", ()) if manifest else ()


def _missing(lake: Lake, experiment: str) -> str:
    blocked = lake.blocked(Ref("eval_metrics", "experiment", experiment))
    reason = f"metrics blocked by a failed check: etpi status {experiment}" if blocked else "no metrics"
    return f"{experiment}: {reason}"


def _changes(lake: Lake, experiment: str) -> Sequence[Change]:
    """Pair the last trained role with its base, task by task; nothing if other rollouts were measured."""
    rolled_out, measured = (Ref(asset, "experiment", experiment) for asset in ("eval_rollouts", "eval_metrics"))
    current, metrics = lake.current(rolled_out), lake.current(measured)
    if not (current and metrics and metrics.inputs.get(f"eval_rollouts/{experiment}") == current.version):
        return []
    columns = ["rollout_id", "task_id", "checkpoint_role", "decoding", "seed"]
    rollouts = lake.read(rolled_out, "rollouts", columns=columns)
    scores, agent_scores = (lake.read(measured, table) for table in ("scores", "agent_scores"))
    paired = changes(rollouts, scores, agent_scores, METRICS)
    return between(paired, "base", "rl") or between(paired, "base", "sft")


def _cells(
    rows: Rows, changed: Iterable[Change], first: Sequence[str], head: Sequence[str], with_interval: Collection[str]
) -> list[list[str]]:
    """Return the lines of an experiment as cells under a head of roles and, at its end, maybe the change."""
    by_metric = {(change.metric, change.decoding): change for change in changed}
    decodings = sorted({decoding for _, decoding, role in rows if role != "teacher"}) or [""]
    named = dict.fromkeys((*first, *METRICS))
    metrics = [metric for metric in named if any(metric == measured for measured, _, _ in rows)]
    lines = []
    for metric in metrics[: max(MOST_METRICS, len(first))]:
        for decoding in decodings:
            counted, line = "-", []
            for role in (name for name in head[3:] if name != "change"):
                row = rows.get((metric, "" if role == "teacher" else decoding, role))
                limits = (row["ci_low"], row["ci_high"]) if row and role in with_interval else ()
                line.append(figure(row["value"] if row else None, *limits))
                counted = str(row["n"]) if row else counted
            if head[-1] == "change":
                of = by_metric.get((metric, decoding))
                line.append(figure(of.difference, of.ci_low, of.ci_high, signed=True) if of else "-")
            lines.append([f"{GAP}{metric}" if decoding == decodings[0] else "", decoding, counted, *line])
    return lines


def _sentences(experiment: str, changed: Sequence[Change], rows: Rows) -> list[str]:
    """Say which of all metrics fell, and for which the rollouts are too few to tell; link to the lost tasks. Of a base
    alone, say whether reinforcement could learn from its tasks."""
    sentences: list[str] = []
    for word, title in (("fell", "FELL"), ("lower", "lower, but not certain at this n")):
        those = [change for change in changed if change.word == word]
        listed = [f"{c.metric} {c.decoding} {c.value_before:.2f} → {c.value_after:.2f}" for c in those]
        sentences += [f"{title}: {', '.join(listed)}"] if those else []
        if any(change.metric == "solved" for change in those):
            sentences.append(f"tasks that the student lost: {view_url(regressions_page(experiment))}")
    if changed and not any(change.word in ("fell", "lower") for change in changed):
        sentences.append("no metric fell")
    solved = {row["value"] for (metric, _, role), row in rows.items() if (metric, role) == ("solved", "base")}
    if solved in ({0.0}, {1.0}) and {role for _, _, role in rows} <= {"teacher", "base"}:
        sentences.append(f"{'always' if 1.0 in solved else 'never'} solved: reinforcement finds no advantage here")
    return [textwrap.fill(GAP + sentence, WIDTH, subsequent_indent=GAP * 2) for sentence in sentences]
