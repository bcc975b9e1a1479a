"""Tables for a terminal: metrics of experiments, failures, and the state of an experiment's chain."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from etpi_assets.planner import Step
from etpi_assets.specs.folders import FOLDERS, SpecFolder, where_read
from etpi_assets.specs.load import Specs
from etpi_resources.lake.lake import Lake, Ref

METRICS = {
    "plan_first": "both agents of a pair send each other a plan before they do anything else",
    "follow_through": "after its plan an agent works on a file or function that the pair named",
    "solved": "all hidden tests pass",
    "called": "an agent called a tool that it was offered",
    "plan_content": "the plans name files and functions of the task",
    "parse_rate": "a turn holds an action that can be read",
}
"""Metrics in order of importance, with their meaning; those that do not fit the width are left out from the end."""
WIDTH = 100
"""Width of a table where there is no terminal."""
_ROLES = {
    "teacher": "the agents whose rollouts were trained on",
    "base": "the student before training",
    "sft": "after fine-tuning",
    "rl": "after reinforcement learning",
}
_DECODINGS = {"greedy": "always the most likely token", "t1": "sampled at temperature 1"}
_TEACHER_DECODINGS = ("as_rolled_out", "recorded")
_STATE_LABELS = {
    "ok": "ok",
    "missing": "missing",
    "stale": "STALE",
    "code": "CODE CHANGED",
    "waiting": "waiting",
    "blocked": "BLOCKED",
    "invalid": "INVALID",
}

Figures = dict[tuple[str, str], dict[str, Mapping[str, Any]]]
"""(role, decoding) -> metric -> row of the table `metrics`, pooled over seeds."""


def metrics_table(lake: Lake, experiments: Sequence[str], width: int = WIDTH) -> str:
    """Tabulate every experiment's metrics: value, 95 % interval and n, pooled over seeds, with a legend below.

    Experiments with the same metrics share a header. A metric without any value has no column.

    Args:
        width: characters in a line; metrics that do not fit are named below the table.
    """
    figures = {name: _figures(lake, name) for name in experiments}
    sections = groupby(experiments, key=lambda name: _measured(figures[name]))
    blocks, left_out = [], dict[str, None]()
    for metrics, names in sections:
        block, dropped = _section({name: figures[name] for name in names}, metrics, width)
        blocks.append(block)
        left_out |= dict.fromkeys(dropped)
    return "\n\n".join(filter(None, [*blocks, _legend(figures.values(), list(left_out))]))


def ending(lake: Lake, experiments: Sequence[str]) -> str:
    """Return the last lines of a run's output: three next steps."""
    pages = [path for name in experiments if (path := _page(lake, name))]
    report = pages[0] if pages else "none yet; `etpi status` says what is missing"
    more = f" (and {len(pages) - 1} more beside it)" if len(pages) > 1 else ""
    return (
        "Next:\n"
        f"  1. Open the report: {report}{more}\n"
        "  2. `etpi ui` (`make ui`) shows the graph and a page for every asset at http://localhost:3000;\n"
        "     `duckdb etpi.duckdb < sql/reports/QUESTION.sql` answers a question (one a file)\n"
        f'  3. Write specs/experiments/{experiments[0]}_2.toml: extends = "{experiments[0]}", a title, two settings;\n'
        f"     run it: etpi run {experiments[0]}_2 (make run EXPERIMENT={experiments[0]}_2)"
    )


def failures_table(failures: Mapping[str, Sequence[str]]) -> str:
    """List the experiments that failed, their reasons, and what to do next."""
    reasons = [f"  {name}: {reason}" for name, lines in failures.items() for reason in lines]
    first = next(iter(failures))
    status = "" if first == "publish_catalog" else f" (`etpi status {first}` says what is missing)"
    how = f"the same command again{status}"
    return "\n".join(
        [
            f"etpi: failed: {', '.join(failures)}.",
            *reasons,
            f"Next: fix the cause, then run {how}; finished assets are not computed again.",
            "`etpi ui` shows the whole log of every run.",
        ]
    )


def _figures(lake: Lake, experiment: str) -> Figures | str:
    """Return an experiment's figures in the order of the table, or a text if it has none."""
    ref = Ref("eval_metrics", "experiment", experiment)
    if lake.blocked(ref):
        return f"metrics blocked by a failed check: etpi status {experiment}"
    if not lake.current(ref):
        return "no metrics yet"
    figures: Figures = {}
    for row in lake.read(ref, "metrics").to_pylist():
        if row["seed"] is None and row["metric"] in METRICS and row["value"] is not None:
            figures.setdefault((row["checkpoint_role"], row["decoding"] or ""), {})[row["metric"]] = row
    order = list(_ROLES)
    return {pair: figures[pair] for pair in sorted(figures, key=lambda pair: (order.index(pair[0]), pair[1]))}


