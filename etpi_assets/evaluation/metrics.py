"""The metrics of scored rollouts, of students and teachers, and the checks of their thresholds.

`etpi_assets.scoring` defines the behaviours, `scoring.intervals` the intervals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import pyarrow as pa

from etpi_assets.checks import outcome
from etpi_assets.scoring.behaviours import AGENT_RATES, PAIR_RATES
from etpi_assets.scoring.intervals import Estimate, decide, mean, paired_difference, rate, rate_of
from etpi_assets.scoring.published import in_reading
from etpi_assets.specs.experiment import MetricsSection, Threshold
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.schemas import from_rows

GroupKey = tuple[str, int | None, str]
"""(checkpoint role, seed or None for the pooled rows, decoding)."""

TURN_MEANS = {"think_tokens_per_turn": "think_tokens", "output_tokens_per_turn": "output_tokens"}
"""Metric -> the column of `agent_scores` whose total is divided by the number of turns."""
MEANS = (*TURN_MEANS, "post_think_tokens_per_turn", "turns_per_agent")
"""Metrics that are not between 0 and 1."""


def measure(
    rollouts: pa.Table,
    scores: pa.Table,
    agent_scores: pa.Table,
    *,
    experiment: str,
    teacher: bool = False,
) -> pa.Table:
    """Compute the metrics of every (checkpoint role, decoding), by seed and pooled over seeds (seed null).

    Rollouts with an infrastructure error are excluded and counted in `excluded`; crashed agents count.

    Args:
        rollouts, scores, agent_scores: tables of those names, of one experiment's evaluation or of its rollout sets.
        experiment: the value of the column `experiment`.
        teacher: give every rollout the role "teacher".

    Returns:
        A `metrics` table.
    """
    groups = _group_rollouts(rollouts, scores, agent_scores, teacher=teacher)
    rows = []
    for (role, seed, decoding), units in sorted(
        groups.items(), key=lambda item: (item[0][0], item[0][2], str(item[0][1]))
    ):
        counted = [unit for unit in units if not unit["infrastructure_error"]]
        for metric, unit_name, estimate in _estimates(counted):
            rows.append(
                {
                    "experiment": experiment,
                    "checkpoint_role": role,
                    "seed": seed,
                    "decoding": decoding,
                    "metric": metric,
                    "unit": unit_name,
                    "excluded": len(units) - len(counted),
                    "judge": " | ".join(sorted({unit["judge"] for unit in counted if unit["judge"]})) or None,
                    **{name: getattr(estimate, name) for name in ("value", "n", "ci_low", "ci_high", "interval")},
                }
            )
    return from_rows("metrics", rows)


def _group_rollouts(
    rollouts: pa.Table, scores: pa.Table, agent_scores: pa.Table, *, teacher: bool
) -> dict[GroupKey, list[dict[str, Any]]]:
    """Group the rows of `scores`, each with its `agents` and `cluster`; the pooled group has those of all seeds."""
    by_id = {row["rollout_id"]: row for row in rollouts.to_pylist()}
    agents: dict[str, list[dict[str, Any]]] = {}
    for row in agent_scores.to_pylist():
        agents.setdefault(row["rollout_id"], []).append(row)
    groups: dict[GroupKey, list[dict[str, Any]]] = {}
    for score in scores.to_pylist():
        rollout = by_id[score["rollout_id"]]
        role = "teacher" if teacher else rollout["checkpoint_role"]
        decoding = rollout["decoding"] or "as_rolled_out"
        unit = {**score, "cluster": score["task_id"], "agents": agents.get(score["rollout_id"], [])}
        seed = None if teacher else rollout["seed"]
        for key in {(role, seed, decoding), (role, None, decoding)}:
            groups.setdefault(key, []).append(unit)
    return groups


def teacher_of(scores: pa.Table, agent_scores: pa.Table, experiment: str) -> pa.Table:
    """Compute the metrics of the rollouts an experiment selects from, under the role "teacher"."""
    rollouts = from_rows("rollouts", [{"rollout_id": id} for id in scores["rollout_id"].to_pylist()])
    return measure(rollouts, scores, agent_scores, experiment=experiment, teacher=True)


def _estimates(units: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, Estimate]]:
    agents = [(agent, unit["cluster"]) for unit in units for agent in unit["agents"]]
    clusters = [cluster for _, cluster in agents]
    turns = [agent["turns"] or 0 for agent, _ in agents]
    readable = [(agent["parse_rate"] or 0.0) * n for (agent, _), n in zip(agents, turns, strict=True)]
    judged = [unit for unit in units if unit["reward"] is not None]
    offered = [u for u in units if u["agents"] and all(agent["tool_turns"] is not None for agent in u["agents"])]
    called = [(any(agent["tool_turns"] for agent in unit["agents"]), unit["cluster"]) for unit in offered]
    parsed = [
        (bool(unit["agents"]) and all(agent["parse_rate"] == 1.0 for agent in unit["agents"]), unit["cluster"])
        for unit in units
    ]
    estimates = (
        # Behaviours of pairs are null where a single agent acts.
        *((name, "pair", rate_of((unit[name], unit["cluster"]) for unit in units)) for name in PAIR_RATES),
        ("solved", "pair", rate_of((unit["reward"] == 1.0, unit["cluster"]) for unit in judged)),
        ("called", "rollout", rate_of(called)),
        ("parsed", "rollout", rate_of(parsed)),
        *((name, "agent", rate_of((agent[name], cluster) for agent, cluster in agents)) for name in AGENT_RATES),
        ("submitted", "agent", rate_of((agent["exit_status"] == "Submitted", cluster) for agent, cluster in agents)),
        ("parse_rate", "turn", rate(readable, clusters, turns)),
        ("adherence", "turn", rate(*_not_null("adherent_turns", agents))),
        *(
            (name, "turn", mean([agent[column] or 0 for agent, _ in agents], clusters, turns))
            for name, column in TURN_MEANS.items()
        ),
        ("post_think_tokens_per_turn", "turn", mean(*_not_null("post_think_tokens", agents))),
        ("turns_per_agent", "agent", mean(turns, clusters, [1] * len(turns))),
    )
    yield from ((name, unit, estimate) for name, unit, estimate in estimates if estimate)


def _not_null(column: str, agents: Sequence[tuple[Mapping[str, Any], str]]) -> tuple[list[float], list[str], list[int]]:
    """Return the column's values that are not null, with the agents' clusters and numbers of turns."""
    counted = [(agent, cluster) for agent, cluster in agents if agent[column] is not None]
    values = [agent[column] for agent, _ in counted]
    return values, [cluster for _, cluster in counted], [agent["turns"] or 0 for agent, _ in counted]


@dataclass(frozen=True)
class PairedChange:
    """Change of a metric between two checkpoints, on the tasks that both were evaluated on.

    Attributes:
        before, after: the metric's value over these tasks.
        change: after - before, with its interval; `n` is the smaller number of units, `clusters` that of tasks.
        pairs: (total, size) before and after, of each of these tasks.
    """

    decoding: str
    metric: str
    before: float
    after: float
    change: Estimate
    pairs: Sequence[tuple[tuple[float, float], tuple[float, float]]]


def paired_changes(
    rollouts: pa.Table,
    scores: pa.Table,
    agent_scores: pa.Table,
    before: str,
    after: str,
) -> list[PairedChange]:
    """Compare two checkpoint roles task by task, pooled over seeds, in every decoding that both were evaluated in.

    Args:
        rollouts, scores, agent_scores: as for `measure`, of one experiment's evaluation.
        before, after: checkpoint roles, for example base and sft.
    """
    groups = _group_rollouts(rollouts, scores, agent_scores, teacher=False)
    changes = []
    for decoding in sorted({decoding for role, seed, decoding in groups if role == after and seed is None}):
        if (before, None, decoding) not in groups:
            continue
        earlier, later = (_by_task(groups[role, None, decoding]) for role in (before, after))
        for metric in later:
            tasks = sorted(earlier.get(metric, {}).keys() & later[metric].keys())
            if not tasks:
                continue
            first, second = ([side[metric][task] for task in tasks] for side in (later, earlier))
            change = paired_difference(first, second, rates=metric not in MEANS)
            values = [sum(total for total, _ in side) / sum(size for _, size in side) for side in (second, first)]
            pairs = list(zip(second, first, strict=True))
            changes.append(PairedChange(decoding, metric, values[0], values[1], change, pairs))
    return changes


def _by_task(units: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, tuple[float, float]]]:
    """Return metric -> task -> (total, size); a task without a unit of the metric is not there."""
    tasks: dict[str, list[Mapping[str, Any]]] = {}
    for unit in units:
        if not unit["infrastructure_error"]:
            tasks.setdefault(unit["cluster"], []).append(unit)
    table: dict[str, dict[str, tuple[float, float]]] = {}
    for task, of_task in tasks.items():
        for metric, _, estimate in _estimates(of_task):
            table.setdefault(metric, {})[task] = estimate.value * estimate.n, float(estimate.n)
    return table


def threshold_checks(metrics: pa.Table, section: MetricsSection, roles: Sequence[str]) -> list[CheckOutcome]:
    """Compare the pooled rates of the trained roles with the section's thresholds: one advisory outcome per rate.

    A rate that cannot be decided at its n passes, and the message says so; one that was not measured fails.
    """
    outcomes = []
    rows = [r for r in metrics.to_pylist() if r["seed"] is None and r["checkpoint_role"] in roles]
    for metric in get_args(Threshold):
        name, sentences, passed, figures = f"{metric}_threshold", [], True, {}
        threshold, measured = section.thresholds.get(metric), in_reading(metric, section.reading)
        if threshold is None or not rows:
            nothing = "no threshold is set." if threshold is None else "no trained checkpoint was evaluated."
            outcomes.append(outcome(name, None, nothing=nothing))
            continue
        for row in rows:
            if row["metric"] != measured:
                continue
            estimate = Estimate(row["value"], row["n"], row["n"], row["ci_low"], row["ci_high"], row["interval"])
            verdict, sentence = decide(estimate, threshold)
            passed = passed and verdict is not False
            label = f"{row['checkpoint_role']} {row['decoding']}"
            label += " as published" if measured != metric else ""
            sentences.append(f"{label}: {sentence}")
            figures[label] = row["value"]
        case, passed = "" if sentences else "unmeasured", passed and bool(sentences)
        outcomes.append(outcome(name, passed, figures, case=case, sentences="; ".join(sentences), measured=measured))
    return outcomes
