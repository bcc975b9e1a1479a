"""The table that a run ends with: metrics of teacher, base and student, their changes, and what fell in plain words."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from etpi.run.columns import GAP, WIDTH, aligned, figure
from etpi_assets.evaluation import stopping
from etpi_assets.reports.changes import Change, between, changes
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.links import regressions_page, view_url

METRICS = {
    "plan_first": "both agents of a pair send each other a plan before they do anything else",
    "follow_through": "after its plan an agent works on a file or function that the pair named",
    "solved": "all hidden tests pass",
    "called": "an agent called a tool that it was offered",
    "plan_content": "the plans name files and functions of the task",
    "parse_rate": "a turn holds an action that can be read",
}
"""Metrics in order of importance, with their meaning."""
MOST_METRICS = 3
"""Metrics that the table shows of an experiment; those that fell significantly are named in any case."""
_ROLES = {
    "teacher": "the agents whose rollouts were trained on",
    "base": "the student before training",
    "sft": "after fine-tuning",
    "rl": "after reinforcement learning",
}
_STUDENTS = ("base", "sft", "rl")
_DECODINGS = {
    "greedy": "always the most likely token",
    "t1": "sampled at temperature 1",
}


@dataclass(frozen=True)
class Results:
    """An experiment's metrics, pooled over seeds.

    Attributes:
        missing: why there are none; "" if there are.
        rows: (role, decoding) -> metric -> row of the table `metrics`; a teacher's decoding is "".
        last: the last trained role that was evaluated; None if there is none.
        changes: (decoding, metric) -> the change from base to `last`.
        stopped: how `evaluate.stop` ended the evaluation, as sentences; empty where it has no such rule.
    """

    missing: str = ""
    rows: Mapping[tuple[str, str], Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    last: str | None = None
    changes: Mapping[tuple[str, str], Change] = field(default_factory=dict)
    stopped: Sequence[str] = ()

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that were evaluated, in the order of `_ROLES`."""
        return tuple(role for role in _ROLES if any(role == measured for measured, _ in self.rows))

    @property
    def decodings(self) -> tuple[str, ...]:
        """The decodings of the student's evaluation; ("",) if only a teacher was measured."""
        return tuple(dict.fromkeys(decoding for role, decoding in self.rows if role in _STUDENTS)) or ("",)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics with a value, in order of importance."""
        return tuple(metric for metric in METRICS if any(metric in row for row in self.rows.values()))

    def row(self, role: str, decoding: str, metric: str) -> Mapping[str, Any] | None:
        """Return a row of `metrics`; None if it was not measured. A teacher's is the same in every decoding."""
        return self.rows.get((role, "" if role == "teacher" else decoding), {}).get(metric)


def metrics_table(lake: Lake, experiments: Sequence[str], width: int = WIDTH) -> str:
    """Tabulate every experiment's metrics: a line for each metric and decoding, with a legend below.

    Experiments with the same roles share a header. Below an experiment, sentences say which metrics fell.

    Args:
        width: characters in a line; intervals of roles are left out where they do not fit, that of the change is not.
    """
    results = {name: read_results(lake, name) for name in experiments}
    blocks = []
    for roles, names in groupby(experiments, key=lambda name: results[name].roles):
        of_roles = {name: results[name] for name in names}
        if not roles:
            blocks.append("\n".join(f"{name}: {of.missing or 'not evaluated'}" for name, of in of_roles.items()))
        else:
            blocks.append(_block(of_roles, roles, width))
    return "\n\n".join(filter(None, [*blocks, _legend(results.values(), min(width, WIDTH))]))


def read_results(lake: Lake, experiment: str) -> Results:
    """Read an experiment's metrics, and pair its last trained role with its base, task by task."""
    ref = Ref("eval_metrics", "experiment", experiment)
    if lake.blocked(ref):
        return Results(f"metrics blocked by a failed check: etpi status {experiment}")
    manifest = lake.current(ref)
    if manifest is None:
        return Results("no metrics yet")
    rows: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in lake.read(ref, "metrics").to_pylist():
        if row["seed"] is None and row["metric"] in METRICS and row["value"] is not None:
            decoding = "" if row["checkpoint_role"] == "teacher" else row["decoding"] or ""
            rows.setdefault((row["checkpoint_role"], decoding), {})[row["metric"]] = row
    order = list(_ROLES)
    rows = {pair: rows[pair] for pair in sorted(rows, key=lambda pair: (order.index(pair[0]), pair[1]))}
    last = next((role for role in ("rl", "sft") if any(role == measured for measured, _ in rows)), None)
    evaluated = lake.current(Ref("eval_rollouts", "experiment", experiment))
    stopped = tuple(stopping.sentences(evaluated.notes)) if evaluated else ()
    return Results("", rows, last, _changes(lake, experiment, manifest.inputs, last, sequential=bool(stopped)), stopped)


