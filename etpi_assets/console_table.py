"""Tables for a terminal: experiments beside each other, and the state of a chain.

Belongs here: laying out what the lake and the planner say. Does not belong here: figuring anything out, or HTML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etpi_assets.specs.planner import Step
from etpi_resources.lake import Lake, Ref

METRICS = ("plan_first", "plan_content", "follow_through", "solved", "called", "parse_rate")
_ROLES = ("teacher", "base", "sft", "rl")
_SIGNS = {"ok": "ok", "missing": "missing", "stale": "STALE", "blocked": "BLOCKED", "invalid": "INVALID"}


def metrics_table(lake: Lake, experiments: Sequence[str]) -> str:
    """Experiments x metrics, the teacher beside the student: value, 95 % interval and n, pooled over seeds.
    A metric that none was measured by has no column.

    An experiment without evaluation stands there with the reason.
    """
    head = ["experiment", "who", "decoding", *METRICS]
    rows = [head]
    for name in experiments:
        ref = Ref("eval_metrics", "experiment", name)
        if lake.blocked(ref) or not lake.current(ref):
            rows.append([name, "(no metrics yet)", "", *[""] * len(METRICS)])
            continue
        found: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
        for row in lake.read(ref, "metrics").to_pylist():
            if row["seed"] is None and row["metric"] in METRICS:
                found.setdefault((row["checkpoint_role"], row["decoding"] or ""), {})[row["metric"]] = row
        for role, decoding in sorted(found, key=lambda pair: (_ROLES.index(pair[0]), pair[1])):
            cells = [_figure(found[role, decoding].get(metric)) for metric in METRICS]
            rows.append([name, role, decoding, *cells])
    shown = [i for i in range(len(head)) if i < 3 or any(row[i] for row in rows[1:])]
    return _aligned([[row[i] for i in shown] for row in rows])


def ending(lake: Lake, experiments: Sequence[str]) -> str:
    """Where the report is, and three things to do next."""
    pages = [path for name in experiments if (path := _page(lake, name))]
    reports = "\n".join(f"  {page}" for page in pages) or "  (none yet)"
    return (
        f"\nReports:\n{reports}\n\nNext:\n"
        "  make ui: the graph and a page for every asset, at http://localhost:3000\n"
        "  duckdb etpi.duckdb < sql/reports/QUESTION.sql: one question a file; the view `lineage` traces every token\n"
        "  copy etpi_assets/specs/experiments/plan_first_tiny.toml to mine.toml beside it, turn two knobs, then:"
        " make run EXPERIMENT=mine"
    )


def states_table(experiment: str, steps: Sequence[Step], everything: bool) -> str:
    """The chain of an experiment; only what is not ok unless `everything` is asked for."""
    counts: dict[str, int] = {}
    for step in steps:
        counts[step.state] = counts.get(step.state, 0) + 1
    title = f"{experiment}: " + ", ".join(f"{n} {_SIGNS[state]}" for state, n in counts.items())
    shown = [step for step in steps if everything or step.state not in ("ok", "missing")]
    rows = [["", step.asset, step.key, _SIGNS[step.state], step.reason.replace("\n", " ")] for step in shown]
    return f"{title}\n{_aligned(rows)}" if rows else title


def _page(lake: Lake, experiment: str) -> str | None:
    ref = Ref("experiment_report", "experiment", experiment)
    if lake.current(ref) is None or lake.blocked(ref):
        return None
    rows = lake.read(ref, "reports").to_pylist()
    return next((str(lake.root / row["path"]) for row in rows if row["kind"] == "html"), None)


def _figure(row: Mapping[str, Any] | None) -> str:
    if row is None or row["value"] is None:
        return "-"
    interval = f" [{row['ci_low']:.2f}, {row['ci_high']:.2f}]" if row["ci_low"] is not None else ""
    return f"{row['value']:.2f}{interval} n={row['n']}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
