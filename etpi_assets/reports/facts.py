"""The figures of an experiment's report and of its data card, computed from its tables as plain values.

The HTML page, its markdown and the model card share them; the templates lay them out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from etpi_assets.scoring.published import BEHAVIOURS, COLUMNS, in_reading
from etpi_assets.specs.rollout_set import Reading, RolloutSetSpec
from etpi_assets.training.curves import Curve, curves
from etpi_resources.frames import to_frame
from etpi_resources.lake.catalog import sql_folder

HEADLINE = ("plan_first", "plan_content", "follow_through", "solved", "called", "parsed", "parse_rate", "submitted")
DETAIL = (
    *COLUMNS,
    "follow_own",
    "follow_edited",
    "follow_by_turn_5",
    "adherence",
    "think_tokens_per_turn",
    "post_think_tokens_per_turn",
    "output_tokens_per_turn",
    "turns_per_agent",
)
ROLE_ORDER = ("teacher", "base", "sft", "rl")


def _of(table: str, *assets: str, columns: Sequence[str] | None = None) -> Any:
    """Return a field that has the rows of a table of these assets; of `columns` alone, if given."""
    return field(metadata={"table": table, "assets": assets, "columns": columns})


@dataclass(frozen=True)
class ReportTables:
    """The tables a report reads; empty where a stage does not apply, or where an asset does not read its input.

    `rollouts` and `agents` are those that the experiment could select from.
    """

    metrics: pa.Table = _of("metrics", "eval_metrics")
    rollouts: pa.Table = _of("rollouts", "raw_rollouts", columns=("wall_seconds", "outcome"))
    agents: pa.Table = _of("agents", "raw_rollouts", columns=("output_tokens",))
    eval_rollouts: pa.Table = _of("rollouts", "eval_rollouts")
    eval_agents: pa.Table = _of("agents", "eval_rollouts")
    eval_turns: pa.Table = _of("turns", "eval_rollouts", columns=("rollout_id", "agent_id", "turn", "actions"))
    eval_scores: pa.Table = _of("scores", "eval_metrics")
    eval_agent_scores: pa.Table = _of("agent_scores", "eval_metrics")
    selected: pa.Table = _of("selected", "selected_trajectories")
    dropped: pa.Table = _of("dropped", "selected_trajectories", "tito_pairs", "upweighted_dataset")
    pairs: pa.Table = _of("pairs", "tito_pairs")
    dataset_rows: pa.Table = _of("dataset_rows", "upweighted_dataset")
    sequences: pa.Table = _of("sequences", "upweighted_dataset")
    checkpoints: pa.Table = _of("checkpoints", "sft_checkpoint", "rl_checkpoint")
    training_log: pa.Table = _of("training_log", "sft_checkpoint")
    rl_log: pa.Table = _of("training_log", "rl_checkpoint")
    probes: pa.Table = _of("probes", "serving_probe")
    tasks: pa.Table = _of("tasks", "tasks")


def metric_rows(metrics: pa.Table, names: Sequence[str], seed: int | None = None) -> list[dict[str, Any]]:
    """Return the rows of these metrics in reading order: the pooled ones (`seed` None), or one seed's."""
    order = {name: i for i, name in enumerate(names)}
    rows = [r for r in metrics.to_pylist() if r["metric"] in order and r["seed"] == seed]
    return sorted(rows, key=lambda r: (order[r["metric"]], ROLE_ORDER.index(r["checkpoint_role"]), r["decoding"]))


MEANS = ("think_tokens_per_turn", "post_think_tokens_per_turn", "output_tokens_per_turn", "turns_per_agent")
"""Metrics that are means, and no rates: more of them is neither better nor worse."""


def headline_metrics(reading: Reading, first: Sequence[str] = ()) -> list[str]:
    """Return the metrics of HEADLINE in a reading, after those that a spec puts first (`metrics.headline`)."""
    return list(dict.fromkeys(in_reading(name, reading) for name in (*first, *HEADLINE)))


def leading_metrics(metrics: Mapping[str, Any]) -> list[str]:
    """Return the metrics that a resolved section `metrics` puts first, and those with a threshold, in its reading."""
    names = (*metrics.get("headline", ()), *metrics.get("thresholds", ()))
    return [in_reading(name, metrics.get("reading", "hardened")) for name in names]


def detail_metrics(reading: Reading) -> list[str]:
    """Return the metrics beside `headline_metrics`; the first are the behaviours in the other reading."""
    return [*BEHAVIOURS, *DETAIL[len(COLUMNS) :]] if reading == "published" else [*DETAIL]


