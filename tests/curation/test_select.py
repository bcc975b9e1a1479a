"""Rejection sampling: every rule, the tie-breakers, and that nobody goes missing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etpi_assets.curation.select import counts_reconcile, select
from etpi_assets.specs.experiment import SelectSection
from etpi_resources.lake.schemas import from_rows

ALL = SelectSection(min_reward=None, require=(), shortest_correct=False)
SHORTEST = SelectSection(require=())


def tables(*rows):
    """Rollouts and scores from {"id", ...}: what a row does not say is a solved rollout that plans and follows."""
    rollouts, scores = [], []
    for row in rows:
        given_ = {"task_id": "t1", "repo": "harbor", "sample": 0, "origin": "set", "rollout_set": "s", **row}
        name = given_.pop("id")
        facts = ("task_id", "repo", "sample", "origin", "rollout_set", "suite")
        rollouts.append({"rollout_id": name, "teacher": "strong", **{k: given_[k] for k in facts if k in given_}})
        score = {
            "reward": 1.0, "verdict": "passed", "plan_first": True, "plan_content": True, "follow_through": 1.0,
            "output_tokens": 100, "turns": 10, "exit_status": "Submitted", "infrastructure_error": False,
        }  # fmt: skip
        scores.append({"rollout_id": name, **score, **{k: v for k, v in given_.items() if k in score or "reason" in k}})
    return from_rows("rollouts", rollouts), from_rows("scores", scores)


def chosen(section, *rows, tokens=None):
    rollouts, scores = tables(*rows)
    found = select(rollouts, scores, section, tokens)
    assert counts_reconcile(rollouts, found["selected"], found["dropped"]).figures["offered"] == len(
        found["selected"]
    ) + len(found["dropped"])
    reasons = {row["rollout_id"]: (row["reason"], row["detail"]) for row in found["dropped"].to_pylist()}
    return found["selected"]["rollout_id"].to_pylist(), reasons


def test_the_fewest_tokens_then_turns_then_the_lowest_sample():
    rows = [
        {"id": "long", "output_tokens": 120, "turns": 2, "sample": 0},
        {"id": "turns", "output_tokens": 90, "turns": 9, "sample": 1},
        {"id": "late", "output_tokens": 90, "turns": 8, "sample": 3},
        {"id": "best", "output_tokens": 90, "turns": 8, "sample": 2},
        {"id": "wrong", "output_tokens": 10, "reward": 0.0, "verdict": "failed_tests"},
        {"id": "other", "task_id": "t2", "output_tokens": 500},
    ]
    for order in (rows, rows[::-1]):
        found, reasons = chosen(SHORTEST, *order)
        assert sorted(found) == ["best", "other"]
        assert reasons["late"] == (
            "not_the_shortest",
            "90 tokens in 8 turns (sample 3); 90 tokens in 8 turns (sample 2) was taken",
        )
        assert reasons["wrong"] == ("low_reward", "reward 0 < 1, verdict failed_tests")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"infrastructure_error": True, "reward": None, "plan_first": None}, "infrastructure"),
        ({"repo": "quay"}, "excluded_repo"),
        ({"reward": 0.5}, "low_reward"),
        ({"reward": None, "verdict": "unknown"}, "no_reward"),
        ({"plan_first": False, "plan_first_reason": "agent1: no INBOX"}, "no_plan_first"),
        ({"plan_content": None}, "no_plan_content"),
        ({"follow_through": 0.5}, "no_follow_through"),
    ],
)
def test_a_rollout_is_dropped_by_the_first_rule_it_fails(change, reason):
    section = SelectSection(require=("plan_first", "plan_content", "follow_through"), exclude_repos=("quay",))
    found, reasons = chosen(section, {"id": "r", **change}, {"id": "good", "task_id": "t2"})
    assert found == ["good"] and reasons["r"][0] == reason and reasons["r"][1]
    if reason == "no_plan_first":
        assert reasons["r"][1] == "agent1: no INBOX"


def test_the_reward_does_not_filter_where_it_is_switched_off():
    rows = [{"id": "a", "reward": 0.0}, {"id": "b", "reward": None, "sample": 1}, {"id": "c", "sample": 2}]
    assert chosen(ALL, *rows)[0] == ["a", "b", "c"]
    found, reasons = chosen(SelectSection(min_reward=None, require=()), *rows)
    assert found == ["c"] and reasons["a"][0] == "not_correct", "shortest-correct is among the correct"


def test_sizes_are_equalised_over_as_many_tasks_as_there_are():
    rows = [{"id": f"r{t}{s}", "task_id": f"t{t}", "sample": s} for s in (1, 0) for t in (2, 10, 1)]
    section = SelectSection(min_reward=None, require=(), shortest_correct=False, max_rollouts=3)
    found, reasons = chosen(section, *rows)
    assert found == ["r20", "r100", "r10"], "tasks as first met, one of each"
    assert {reason for reason, _ in reasons.values()} == {"over_max_rollouts"}
    section = section.model_copy(update={"max_rollouts": 4})
    assert chosen(section, *rows)[0] == ["r20", "r21", "r100", "r10"], "a second only after all firsts"


def test_only_rollouts_of_a_set_are_read():
    found, reasons = chosen(SHORTEST, {"id": "eval", "origin": "eval"}, {"id": "rl", "origin": "rl"}, {"id": "set"})
    assert found == ["set"] and not reasons


def test_tasks_of_two_suites_and_unknown_tasks_are_not_one_task():
    rows = [
        {"id": "a", "suite": "x"},
        {"id": "b", "suite": "y"},
        {"id": "c", "task_id": None},
        {"id": "d", "task_id": None},
    ]
    assert chosen(SHORTEST, *rows)[0] == ["a", "b", "c", "d"]


def test_rollouts_without_ids_are_compared_by_the_students_tokenizer():
    rows = [{"id": "a", "output_tokens": None}, {"id": "b", "output_tokens": None, "sample": 1}]
    assert chosen(SHORTEST, *rows, tokens={"a": 9, "b": 8})[0] == ["b"]
    with pytest.raises(ValueError, match="rollout a has no token count"):
        chosen(SHORTEST, *rows)


def test_a_rollout_without_a_score_is_an_error():
    rollouts, scores = tables({"id": "a"}, {"id": "b"})
    with pytest.raises(ValueError, match="rollout b has no score; materialize scored_rollouts of 's'"):
        select(rollouts, scores.slice(0, 1), SHORTEST)


def test_the_account_is_checked():
    rollouts, scores = tables({"id": "a"}, {"id": "b", "reward": 0.0})
    found = select(rollouts, scores, SHORTEST)
    good = counts_reconcile(rollouts, **found)
    assert good.passed and good.message == "2 rollouts = 1 selected + 1 dropped (low_reward 1)"
    lost = counts_reconcile(rollouts, found["selected"], found["dropped"].slice(0, 0))
    assert not lost.passed and "'b'" in lost.message
    nothing = counts_reconcile(rollouts.slice(1), found["selected"].slice(1), found["dropped"])
    assert not nothing.passed and "nothing is left" in nothing.message


rollout_rows = st.lists(
    st.fixed_dictionaries(
        {
            "task_id": st.sampled_from(["t1", "t2", "t3"]),
            "reward": st.sampled_from([0.0, 0.5, 1.0, None]),
            "plan_first": st.booleans(),
            "output_tokens": st.integers(1, 5),
            "turns": st.integers(1, 3),
        }
    ),
    max_size=12,
)
sections = st.builds(
    SelectSection,
    min_reward=st.sampled_from([None, 0.5, 1.0]),
    require=st.sampled_from([(), ("plan_first",)]),
    shortest_correct=st.booleans(),
    max_rollouts=st.sampled_from([None, 1, 2]),
)


@given(rollout_rows, sections, st.randoms())
def test_nobody_goes_missing_and_samples_may_come_in_any_order(rows, section, random):
    rows = [{"id": f"r{i}", "sample": i, **row} for i, row in enumerate(rows)]
    found, reasons = chosen(section, *rows)
    assert len(found) + len(reasons) == len(rows) and not set(found) & set(reasons)
    taken = [row for row in rows if row["id"] in found]
    if section.shortest_correct:
        assert len({row["task_id"] for row in taken}) == len(taken)
        assert all(row["reward"] == 1.0 for row in taken)
    if section.max_rollouts is None:
        shuffled = random.sample(rows, len(rows))
        assert sorted(chosen(section, *shuffled)[0]) == sorted(found)
