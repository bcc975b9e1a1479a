"""The page of results: the measured figures of the experiments on the embedded world, over several seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import pyarrow as pa

from etpi_assets.curation.upweight import loss_by_turn, shares
from etpi_assets.reports.changes import changes, changes_table
from etpi_assets.reports.leaderboard import ceiling_cells
from etpi_assets.reports.markdown import figure, markdown_table
from etpi_assets.scoring.intervals import Estimate
from etpi_assets.scoring.structure import structure_of
from etpi_assets.specs.load import Specs
from etpi_lab.analysis import findings
from etpi_lab.analysis.findings import FindingVerdict, Rows
from etpi_resources.lake.catalog import sql_folder
from etpi_resources.lake.check_outcome import percent
from etpi_resources.lake.lake import Lake, Manifest, Ref

METRICS = ("plan_first", "plan_content", "follow_through", "solved", "called", "parse_rate", "adherence")
"""The columns of an experiment's table; metrics that it does not measure are left out."""

Stages = Callable[[str], Rows | None]
"""Experiment -> its rows of sql/reports/solved_paired.sql; None if it was not evaluated."""

_ASSET_OF = {"metrics": "eval_metrics", "probes": "serving_probe", "rl_samples": "rl_checkpoint"}
"""Table that a finding reads -> its asset."""

_HEAD = """# Results on the embedded world

Generated from the lake by

    {command}

Do not edit. The embedded world is a small model of the method: these figures describe the pipeline, not language
models. Rates are measured on held-out repositories and pooled over the training seeds, with n and a 95 % interval
clustered by pair; "by seed" lists the value of each seed. A teacher's rates are over its own rollouts.
"""


_FINDINGS = """## Findings

Each finding compares two conditions that differ in one thing (`etpi_lab/analysis/findings.toml`).

- *Supported*: the interval of the difference lies on the claimed side of 0.
- *Not supported*: the interval contains no difference large enough to matter (0.1 unless the file says otherwise), or
  lies on the other side of 0.
- *Undecided at this n*: neither.

"Over tasks" is the interval for these trained models on other tasks; "over seeds and tasks" is the one for other
trainings on other tasks. The second decides wherever both sides have two seeds or more, and it is at least as wide.
With three seeds it is wide, because three trainings say little about how much trainings differ: t intervals with
about four degrees of freedom (`etpi_lab/analysis/over_seeds.py`). With one seed only the first exists, and a
difference between two runs can look like a difference between two methods.

What the first look leaves undecided may be looked at a second time, with twice the seeds (`--second-look`). So that
both looks together err in 5 % at most, "over seeds and tasks" is a 97.5 % interval in each; "over tasks" is a 95 %
interval. "Seeds" says which look a row is of. "Would want" is the design of a new run that shows the smallest
difference that matters with probability 0.8, from the variance between seeds and tasks on this page
(`etpi_lab/analysis/power.py`). A `probe:` figure is a share of first turns on held-out prompts, averaged over the
checkpoints of training; an `rl:` figure is a share of the attempts in the last fifth of reinforcement's steps. Where a
finding compares what two stages of one experiment solve, the difference is paired by task.

"""

_PAIRED = """## Task by task

Held-out tasks before and after a training stage, each task averaged over its seeds: the share solved, the paired
difference with its 95 % interval, and the think tokens per turn (`sql/reports/solved_paired.sql`).

"""

_SOON = """## How soon

The first optimiser step from which nine in ten first turns on held-out prompts show the behaviour, at every later
checkpoint too (`sql/reports/steps_to_learn.sql`): one value per training seed, and a dash where the last checkpoint is
below nine in ten. "Mean" averages a seed's intermediate checkpoints, as `probe:` figures do. "Turns" are those of a
training conversation, and "first turn" is its share of the loss, weights included
(`sql/reports/loss_share_by_turn.sql`). Only experiments with probed intermediate checkpoints are listed.

"""


def missing(lake: Lake, experiments: Mapping[str, str]) -> list[str]:
    """Return the experiments without metrics, by their names on the page: not run yet, failed or blocked."""
    return [shown for shown, name in experiments.items() if _current(lake, "eval_metrics", name) is None]


