"""The checks of `rl_checkpoint` on tables and reports with one fault each."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from etpi_assets.scoring.rewards.rescore import UNREWARDED
from etpi_assets.specs.training import RewardTerm, RLSection
from etpi_assets.training import grpo_checks, sft_checks
from etpi_resources.lake.schemas import from_rows

SECTION = RLSection(
    method="grpo", suite="s", rewards=(RewardTerm(function="format"), RewardTerm(function="outcome")),
    group_size=2, device_batch=4, accumulate=1, steps=2, scale_advantage=False,
)  # fmt: skip
SEEDS = (0, 1)
OTHER_ROUND = {"step": 7, "version": 7}


def report(*gaps: float | None) -> Any:
    return SimpleNamespace(
        dtype="fp32", saved=SimpleNamespace(dtype="float32"), log=[SimpleNamespace(logprob_gap=gap) for gap in gaps]
    )


def samples() -> list[dict[str, Any]]:
    """Two rounds a seed, of two groups: one of rewards 0 and 1, one of equal rewards."""
    rewards = {0: (0.0, 1.0), 1: (1.0, 1.0)}
    return [
        {
            "rollout_id": f"{seed}/{step}/{task}/{place}", "task_id": f"t{task}", "seed": seed, "step": step,
            "reward": reward, "advantage": reward - sum(rewards[task]) / 2, "policy_tokens": 3,
            "policy_logprobs": [-1.0] * 3, "version": step,
        }
        for seed in SEEDS for step in range(2) for task in rewards for place, reward in enumerate(rewards[task])
    ]  # fmt: skip


def failed(rows=None, rollouts=None, rewards=None, reports=None, section=SECTION) -> set[str]:
    """Return the names of the failed checks; only a warning may not block."""
    rows = samples() if rows is None else rows
    names = [row["rollout_id"] for row in rows]
    whole = [row["rollout_id"] for row in rows if row.get("left_out") not in UNREWARDED]
    scored = [
        {"rollout_id": n, "function": f, "value": 0.0, "weight": 1.0} for n in whole for f in ("format", "outcome")
    ]
    tables = {
        "rl_samples": from_rows("rl_samples", rows),
        "rollouts": from_rows("rollouts", [{"rollout_id": name} for name in (rollouts or names)]),
        "rewards": from_rows("rewards", scored if rewards is None else rewards(scored)),
        "turns": from_rows("turns", [{"rollout_id": name, "output_ids": [7, 8, 9]} for name in names]),
    }
    reports = reports or {seed: report(0.001, None) for seed in SEEDS}
    outcomes = grpo_checks.checks(section, reports, tables, 2, [])
    assert {outcome.name for outcome in outcomes if not outcome.blocking} == {"prompts_fit", "groups_vary"}
    return {outcome.name for outcome in outcomes if not outcome.passed}


@pytest.fixture(autouse=True)
def _no_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo_checks, "proofs", lambda reports: [])


def test_whole_run_passes() -> None:
    assert failed() == set()


@pytest.mark.parametrize(
    "fault",
    [
        {"rows": samples()[4:]},
        {"rollouts": [row["rollout_id"] for row in samples()[1:]]},
        {"rows": [*samples(), *({**r, "rollout_id": f"x{r['rollout_id']}"} | OTHER_ROUND for r in samples()[:4])]},
        {"rewards": lambda scored: scored[1:]},
        {"rewards": lambda scored: [{**scored[0], "function": "outcome"}, *scored[1:]]},
    ],
    ids=["round missing", "rollout missing", "round that was not run", "reward missing", "reward twice for another"],
)
def test_incomplete_record_fails(fault: dict[str, Any]) -> None:
    assert failed(**fault) == {"rollouts_recorded"}


@pytest.mark.parametrize("change", [{"policy_tokens": 2}, {"policy_logprobs": [-1.0] * 2}])
def test_generated_id_that_is_not_trained_once_fails(change: dict[str, Any]) -> None:
    rows = samples()
    assert failed([{**rows[0], **change}, *rows[1:]]) == {"rollouts_recorded"}
    left_out = {"left_out": "broken", "advantage": 0.0, "reward": 0.0, "policy_logprobs": None}
    alone = {"advantage": 0.0}  # nothing is left to compare it with
    assert failed([{**rows[0], **left_out}, {**rows[1], **alone}, *rows[2:]]) == set()
    assert failed([{**rows[0], **left_out}, *rows[1:]]) == {"advantages_hold"}


@pytest.mark.parametrize(
    ("ahead", "change", "holds"),
    [
        (0, {"version": 0}, False),
        (1, {"version": 0}, True),
        (1, {"version": 1, "turn_versions": [1, 0]}, True),
        (1, {"version": -1, "turn_versions": [0, -1]}, False),
        (1, {"version": 2}, False),
    ],
)
def test_turns_of_older_weights_than_allowed_or_of_later_ones_fail(ahead, change, holds) -> None:
    rows = [{**row, **change} if row["step"] == 1 and row["seed"] == 0 else row for row in samples()]
    wrong = failed(rows, section=SECTION.model_copy(update={"ahead": ahead}))
    assert wrong == (set() if holds else {"weights_recent"})


def test_replaced_rollouts_are_recorded_beside_those_in_their_place() -> None:
    replaced = [
        {**samples()[0], "rollout_id": "x", "left_out": "replaced", "advantage": 0.0, "policy_logprobs": None},
        {**samples()[0], "rollout_id": "y", "left_out": "constant", "advantage": 0.0, "policy_logprobs": None},
    ]
    assert failed([*samples(), *replaced]) == set()
    assert failed([*samples(), {**replaced[1], "advantage": 0.5}]) == {"advantages_hold"}


def test_advantages_of_agents_follow_from_their_own_rewards() -> None:
    section = SECTION.model_copy(
        update={"rewards": (RewardTerm(function="format"), RewardTerm(function="outcome", of="agent"))}
    )
    rows = samples()
    for row in rows:
        row["agents"], row["agent_rewards"] = ["a", "b"], [row["reward"], 0.25]
        row["agent_advantages"] = [row["advantage"], 0.0]

    def two(scored: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [*scored, *(row for row in scored if row["function"] == "outcome")]

    assert failed(rows, section=section, rewards=two) == set()
    rows[0]["agent_advantages"] = [rows[0]["advantage"], 0.5]
    assert failed(rows, section=section, rewards=two) == {"advantages_hold"}


def test_advantages_may_be_scaled_by_all_rewards_of_a_step() -> None:
    spread = 0.5 + SECTION.advantage_eps  # of the rewards 0, 1, 1, 1, with the degrees of freedom of a sample
    rows = [{**row, "advantage": row["advantage"] / spread} for row in samples()]
    assert failed(rows, section=SECTION.model_copy(update={"scale_advantage": "batch"})) == set()


@pytest.mark.parametrize("change", [{"advantage": 0.25}, {"reward": 0.5}, {"task_id": "t9"}])
def test_advantages_that_do_not_follow_from_their_group_fail(change: dict[str, Any]) -> None:
    rows = samples()
    assert failed([{**rows[0], **change}, *rows[1:]]) == {"advantages_hold"}


@pytest.mark.parametrize(
    ("gaps", "passed"),
    [
        ([(0.001,), (0.005,)], True),
        ([(0.0, 0.008), (0.0,)], True),
        ([(0.0,), (0.009,)], False),  # their mean is within the bound
        ([(0.001,), (None,)], False),
        ([(0.001,), (math.nan,)], False),
    ],
)
def test_rollouts_of_other_weights_in_one_seed_fail(gaps: list[tuple[float | None]], passed: bool) -> None:
    wrong = failed(reports={seed: report(*of_seed) for seed, of_seed in zip(SEEDS, gaps, strict=True)})
    assert wrong == (set() if passed else {"logprobs_agree"})


@pytest.mark.parametrize("place", ["served", "passes", "saved"])
def test_gap_has_the_bound_of_16_bits_if_one_side_computes_in_them(place: str) -> None:
    section = SECTION.model_copy(update={"options": {"dtype": "bfloat16"}}) if place == "served" else SECTION
    reports = {seed: report(0.1) for seed in SEEDS}
    for of_seed in reports.values():
        of_seed.dtype = "bf16" if place == "passes" else "fp32"
        of_seed.saved.dtype = "bfloat16" if place == "saved" else "float32"
    assert failed(reports=reports, section=section) == set()


def test_advantages_follow_the_settings_of_the_section() -> None:
    settings = {"scale_advantage": True, "advantage_ddof": 1, "advantage_eps": 0.5}
    values = {0.0: -0.5 / (0.5**0.5 + 0.5), 1.0: 0.5 / (0.5**0.5 + 0.5)}
    rows = [{**row, "advantage": values[row["reward"]] if row["advantage"] else 0.0} for row in samples()]
    assert failed(rows, section=SECTION.model_copy(update=settings)) == set()
    for other in ({"advantage_ddof": 0}, {"advantage_eps": 1e-4}):
        assert failed(rows, section=SECTION.model_copy(update=settings | other)) == {"advantages_hold"}


@pytest.mark.parametrize(("share", "warns"), [(0.95, False), (0.96, True), (1.0, True)])
def test_equal_rewards_in_almost_all_groups_of_one_seed_warn(
    share: float, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = sft_checks.CheckOutcome("weights_differ_from_base", False, "training changed nothing")
    monkeypatch.setattr(grpo_checks, "proofs", lambda reports: [lost])
    section = SECTION.model_copy(update={"group_size": 3, "device_batch": 300, "steps": 1})
    groups = [*[(0, 0.5)] * 100, *((1, float(n >= share * 100)) for n in range(100))]
    rows = [
        {**samples()[0], "rollout_id": f"{n}/{place}", "seed": seed, "step": 0, "reward": reward * (place == 1)}
        for n, (seed, reward) in enumerate(groups) for place in range(3)
    ]  # fmt: skip
    reports = {seed: report(0.001) for seed in SEEDS}
    tables = {name: from_rows(name, []) for name in ("rollouts", "rewards", "turns")}
    outcomes = grpo_checks.checks(section, reports, tables | {"rl_samples": from_rows("rl_samples", rows)}, 2, [])
    by_name = {outcome.name: outcome for outcome in outcomes}
    assert by_name["groups_vary"].passed is not warns
    assert ("equal rewards" in by_name[lost.name].message) is (share == 1.0)
