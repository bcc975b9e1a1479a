"""Differences between two checkpoints on the same tasks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from etpi_assets.evaluation.metrics import measure, paired_changes
from etpi_assets.scoring.intervals import Z, difference, paired_difference, rate
from etpi_resources.lake.schemas import from_rows


def test_paired_interval_of_means_is_that_of_the_differences():
    """Sizes are equal, so the reference is the plain paired interval: the standard deviation of the differences."""
    random = np.random.default_rng(0)
    before = random.normal(10, 3, 40)
    after = before + random.normal(1, 0.5, 40)
    found = paired_difference([(x, 1) for x in after], [(x, 1) for x in before], rates=False)
    half = Z * np.std(after - before, ddof=1) / math.sqrt(40)
    assert found.value == pytest.approx(np.mean(after - before))
    assert (found.ci_low, found.ci_high) == pytest.approx((found.value - half, found.value + half))


def test_one_task_leaves_the_difference_of_means_open():
    change = paired_difference([(10.0, 2.0)], [(4.0, 2.0)], rates=False)
    assert (change.value, change.ci_low, change.ci_high) == (3.0, -math.inf, math.inf)


def test_tasks_that_agree_narrow_the_interval_of_a_rate_and_none_leaves_the_range():
    hits = [(float(i % 2), 1.0) for i in range(40)]
    later = [*hits[:-2], (1.0, 1.0), (1.0, 1.0)]
    paired = paired_difference(later, hits)
    names = [str(i) for i in range(40)]
    sides = [rate([x for x, _ in side], names) for side in (later, hits)]
    assert sides[0] and sides[1]
    independent = difference(*sides)
    assert paired.value == pytest.approx(independent.value) == pytest.approx(1 / 40)
    assert paired.ci_high - paired.ci_low < 0.4 * (independent.ci_high - independent.ci_low)
    certain = paired_difference([(1.0, 1.0)] * 6, [(0.0, 1.0)] * 6)
    assert certain.value == 1.0 and 0.3 < certain.ci_low < 1.0 == certain.ci_high, "six tasks do not prove 100 %"


def _evaluation(solved: dict[tuple[str, str, int], float], broken: tuple[str, str, int] | None = None):
    """Tables of (role, task, seed) -> reward, with one agent for each rollout."""
    rollouts, scores, agents = [], [], []
    for role, task, seed in solved:
        rollout = {"rollout_id": f"{role}-{task}-{seed}", "task_id": task}
        rollouts.append(rollout | {"origin": "eval", "checkpoint_role": role, "seed": seed, "decoding": "greedy"})
        reward = solved[role, task, seed]
        scores.append(rollout | {"reward": reward, "infrastructure_error": (role, task, seed) == broken})
        turns = {"base": 2, "sft": 4}[role]
        agent = {"rollout_id": rollout["rollout_id"], "agent_id": "a", "exit_status": "Submitted"}
        agents.append(agent | {"parse_rate": 0.5, "turns": turns})
    return from_rows("rollouts", rollouts), from_rows("scores", scores), from_rows("agent_scores", agents)


def test_changes_pair_tasks_over_seeds_and_leave_out_tasks_of_one_side():
    tables = _evaluation(
        {
            ("base", "a", 0): 1, ("base", "b", 0): 1, ("base", "c", 0): 0, ("base", "alone", 0): 0,
            ("sft", "a", 0): 1, ("sft", "a", 1): 0, ("sft", "b", 0): 0, ("sft", "b", 1): 0,
            ("sft", "c", 0): 1, ("sft", "c", 1): 0,
        }
    )  # fmt: skip
    changes = {change.metric: change for change in paired_changes(*tables, "base", "sft")}
    solved = changes["solved"]
    assert (solved.decoding, solved.change.clusters, solved.change.n) == ("greedy", 3, 3)
    assert (solved.before, solved.after) == pytest.approx((2 / 3, 1 / 3)), "the task of one side does not count"
    assert solved.change.value == pytest.approx(-1 / 3)
    assert changes["turns_per_agent"].change.value == pytest.approx(2.0)
    assert paired_changes(*tables, "base", "rl") == []


def test_changes_agree_with_the_metrics_of_the_same_tasks_and_skip_infrastructure_errors():
    rewards = {(role, f"t{i}", 0): float(i < n) for role, n in (("base", 6), ("sft", 3)) for i in range(8)}
    tables = _evaluation(rewards, broken=("sft", "t7", 0))
    change = next(c for c in paired_changes(*tables, "base", "sft") if c.metric == "solved")
    values = {
        row["checkpoint_role"]: row["value"]
        for row in measure(*tables, experiment="e").to_pylist()
        if row["metric"] == "solved" and row["seed"] is None
    }
    assert change.change.clusters == 7
    assert change.after == pytest.approx(values["sft"]) == pytest.approx(3 / 7)
    assert change.before == pytest.approx(6 / 7), "without the task whose later rollout broke"