def funnel(tables: ReportTables) -> list[tuple[str, int]]:
    """Count the data from rollouts to sequences, as (name, count)."""
    selection_drops = to_frame(tables.dropped, ["stage"]).filter(stage="selection").height
    return [
        ("rollouts considered", tables.selected.num_rows + selection_drops),
        ("rollouts selected", tables.selected.num_rows),
        ("token-in/token-out pairs", tables.pairs.num_rows),
        ("weighted rows", tables.dataset_rows.num_rows),
        ("merged sequences", tables.sequences.num_rows),
    ]


def drops(tables: ReportTables) -> list[tuple[str, str, int]]:
    """Count dropped rows as (stage, reason, count), most frequent first within a stage."""
    counts = to_frame(tables.dropped, ["stage", "reason"]).group_by("stage", "reason").len()
    return counts.sort("stage", "len", "reason", descending=[False, True, False]).rows()


_SFT_PANELS = (
    ("Loss", (("train", "loss"), ("val", "val_loss"))),
    ("Token accuracy", (("train", "token_accuracy"),)),
    ("Learning rate", (("train", "learning_rate"),)),
)
_RL_PANELS = (
    ("Rollouts of reinforcement", (("parsed", "parsed"), ("solved", "solved"), ("called", "called"))),
    ("Reward", (("rl", "reward"),)),
    ("Groups with equal rewards", (("rl", "constant_groups"),)),
    ("Entropy, nats", (("rl", "entropy"),)),
    ("KL to the initial policy", (("rl", "kl"),)),
    ("Clipped tokens", (("rl", "clip_share"),)),
    ("Gap of rollout and trainer log-probabilities, nats", (("rl", "logprob_gap"),)),
    ("Learning rate", (("rl", "learning_rate"),)),
)
MOST_POINTS = 300