def render(
    lake: Lake,
    specs: Specs,
    experiments: Mapping[str, str],
    again: Mapping[str, str] | None = None,
    *,
    complete: bool = True,
    cost: str = "",
) -> str:
    """Render the page from what the lake has; experiments without metrics are listed.

    Args:
        experiments: name on the page -> name in the lake. A failed experiment is listed without metrics.
        again: the same for the second look, with more seeds; an experiment that has it is shown with all its seeds.
        complete: whether these are all experiments that findings compare; if not, the page's command names them.
        cost: what running them took, as a sentence.
    """
    again = {shown: name for shown, name in (again or {}).items() if _current(lake, "eval_metrics", name)}
    seeds = sorted({seed for name in experiments.values() for seed in specs.experiments[name].seeds})
    second = ["--second-look"] if again else []
    named = [] if complete else [*experiments]
    command = " ".join(["etpi lab results", *named, *(f"--seed {seed}" for seed in seeds), *second])
    parts = [_HEAD.replace("{command}", command)]
    if cost:
        parts.append(f"{cost}\n")
    if lacking := missing(lake, experiments):
        parts.append(f"No metrics yet ({len(lacking)} of {len(experiments)} experiments): {', '.join(lacking)}.\n")
    stages = cache(partial(_stages, lake))
    shown_names = {**experiments, **again}
    parts += [
        _findings(lake, experiments, again, stages),
        _how_soon(lake, shown_names),
        _task_by_task(specs, shown_names, stages),
    ]
    for shown, name in shown_names.items():
        spec = specs.experiments[name]
        manifest = _current(lake, "eval_metrics", name)
        parts.append(f"## {shown}\n\n{spec.title}. Rollout sets: {', '.join(spec.rollout_sets)}.\n")
        parts.append(_metrics(lake, manifest) if manifest else "No metrics; `make status` says why.\n")
    parts.append(_ceiling(lake, {name: shown for shown, name in shown_names.items()}))
    return "\n".join(parts)


def _findings(lake: Lake, experiments: Mapping[str, str], again: Mapping[str, str], stages: Stages) -> str:
    """Render the findings whose experiments are all on the page, each with the verdict of its last look."""
    first, second = reader(lake, experiments, stages), reader(lake, again, stages)
    looked_at_again, rows = findings.among(again), []
    for finding in findings.among(experiments):
        verdict, note = findings.judge(finding, first, findings.LOOKS), ""
        if verdict.word == findings.UNDECIDED and finding in looked_at_again:
            verdict, note = findings.judge(finding, second, findings.LOOKS), ", second look"
        rows.append(_finding(verdict, note))
    return _FINDINGS + markdown_table(_COLUMNS, rows) if rows else ""


def reader(lake: Lake, experiments: Mapping[str, str], stages: Stages | None = None) -> findings.Read:
    """Return the function by which findings and sweeps read the lake.

    Args:
        experiments: name in the finding -> name in the lake.
    """
    staged = stages or cache(partial(_stages, lake))

    def read(experiment: str, table: findings.Table) -> Rows | None:
        if table == "stages":
            return staged(experiments[experiment])
        manifest = _current(lake, _ASSET_OF[table], experiments[experiment])
        return lake.read(manifest.ref, table).to_pylist() if manifest else None

    return read


def first_turn_loss_share(lake: Lake, experiment: str) -> float | None:
    """Return the first turn's share of an experiment's loss, weights included; None if it has no data set yet."""
    dataset = _current(lake, "upweighted_dataset", experiment)
    return None if dataset is None else shares(loss_by_turn(lake.read(dataset.ref, "dataset_rows"))).get(0, 0.0)


_COLUMNS = (
    "finding", "more", "less", "figure", "difference, over tasks", "over seeds and tasks", "seeds", "verdict",
    "would want",
)  # fmt: skip


def _how_soon(lake: Lake, experiments: Mapping[str, str]) -> str:
    """Render how many steps each experiment needs until its first turns show the probed behaviours."""
    query, rows = (sql_folder() / "reports" / "steps_to_learn.sql").read_text(), []
    for shown, name in experiments.items():
        probed, trained = _current(lake, "serving_probe", name), _current(lake, "sft_checkpoint", name)
        if probed is None or trained is None:
            continue
        probes = lake.read(probed.ref, "probes")
        results = lake.query(
            query,
            probes=probes.append_column("experiment", pa.array([name] * len(probes), pa.string())),
            checkpoints=lake.read(trained.ref, "checkpoints"),
        ).to_pylist()
        curves = [row for row in results if row["checkpoints"] > 1]
        for probe in sorted({row["probe"] for row in curves}):
            seeds = [row for row in curves if row["probe"] == probe]
            steps = ["–" if row["learnt_at_step"] is None else str(row["learnt_at_step"]) for row in seeds]
            means = findings.mean_over_checkpoints(probe, findings.ComparisonSide(experiment=shown), probes.to_pylist())
            ends = [f"{row['value_at_the_end']:.2f}" for row in seeds]
            by_seed = [f"{means[row['seed']].value:.2f}" for row in seeds if row["seed"] in means]
            rows.append([shown, *_first_turns(lake, name), probe, *map(", ".join, (steps, by_seed, ends))])
    head = ["experiment", "turns", "first turn", "probe", "step, by seed", "mean, by seed", "share at the end"]
    return _SOON + markdown_table(head, rows) if rows else ""


def _first_turns(lake: Lake, name: str) -> tuple[str, str]:
    """Format the mean turns of a training conversation, and the share of the loss that its first turns have."""
    dataset = _current(lake, "upweighted_dataset", name)
    if dataset is None:
        return "–", "–"
    rows = lake.read(dataset.ref, "dataset_rows")
    agents = [
        (row["rollout_id"], row["agent_id"])
        for row in rows.select(["split", "rollout_id", "agent_id"]).to_pylist()
        if row["split"] == "train"
    ]
    return f"{len(agents) / len(set(agents)):.1f}", f"{percent(shares(loss_by_turn(rows)).get(0, 0.0), 1)}"


