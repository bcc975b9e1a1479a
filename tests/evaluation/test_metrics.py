"""Intervals and metrics: which units are counted, and which thresholds cannot be decided."""

from __future__ import annotations

import math

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etpi_assets.evaluation.metrics import measure, teacher_of, threshold_checks
from etpi_assets.scoring.intervals import decide, mean, rate, wilson
from etpi_assets.specs.experiment import MetricsSection
from etpi_resources.lake.schemas import from_rows


def test_wilson_matches_published_values():
    # Newcombe 1998, table I, method 3: 81/263 and 0/20.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=1, max_size=60))
def test_rate_lies_in_its_interval_and_clusters_only_widen_it(units):
    hits, clusters = [h for h, _ in units], [str(c) for _, c in units]
    clustered, alone = rate(hits, clusters), rate(hits, [str(i) for i in range(len(units))])
    assert clustered and alone
    assert 0 <= clustered.ci_low <= clustered.value <= clustered.ci_high <= 1
    assert clustered.ci_high - clustered.ci_low >= alone.ci_high - alone.ci_low - 1e-12


def test_limits_of_a_rate_of_zero_or_one_are_exact():
    for n in range(1, 200):
        assert wilson(0, n)[0] == 0.0
        assert wilson(n, n)[1] == 1.0


def test_clustered_interval_has_its_coverage_and_the_naive_one_does_not():
    rng = np.random.default_rng(0)
    covered = naive = 0
    for _ in range(400):
        pair_rate = rng.beta(1, 1, size=24)
        hits = (rng.random((24, 4)) < pair_rate[:, None]).ravel()
        clusters = np.repeat(np.arange(24), 4).astype(str)
        clustered, alone = rate(hits, clusters), rate(hits, np.arange(96).astype(str))
        assert clustered and alone
        covered += clustered.ci_low <= 0.5 <= clustered.ci_high
        naive += alone.ci_low <= 0.5 <= alone.ci_high
    assert covered / 400 > 0.92 > naive / 400


def test_two_agreeing_agents_of_one_pair_count_as_one_pair():
    both = rate([1, 1], ["p", "p"])
    assert both and both.n == 2 and both.clusters == 1
    assert (both.ci_low, both.ci_high) == wilson(1, 1)


def test_no_units_give_no_estimate_and_one_cluster_an_infinite_mean_interval():
    assert rate([], []) is None
    one = mean([3.0], ["p"], [2])
    assert one and one.value == 1.5 and math.isinf(one.ci_high)


def test_two_pairs_cannot_decide_a_threshold():
    two, forty = rate([1, 1], ["a", "b"]), rate([1] * 40, [str(i) for i in range(40)])
    assert two and forty
    assert decide(two, 0.7)[0] is None and "undecided" in decide(two, 0.7)[1]
    assert decide(forty, 0.7)[0] is True
    assert decide(forty, 0.99)[0] is None


def _tables(n: int = 4, tools: bool = False):
    rollouts, scores, agents = [], [], []
    for i in range(n):
        rollout = f"r{i}"
        rollouts.append(
            {
                "rollout_id": rollout,
                "origin": "eval",
                "checkpoint_role": "sft",
                "seed": i % 2,
                "decoding": "greedy",
                "task_id": f"t{i // 2}",
            }
        )
        broken = i == n - 1
        scores.append(
            {
                "rollout_id": rollout,
                "task_id": f"t{i // 2}",
                "plan_first": i != 0,
                "plan_content": True,
                "reward": float(i % 2),
                "infrastructure_error": broken,
            }
        )
        for agent in ("agent1", "agent2"):
            agents.append(
                {
                    "rollout_id": rollout,
                    "agent_id": agent,
                    "follow_through": agent == "agent1",
                    "follow_own": None,
                    "exit_status": "Submitted",
                    "parse_rate": 0.75,
                    "turns": 4,
                    "think_tokens": 8,
                    "output_tokens": 40,
                    # Of r0 one agent calls, of r1 none, of r2 both; r3 broke.
                    "tool_turns": {"r0": int(agent == "agent2"), "r1": 0}.get(rollout, 3) if tools else None,
                }
            )
    return from_rows("rollouts", rollouts), from_rows("scores", scores), from_rows("agent_scores", agents)


def _value(metrics, metric, seed):
    (row,) = [r for r in metrics.to_pylist() if r["metric"] == metric and r["seed"] == seed]
    return row