def training_curves(log: pa.Table, role: str) -> list[tuple[str, list[Curve]]]:
    """Return the recorded figures of training over its steps, as (title, curves); titles without figures are left out.

    Args:
        log: a `training_log`.
        role: sft or rl.
    """
    rows = [row for row in log.to_pylist() if row["role"] == role]
    panels = [(title, curves(rows, series)) for title, series in (_RL_PANELS if role == "rl" else _SFT_PANELS)]
    return [(title, [(name, thinned(points)) for name, points in series]) for title, series in panels if series]


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most MOST_POINTS + 1 of the points, evenly spaced and with the last one, so that pages stay small."""
    stride = -(-len(points) // MOST_POINTS) or 1
    return [point for number, point in enumerate(points) if number % stride == 0 or number == len(points) - 1]


def cost(tables: ReportTables) -> list[tuple[str, str]]:
    """Return wall time and tokens by stage, as (name, figure)."""
    rows = tables.checkpoints.to_pylist()
    trained = [r for r in rows if r["role"] != "base" and r["final"]]
    figures = _rollout_cost("teacher", tables.rollouts, tables.agents)
    figures += [("training wall time", _seconds(sum(r["wall_seconds"] or 0 for r in trained)))]
    if tokens := sum(r["label_tokens"] or 0 for r in trained):
        figures.append(("label tokens per epoch, all seeds", f"{tokens:,}"))
    return figures + _rollout_cost("evaluation", tables.eval_rollouts, tables.eval_agents)


def _rollout_cost(origin: str, rollouts: pa.Table, agents: pa.Table) -> list[tuple[str, str]]:
    seconds = float(to_frame(rollouts, ["wall_seconds"])["wall_seconds"].sum())
    output = to_frame(agents, ["output_tokens"])["output_tokens"].sum()
    return [
        (f"{origin} rollouts", f"{rollouts.num_rows:,}"),
        (f"{origin} rollout time, summed over concurrent rollouts", _seconds(seconds)),
        (f"{origin} output tokens", f"{output:,}"),
    ]


def figure(row: Mapping[str, Any]) -> tuple[str, str]:
    """Format a metric and its interval: a rate in per cent, a mean as a plain number."""
    scale, unit = (1, "") if row["interval"].startswith("mean") else (100, " %")
    value, low, high = (f"{scale * row[name]:.1f}" for name in ("value", "ci_low", "ci_high"))
    return value + unit, f"[{low}, {high}]"


def percent(row: Mapping[str, Any]) -> str:
    """Format a metric with its interval and n."""
    return f"{' '.join(figure(row))}, n = {row['n']}"


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value < 180 else f"{value / 60:.1f} min"


def sources(
    names: Sequence[str],
    specs: Mapping[str, RolloutSetSpec],
    tasks: pa.Table,
    selected: pa.Table,
    dataset_rows: pa.Table,
) -> list[dict[str, Any]]:
    """Describe the rollout sets of an experiment: name, kind, suite, teachers, licence; and what is trained of each.

    The licence is that of the set's spec or of its tasks; rollouts, turns and tokens are those of the training rows.
    """
    import polars as pl  # 0.3 s: `etpi status` imports every asset

    sets = to_frame(selected, ["rollout_id", "rollout_set", "teacher"])
    train = to_frame(dataset_rows, ["rollout_id", "split", "output_tokens"]).filter(split="train")
    by_set = sets.group_by(name="rollout_set").agg(
        teachers=pl.col("teacher").fill_null("unknown").unique().sort().str.join(", ")
    )
    trained = (
        train.join(sets, on="rollout_id")
        .group_by(name="rollout_set")
        .agg(rollouts=pl.col("rollout_id").n_unique(), turns=pl.len(), tokens=pl.col("output_tokens").sum())
    )
    rows = pl.DataFrame({"name": list(names)}, schema={"name": pl.String}).join(by_set, "name", "left")
    rows = rows.join(trained, "name", "left").fill_null("–").fill_null(0)
    licences = task_licences(tasks)
    return [
        {
            **row,
            "kind": spec.kind if spec else "unknown",
            "suite": (spec and spec.suite) or "–",
            "licence": (spec and spec.license) or licences or "not stated",
        }
        for row in rows.to_dicts()
        for spec in [specs.get(row["name"])]
    ]


def task_licences(tasks: pa.Table) -> str:
    """Return the licences that training tasks state, by number of tasks."""
    counted: Counter[str] = Counter()
    for split, payload in zip(tasks["split"].to_pylist(), tasks["payload"].to_pylist(), strict=True):
        if split == "train" and payload and '"license"' in payload and (stated := json.loads(payload).get("license")):
            counted[stated] += 1
    return ", ".join(f"{licence} ({count} tasks)" for licence, count in sorted(counted.items()))


def split(dataset_rows: pa.Table) -> list[dict[str, Any]]:
    """Count the training rows of each split: repos, rollouts, rows, label_tokens, weighted_tokens."""
    import polars as pl  # 0.3 s: `etpi status` imports every asset

    rows = to_frame(dataset_rows, ["split", "repo", "rollout_id", "output_tokens", "weight", "copies"])
    weighted = pl.col("weight") * pl.col("copies") * pl.col("output_tokens")
    return (
        rows.group_by("split")
        .agg(
            repos=pl.col("repo").n_unique(),
            rollouts=pl.col("rollout_id").n_unique(),
            rows=pl.len(),
            label_tokens=pl.col("output_tokens").sum(),
            weighted_tokens=weighted.sum(),
        )
        .sort("split")
        .to_dicts()
    )


@dataclass(frozen=True)
class Published:
    """One figure: a metric's value as printed, and the count behind it if that was printed too."""

    metric: str
    value: float
    hits: int | None = None
    n: int | None = None


def published_figures(published: Mapping[str, Any]) -> list[Published]:
    """Return the figures of a spec's `published`, in its order.

    Raises ValueError: a value that is not hits / n, to two digits.
    """
    collected = []
    for metric, stated in published.items():
        table = stated if isinstance(stated, Mapping) else {"value": stated}
        value = table.get("value")
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        figure = Published(metric, float(value), table.get("hits"), table.get("n"))
        if figure.hits is not None and figure.n and abs(figure.hits / figure.n - figure.value) > 0.005:
            raise ValueError(f"published.{metric}: {figure.hits} of {figure.n} is not {figure.value}")
        collected.append(figure)
    return collected


def run_query(query: str, evaluated: Mapping[str, pa.Table], further: Mapping[str, pa.Table]) -> list[dict[str, Any]]:
    """Run a query of `sql` on tables and return its rows, in its order.

    Args:
        query: a file below `sql`, such as "reports/failures.sql".
        evaluated: rollouts, scores, agent_scores of one experiment's evaluation; they get the columns `experiment` (an
            empty text) and `origin`, which the catalog's views have.
        further: further tables that the query reads, as they are.
    """
    import duckdb

    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute("SET VARIABLE experiment = ''")
        for name, table in evaluated.items():
            table = table.drop_columns([c for c in ("experiment", "origin") if c in table.column_names])
            connection.register(f"{name}_table", table)
            connection.execute(f"CREATE VIEW {name} AS SELECT *, '' AS experiment, 'eval' AS origin FROM {name}_table")
        for name, table in further.items():
            connection.register(name, table)
        return connection.execute((sql_folder() / query).read_text(encoding="utf-8")).to_arrow_table().to_pylist()
