"""From scored rollouts to metrics, the teacher's beside the student's.

Belongs here: which figures are reported, over which units, and their thresholds. Does not belong here: how a behaviour
is read (`etpi_assets.scoring`) or how an interval is made (`scoring.intervals`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import pyarrow as pa

from etpi_assets.scoring.intervals import Estimate, decide, mean, rate
from etpi_assets.specs.experiment import Threshold
from etpi_resources.lake.checks import CheckOutcome
from etpi_resources.lake.schemas import from_rows

PAIR_RATES = ("plan_first", "plan_content")
AGENT_RATES = ("follow_through", "follow_own", "follow_edited", "follow_by_turn_5")
TURN_MEANS = {"think_tokens_per_turn": "think_tokens", "output_tokens_per_turn": "output_tokens"}
"""An agent's totals, as means over its turns."""


def measure(
    rollouts: pa.Table,
    scores: pa.Table,
    agent_scores: pa.Table,
    *,
    experiment: str,
    teacher: bool = False,
) -> pa.Table:
    """Metrics of every (checkpoint role, decoding), a row for each seed and one pooled over seeds (seed null).

    Infrastructure errors are left out and counted in `excluded`; crashed agents stay in.

    Args:
        rollouts, scores, agent_scores: tables of those names, of one experiment's evaluation or of its rollout sets.
        experiment: the experiment the rows are filed under.
        teacher: file every rollout under the role "teacher", whoever acted.
    Returns:
        a `metrics` table.
    """
    facts = {row["rollout_id"]: row for row in rollouts.to_pylist()}
    agents: dict[str, list[dict[str, Any]]] = {}
    for row in agent_scores.to_pylist():
        agents.setdefault(row["rollout_id"], []).append(row)
    groups: dict[tuple[str, int | None, str], list[dict[str, Any]]] = {}
    for score in scores.to_pylist():
        fact = facts[score["rollout_id"]]
        role = "teacher" if teacher else fact["checkpoint_role"]
        decoding = fact["decoding"] or "as_rolled_out"
        unit = {**score, "cluster": score["task_id"], "agents": agents.get(score["rollout_id"], [])}
        seed = None if teacher else fact["seed"]
        for key in {(role, seed, decoding), (role, None, decoding)}:
            groups.setdefault(key, []).append(unit)
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
                    "value": estimate.value,
                    "n": estimate.n,
                    "unit": unit_name,
                    "ci_low": estimate.ci_low,
                    "ci_high": estimate.ci_high,
                    "interval": estimate.interval,
                    "excluded": len(units) - len(counted),
                }
            )
    return from_rows("metrics", rows)


def teacher_of(scores: pa.Table, agent_scores: pa.Table, experiment: str) -> pa.Table:
    """Metrics of the rollouts that the experiment could select from, under the role "teacher"."""
    rollouts = from_rows("rollouts", [{"rollout_id": id} for id in scores["rollout_id"].to_pylist()])
    return measure(rollouts, scores, agent_scores, experiment=experiment, teacher=True)


def _estimates(units: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, Estimate]]:
    for name in PAIR_RATES:
        # A behaviour of pairs is null for an agent that has no partner.
        seen = [unit for unit in units if unit[name] is not None]
        if estimate := rate([unit[name] for unit in seen], [unit["cluster"] for unit in seen]):
            yield name, "pair", estimate
    judged = [unit for unit in units if unit["reward"] is not None]
    if estimate := rate([unit["reward"] == 1.0 for unit in judged], [unit["cluster"] for unit in judged]):
        yield "solved", "pair", estimate
    offered = [u for u in units if u["agents"] and all(agent["tool_turns"] is not None for agent in u["agents"])]
    if estimate := rate(
        [any(agent["tool_turns"] for agent in unit["agents"]) for unit in offered],
        [unit["cluster"] for unit in offered],
    ):
        yield "called", "rollout", estimate
    if estimate := rate(
        [bool(unit["agents"]) and all(agent["parse_rate"] == 1.0 for agent in unit["agents"]) for unit in units],
        [unit["cluster"] for unit in units],
    ):
        yield "parsed", "rollout", estimate
    agents = [(agent, unit["cluster"]) for unit in units for agent in unit["agents"]]
    of = [cluster for _, cluster in agents]
    for name in AGENT_RATES:
        known = [(agent[name], cluster) for agent, cluster in agents if agent[name] is not None]
        if estimate := rate([hit for hit, _ in known], [cluster for _, cluster in known]):
            yield name, "agent", estimate
    if estimate := rate([agent["exit_status"] == "Submitted" for agent, _ in agents], of):
        yield "submitted", "agent", estimate
    turns = [agent["turns"] or 0 for agent, _ in agents]
    readable = [(agent["parse_rate"] or 0.0) * n for (agent, _), n in zip(agents, turns, strict=True)]
    if estimate := rate(readable, of, turns):
        yield "parse_rate", "turn", estimate
    if estimate := rate(*_known("adherent_turns", agents)):
        yield "adherence", "turn", estimate
    for name, column in TURN_MEANS.items():
        if estimate := mean([agent[column] or 0 for agent, _ in agents], of, turns):
            yield name, "turn", estimate
    if estimate := mean(*_known("post_think_tokens", agents)):
        yield "post_think_tokens_per_turn", "turn", estimate
    if estimate := mean(turns, of, [1] * len(turns)):
        yield "turns_per_agent", "agent", estimate


def _known(column: str, agents: Sequence[tuple[Mapping[str, Any], str]]) -> tuple[list[float], list[str], list[int]]:
    """Of the agents whose column is known: its values, their clusters, their turns."""
    known = [(agent, cluster) for agent, cluster in agents if agent[column] is not None]
    values = [agent[column] for agent, _ in known]
    return values, [cluster for _, cluster in known], [agent["turns"] or 0 for agent, _ in known]


def threshold_checks(
    metrics: pa.Table, thresholds: Mapping[Threshold, float], roles: Sequence[str]
) -> list[CheckOutcome]:
    """One advisory outcome a rate that may have a threshold: the trained roles' pooled rates against it, in words where
    n cannot decide, or that none is set."""
    outcomes = []
    rows = [r for r in metrics.to_pylist() if r["seed"] is None and r["checkpoint_role"] in roles]
    for metric in get_args(Threshold):
        sentences, passed, figures = [], True, {}
        threshold = thresholds.get(metric)
        nothing = "no threshold is set" if threshold is None else "no trained checkpoint was evaluated"
        for row in rows:
            if threshold is None or row["metric"] != metric:
                continue
            estimate = Estimate(row["value"], row["n"], row["n"], row["ci_low"], row["ci_high"], row["interval"])
            verdict, sentence = decide(estimate, threshold)
            passed = passed and verdict is not False
            label = f"{row['checkpoint_role']} {row['decoding']}"
            sentences.append(f"{label}: {sentence}")
            figures[label] = row["value"]
        outcomes.append(
            CheckOutcome(
                name=f"{metric}_threshold",
                passed=passed,
                message="; ".join(sentences) or nothing,
                blocking=False,
                figures=figures,
            )
        )
    return outcomes