def test_metrics_exclude_infrastructure_errors_and_pool_over_seeds_by_task():
    metrics = measure(*_tables(), experiment="x")
    pooled = _value(metrics, "plan_first", None)
    assert (pooled["n"], pooled["excluded"]) == (3, 1)
    assert pooled["value"] == pytest.approx(2 / 3)
    assert pooled["interval"] == "wilson_clustered"
    assert _value(metrics, "plan_first", 0)["interval"] == "wilson"
    assert _value(metrics, "parse_rate", None)["value"] == pytest.approx(0.75)
    assert _value(metrics, "parse_rate", None)["n"] == 24
    assert _value(metrics, "think_tokens_per_turn", None)["value"] == pytest.approx(2.0)
    assert _value(metrics, "follow_through", None)["value"] == pytest.approx(0.5)


def test_called_is_measured_only_where_tools_are_offered():
    metrics = measure(*_tables(tools=True), experiment="x")
    called = _value(metrics, "called", None)
    assert (called["value"], called["n"], called["unit"]) == (pytest.approx(2 / 3), 3, "rollout")
    assert called["interval"] == "wilson_clustered" and called["ci_low"] < 2 / 3 < called["ci_high"]
    assert [_value(metrics, "called", seed)["value"] for seed in (0, 1)] == [1.0, 0.0] and called["excluded"] == 1
    assert "called" not in measure(*_tables(), experiment="x")["metric"].to_pylist()
    _, scores, agents = _tables(tools=True)
    (of_teacher,) = [r for r in teacher_of(scores, agents, "x").to_pylist() if r["metric"] == "called"]
    assert (of_teacher["checkpoint_role"], of_teacher["n"]) == ("teacher", 3)


def test_threshold_check_is_advisory_and_names_its_figures():
    metrics = measure(*_tables(40), experiment="x")
    section = MetricsSection(thresholds={"follow_through": 0.9})
    checks = {check.name: check for check in threshold_checks(metrics, section, ["sft"])}
    check = checks.pop("follow_through_threshold")
    assert not check.passed and not check.blocking
    assert "below" in check.message and "0.90" in check.message
    assert set(check.figures) == {"sft greedy"}
    assert {(c.name, c.passed, len(c.figures)) for c in checks.values()} == {
        ("plan_first_threshold", True, 0),
        ("plan_content_threshold", True, 0),
    }


def test_threshold_is_for_every_role_and_fails_if_nothing_was_measured():
    rollouts, scores, agents = _tables(40)
    both = [{**row, "checkpoint_role": "rl" if n < 20 else "sft"} for n, row in enumerate(rollouts.to_pylist())]
    planned = [{**row, "plan_first": n < 20} for n, row in enumerate(scores.to_pylist())]
    metrics = measure(from_rows("rollouts", both), from_rows("scores", planned), agents, experiment="x")
    section = MetricsSection(thresholds={"plan_first": 0.5})
    for roles in (("rl", "sft"), ("sft",)):
        assert not next(c for c in threshold_checks(metrics, section, roles) if c.name == "plan_first_threshold").passed
    assert next(c for c in threshold_checks(metrics, section, ("rl",)) if c.name == "plan_first_threshold").passed
    alone = metrics.filter(pc.field("metric") != "plan_first")
    outcomes = [threshold_checks(table, section, ("rl",))[0] for table in (metrics, alone, alone.slice(0, 0))]
    assert [(o.name, o.passed, o.applicable) for o in outcomes] == [
        ("plan_first_threshold", passed, applicable)
        for passed, applicable in ((True, True), (False, True), (True, False))
    ]


def test_threshold_of_the_published_reading_applies_to_its_rates():
    rollouts, scores, agents = _tables(40)
    published = from_rows("scores", [{**row, "plan_first_published": False} for row in scores.to_pylist()])
    metrics = measure(rollouts, published, agents, experiment="x")
    for reading, passed in (("hardened", True), ("published", False)):
        section = MetricsSection.model_validate({"thresholds": {"plan_first": 0.7}, "reading": reading})
        check = next(c for c in threshold_checks(metrics, section, ["sft"]) if c.name == "plan_first_threshold")
        assert check.passed is passed and ("sft greedy as published" in check.figures) is not passed


def test_teacher_is_measured_over_all_rollouts_it_could_select_from():
    _, scores, agents = _tables()
    rows = teacher_of(scores, agents, "x").to_pylist()
    assert {(r["checkpoint_role"], r["seed"], r["decoding"]) for r in rows} == {("teacher", None, "as_rolled_out")}
    (follow,) = [r for r in rows if r["metric"] == "follow_through"]
    assert follow["n"] == 6 and follow["excluded"] == 1


def test_behaviour_that_does_not_apply_has_no_metric():
    assert not [r for r in measure(*_tables(), experiment="x").to_pylist() if r["metric"] == "follow_own"]
