"""The checks of `eval_rollouts` on tables with one fault each."""

from __future__ import annotations

import pytest

from etpi_assets.evaluation.assets import _exits
from etpi_assets.evaluation.rollouts import every_condition_ran, infrastructure_held
from etpi_assets.trajectories.rollout_checks import LIMITS, budget_exhausted
from etpi_resources.lake.schemas import from_rows

TASKS = 30
EXPECTED: dict[tuple[str, int | None, str, int], int] = {
    (role, 0, "greedy", 0): TASKS for role in ("base", "sft", "rl")
}


def rows(**broken: int) -> list[dict]:
    """The rollouts of three checkpoints on TASKS tasks; role -> how many of its rollouts broke."""
    return [
        {
            "rollout_id": f"{role}{n}", "task_id": f"t{n}", "checkpoint_role": role, "seed": seed,
            "decoding": decoding, "sample_seed": sample,
            "error": "sandbox: gone" if n < broken.get(role, 0) else None,
        }
        for role, seed, decoding, sample in EXPECTED
        for n in range(TASKS)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "passed"),
    [
        (lambda found: found, True),
        (lambda found: found[1:], False),
        (lambda found: [*found, found[0]], False),
        (lambda found: [found[1], *found[1:]], False),
        (lambda found: [*found, {**found[0], "decoding": "t1"}], False),
        (lambda found: found[TASKS:], False),
    ],
    ids=["whole", "one missing", "one twice", "one twice for another", "another decoding", "no base"],
)
def test_each_condition_has_each_task_once(change, passed: bool) -> None:
    assert every_condition_ran(from_rows("rollouts", change(rows())), EXPECTED).passed == passed


@pytest.mark.parametrize(
    ("broken", "passed"),
    [
        ({}, True),
        ({"sft": 1}, True),
        ({"rl": 3}, False),  # 3 of 90, but every tenth of the one role
        ({"base": 1, "sft": 1, "rl": 1}, True),
        ({"base": 2, "sft": 2, "rl": 2}, False),
    ],
)
def test_infrastructure_errors_of_one_checkpoint_are_not_diluted_by_the_others(broken, passed: bool) -> None:
    outcome = infrastructure_held(from_rows("rollouts", rows(**broken)))
    assert outcome.passed == passed and outcome.figures["errors"] == sum(broken.values())


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize(("ended", "passed"), [({"rl": 16}, False), ({"rl": 15, "sft": 15}, True), ({}, True)])
def test_student_whose_budget_ended_most_rollouts_is_not_diluted_by_the_others(limit, ended, passed: bool) -> None:
    rollouts = [
        {**row, "exit_status": limit if int(row["task_id"][1:]) < ended.get(row["checkpoint_role"], 0) else "Submitted"}
        for row in rows()
    ]
    outcome = budget_exhausted(_exits(from_rows("rollouts", rollouts)), "evaluate.agent.max_steps")
    assert outcome.passed == passed and set(outcome.figures) == {"base", "sft", "rl"}
    assert {role: f["ended_in_limits"] for role, f in outcome.figures.items() if f["ended_in_limits"]} == ended


def test_one_error_among_few_rollouts_of_a_role_blocks_nothing() -> None:
    few = [row for row in rows(rl=1) if row["checkpoint_role"] != "rl" or row["task_id"] in ("t0", "t1", "t2")]
    assert infrastructure_held(from_rows("rollouts", few)).passed
    each = [row for row in rows(base=1, sft=1, rl=1) if row["task_id"] in ("t0", "t1", "t2")]
    assert not infrastructure_held(from_rows("rollouts", each)).passed, "a third of all"