def _changes(
    lake: Lake, experiment: str, inputs: Mapping[str, str], last: str | None, *, sequential: bool
) -> dict[tuple[str, str], Change]:
    """Return the paired changes; empty if the rollouts that were measured are not the current ones."""
    rolled_out = Ref("eval_rollouts", "experiment", experiment)
    current = lake.current(rolled_out)
    if last is None or current is None or inputs.get(f"eval_rollouts/{experiment}") != current.version:
        return {}
    rollouts = lake.read(
        rolled_out, "rollouts", columns=["rollout_id", "task_id", "checkpoint_role", "decoding", "seed"]
    )
    measured = Ref("eval_metrics", "experiment", experiment)
    scores, agent_scores = (lake.read(measured, table) for table in ("scores", "agent_scores"))
    paired = between(changes(rollouts, scores, agent_scores, tuple(METRICS), sequential=sequential), "base", last)
    return {(change.decoding, change.metric): change for change in paired}


def _block(results: Mapping[str, Results], roles: Sequence[str], width: int) -> str:
    """Return the tables of experiments with the same roles, with as many intervals as fit."""
    students = [role for role in roles if role in _STUDENTS]
    with_interval = [students or list(roles), [role for role in students if role != "base"], []]
    texts = [_sections(results, roles, chosen, width) for chosen in with_interval]
    return next((text for text in texts if max(map(len, text.split("\n"))) <= width), texts[-1])


def _sections(results: Mapping[str, Results], roles: Sequence[str], with_interval: Sequence[str], width: int) -> str:
    changed = any(of.changes for of in results.values())
    header = ["", "", "n", *roles, *(["change"] if changed else [])]
    sections = {name: _rows(of, roles, with_interval, changed) for name, of in results.items()}
    lines = aligned([header, *(row for rows in sections.values() for row in rows)], right=(2,)).split("\n")
    parts, at = [lines[0]], 1
    for name, rows in sections.items():
        parts += [name, *lines[at : at + len(rows)], *_sentences(name, results[name], min(width, WIDTH))]
        parts += [
            textwrap.fill(f"{GAP}{line}", min(width, WIDTH), subsequent_indent=GAP * 2)
            for line in results[name].stopped
        ]
        at += len(rows)
    return "\n".join(parts)


def _rows(of: Results, roles: Sequence[str], with_interval: Sequence[str], changed: bool) -> list[list[str]]:
    rows = []
    for metric in of.metrics[:MOST_METRICS]:
        for i, decoding in enumerate(of.decodings):
            figures = {role: of.row(role, decoding, metric) for role in roles}
            counted = next((row["n"] for role in reversed(roles) if (row := figures[role])), "-")
            cells = [_interval(row) if role in with_interval else _value(row) for role, row in figures.items()]
            rows.append([f"{GAP}{metric}" if i == 0 else "", decoding, str(counted), *cells])
            if changed:
                rows[-1].append(_signed(of.changes.get((decoding, metric))))
    return rows


def _value(row: Mapping[str, Any] | None) -> str:
    return figure(row["value"] if row else None)


def _interval(row: Mapping[str, Any] | None) -> str:
    return figure(row["value"], row["ci_low"], row["ci_high"]) if row else "-"


def _signed(change: Change | None) -> str:
    return figure(change.difference, change.ci_low, change.ci_high, signed=True) if change else "-"


def _sentences(experiment: str, of: Results, width: int) -> list[str]:
    """Say which of all metrics fell, and for which the rollouts are too few to tell; link to the lost tasks."""
    if not of.changes:
        return []
    fell, lower, lost = [], [], False
    for (decoding, metric), paired in of.changes.items():
        if paired.word in ("fell", "lower"):
            text = f"{metric} {decoding} {paired.value_before:.2f} → {paired.value_after:.2f}"
            (fell if paired.word == "fell" else lower).append(text)
            lost |= metric == "solved"
    sentences = [
        f"{GAP}FELL: {', '.join(fell)}" if fell else "",
        f"{GAP}lower, but not certain at this n: {', '.join(lower)}" if lower else "",
    ]
    lines = [textwrap.fill(line, width, subsequent_indent=GAP * 2) for line in sentences if line]
    link = [f"{GAP}tasks that the student lost: {view_url(regressions_page(experiment))}"] if lost else []
    return [*lines, *link] or [f"{GAP}no metric fell"]


def _legend(results: Iterable[Results], width: int) -> str:
    """Define the words that occur in the tables; "" where there are no figures."""
    shown = [of for of in results if of.rows]
    if not shown:
        return ""
    roles = {role for of in shown for role in of.roles}
    decodings = {decoding for of in shown for decoding in of.decodings}
    metrics = {metric for of in shown for metric in of.metrics[:MOST_METRICS]}
    compared = {metric for of in shown for _, metric in of.changes}
    more = [metric for metric in METRICS if any(metric in of.metrics for of in shown) and metric not in metrics]
    lines = [
        _defined({role: text for role, text in _ROLES.items() if role in roles}),
        _defined({name: text for name, text in _DECODINGS.items() if name in decodings}),
        "0.88 [0.69, 0.96]: a share and its 95 % interval; n: the pairs, agents or turns it is a share of",
        "change: from base to the last trained student, each task against itself, with its 95 % interval"
        if compared
        else "",
        *(f"{name}: {text}" for name, text in METRICS.items() if name in metrics),
        f"Also measured, and in the reports: {', '.join(more)}" if more else "",
    ]
    return "\n".join(textwrap.fill(line, width, subsequent_indent=GAP) for line in lines if line)


def _defined(words: Mapping[str, str]) -> str:
    return "; ".join(f"{word}: {text}" for word, text in words.items())