def _measured(figures: Figures | str) -> tuple[str, ...]:
    if isinstance(figures, str):
        return ()
    return tuple(metric for metric in METRICS if any(metric in row for row in figures.values()))


def _section(experiments: Mapping[str, Figures | str], metrics: Sequence[str], width: int) -> tuple[str, Sequence[str]]:
    """Return a table of experiments with the same metrics, and the metrics that do not fit."""
    if not metrics:
        return "\n".join(f"{name}: {text or 'not evaluated'}" for name, text in experiments.items()), ()
    for shown in range(len(metrics), 0, -1):
        rows = [["", *metrics[:shown]]]
        for name, figures in experiments.items():
            assert not isinstance(figures, str)
            rows.append([name, *[""] * shown])
            for (role, decoding), row in figures.items():
                rows.append([_who(role, decoding), *(_figure(row.get(metric)) for metric in metrics[:shown])])
        # An experiment's name is alone on its line, so it does not widen the first column.
        named = dict.fromkeys(experiments, "")
        table = _aligned([[named.get(row[0], row[0]), *row[1:]] for row in rows]).split("\n")
        if shown == 1 or max(map(len, table)) <= width:
            lines = [row[0] if row[0] in named else line for row, line in zip(rows, table, strict=True)]
            return "\n".join(lines), metrics[shown:]
    raise AssertionError("a table of one metric is always returned")


def _who(role: str, decoding: str) -> str:
    return f"  {role}" if decoding in ("", *_TEACHER_DECODINGS) else f"  {role} {decoding}"


def _legend(results: Iterable[Figures | str], left_out: Sequence[str]) -> str:
    """Define the words that occur in the tables; "" where there are no figures."""
    tables = [figures for figures in results if not isinstance(figures, str)]
    roles = {role for figures in tables for role, _ in figures}
    decodings = {decoding for figures in tables for _, decoding in figures}
    metrics = {metric: row for figures in tables for row in figures.values() for metric in row}
    if not metrics:
        return ""
    definitions = [
        _defined({role: text for role, text in _ROLES.items() if role in roles}),
        _defined({name: text for name, text in _DECODINGS.items() if name in decodings}),
        "0.96 [0.80, 0.99] n=24: the share, its 95 % interval, and the number of pairs, agents or turns",
        *(f"{name}: {text}" for name, text in METRICS.items() if name in metrics and name not in left_out),
    ]
    more = f"Also measured, and in the reports: {', '.join(left_out)}" if left_out else ""
    lines = (textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in (*definitions, more) if line)
    return "\n".join(lines)


def _defined(words: Mapping[str, str]) -> str:
    return "; ".join(f"{word}: {text}" for word, text in words.items())


def folders_table(folders: Sequence[SpecFolder], specs: Specs | None) -> str:
    """Return the folders of the user's specs, with numbers of specs and errors; `specs` is None if they do not load."""
    if not folders:
        return where_read(folders)
    lines = []
    for folder in folders:
        entries = [entry for entry in specs.entries() if entry.file.is_relative_to(folder.path)] if specs else []
        counts = [f"{sum(e.set == name for e in entries)} {below}" for name, below in FOLDERS.items()]
        invalid = [str(entry.error) for entry in entries if entry.error]
        head = ", ".join([*counts, *([f"{len(invalid)} invalid"] if invalid else [])]) if specs else "not read"
        lines.append(f"specs: {folder.path} ({folder.origin}): {head}")
        lines += [f"  {line}" for text in (*folder.problems, *invalid) for line in text.splitlines()]
    return "\n".join(lines)


def states_table(experiment: str, steps: Sequence[Step], everything: bool) -> str:
    """Tabulate an experiment's chain: all steps, or only stale, changed, blocked and invalid ones."""
    counts: dict[str, int] = {}
    for step in steps:
        counts[step.state] = counts.get(step.state, 0) + 1
    title = f"{experiment}: " + ", ".join(f"{n} {_STATE_LABELS[state]}" for state, n in counts.items())
    shown = [step for step in steps if everything or step.state not in ("ok", "missing", "waiting")]
    rows = [["", step.asset, step.key, _STATE_LABELS[step.state], step.reason.replace("\n", " ")] for step in shown]
    return f"{title}\n{_aligned(rows)}" if rows else title


def step_lines(steps: Sequence[Step]) -> list[str]:
    """Return one line for each partition key of the steps: its assets, in order."""
    keys: dict[tuple[str, str], list[str]] = {}
    for step in steps:
        keys.setdefault((step.set, step.key), []).append(step.asset)
    return [f"  {set_name.replace('_', ' ')} {key}: {', '.join(assets)}" for (set_name, key), assets in keys.items()]


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