def _task_by_task(specs: Specs, experiments: Mapping[str, str], stages: Stages) -> str:
    """Render what each stage changed, for experiments with a think structure or reinforcement."""
    rows = []
    for shown, name in experiments.items():
        spec = specs.experiments[name]
        agents = [specs.rollout_sets[rollout_set].agent for rollout_set in spec.rollout_sets]
        if not (structure_of(spec.metrics.scoring, agents) or spec.rl.method != "none"):
            continue
        for row in stages(name) or ():
            ratio = f"{row['think_ratio']:.1f}" if row["think_ratio"] else "–"
            rows.append(
                [
                    f"{shown}, {row['decoding']}",
                    f"{row['before']} → {row['after']}",
                    str(row["tasks"]),
                    f"{row['solved_before']:.2f} → {row['solved_after']:.2f}",
                    f"{row['difference']:+.2f} [{row['ci_low']:+.2f}, {row['ci_high']:+.2f}]",
                    f"{row['think_before']:.0f} → {row['think_after']:.0f}, ÷ {ratio}",
                ]
            )
    head = ["experiment", "stages", "tasks", "solved", "difference", "think tokens"]
    return _PAIRED + markdown_table(head, rows) if rows else ""


def _stages(lake: Lake, name: str) -> Rows | None:
    rollouts, metrics = _current(lake, "eval_rollouts", name), _current(lake, "eval_metrics", name)
    if rollouts is None or metrics is None:
        return None
    tables = {"rollouts": rollouts, "scores": metrics, "agent_scores": metrics}
    evaluated = {table: lake.read(manifest.ref, table) for table, manifest in tables.items()}
    paired = changes(**evaluated, metrics=("solved", "think_tokens_per_turn"))
    query = (sql_folder() / "reports" / "solved_paired.sql").read_text()
    return lake.query(query, changes=changes_table(name, paired)).to_pylist()


def _finding(verdict: FindingVerdict, note: str) -> list[str]:
    finding, between = verdict.finding, verdict.between
    return [
        finding.claim,
        *(f"{side}: {_estimate(e)}" for side, e in ((finding.more, verdict.more), (finding.less, verdict.less))),
        finding.figure,
        f"{between.value:+.2f} [{between.ci_low:+.2f}, {between.ci_high:+.2f}]" if between else "–",
        f"[{over.ci_low:+.2f}, {over.ci_high:+.2f}]" if (over := verdict.over_seeds) else "–",
        f"{verdict.spread.n_seeds}{note}" if verdict.spread else "–",
        f"**{verdict.word}**",
        verdict.wants() or "–",
    ]


def _estimate(estimate: Estimate | None) -> str:
    if estimate is None:
        return "–"
    return figure(estimate.value, estimate.ci_low, estimate.ci_high, estimate.n)


def _current(lake: Lake, asset: str, key: str) -> Manifest | None:
    """Return the current version, None if there is none or a newer one is blocked."""
    ref = Ref(asset, "experiment", key)
    return None if lake.blocked(ref) else lake.current(ref)


def _metrics(lake: Lake, manifest: Manifest) -> str:
    rows = [row for row in lake.read(manifest.ref, "metrics").to_pylist() if row["metric"] in METRICS]
    pooled = {(r["checkpoint_role"], r["decoding"], r["metric"]): r for r in rows if r["seed"] is None}
    by_seed: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    for row in rows:
        if row["seed"] is not None and row["value"] is not None:
            key = (row["checkpoint_role"], row["decoding"], row["metric"])
            by_seed.setdefault(key, []).append((row["seed"], row["value"]))
    conditions = list(dict.fromkeys((role, decoding) for role, decoding, _ in pooled))
    measured = [metric for metric in METRICS if any(metric == m for _, _, m in pooled)]
    lines = [
        [f"{role}, {decoding}" if decoding else role]
        + [_figure(pooled.get((role, decoding, m)), by_seed.get((role, decoding, m), [])) for m in measured]
        for role, decoding in conditions
    ]
    return markdown_table(["", *measured], lines)


def _figure(row: Mapping[str, Any] | None, seeds: Sequence[tuple[int, float]]) -> str:
    if row is None or row["value"] is None:
        return "–"
    spread = f"; by seed {', '.join(f'{value:.2f}' for _, value in sorted(seeds))}" if len(seeds) > 1 else ""
    return figure(row["value"], row["ci_low"], row["ci_high"], row["n"]) + spread


def _ceiling(lake: Lake, names: Mapping[str, str]) -> str:
    ref = Ref("teacher_ceiling", "all", "all")
    if lake.current(ref) is None:
        return ""
    rows = [
        [names[row["experiment"]], *ceiling_cells(row, unknown="–")]
        for row in lake.read(ref, "teacher_ceiling").to_pylist()
        if row["experiment"] in names
    ]
    head = [
        "experiment",
        "role",
        "metric",
        "decoding",
        "filtered",
        "teacher, all rollouts",
        "teacher, selected",
        "student",
    ]
    return (
        "## Teacher and student\n\n"
        "A student is bounded by its teacher only in metrics that selection did not filter on.\n\n"
        + markdown_table(head, rows)
    )
