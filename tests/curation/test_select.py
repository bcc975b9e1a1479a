"""Rejection sampling: every rule, the tie-breakers, and that no rollout goes missing."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etpi_assets.curation.select import counts_reconcile, resolved, select
from etpi_assets.specs.experiment import SelectSection
from etpi_resources.lake.check_outcome import BadData
from etpi_resources.lake.schemas import from_rows

ALL = SelectSection(min_reward=None, require=(), shortest_correct=False)
SHORTEST = SelectSection(min_reward=1.0, shortest_correct=True)


def tables(*rows):
    """Return rollouts and scores of rows {"id", ...}; by default they are solved, plan first and follow through."""
    rollouts, scores = [], []
    for row in rows:
        values = {"task_id": "t1", "repo": "harbor", "sample": 0, "origin": "set", "rollout_set": "s", **row}
        name = values.pop("id")
        facts = ("task_id", "repo", "sample", "origin", "rollout_set", "suite", "source", "outcome")
        rollouts.append({"rollout_id": name, "teacher": "strong", **{k: values[k] for k in facts if k in values}})
        score = {
            "reward": 1.0, "verdict": "passed", "plan_first": True, "plan_content": True, "follow_through": 1.0,
            "plan_content_published": True, "verdict_trust": None,
            "output_tokens": 100, "turns": 10, "exit_status": "Submitted", "infrastructure_error": False,
        }  # fmt: skip
        scores.append({"rollout_id": name, **score, **{k: v for k, v in values.items() if k in score or "reason" in k}})
    return from_rows("rollouts", rollouts), from_rows("scores", scores)


def chosen(section, *rows, tokens=None):
    rollouts, scores = tables(*rows)
    result = select(rollouts, scores, section, tokens)
    figures = counts_reconcile(rollouts, **result).figures
    assert figures["offered"] == len(result["selected"]) + len(result["dropped"])
    reasons = {row["rollout_id"]: (row["reason"], row["detail"]) for row in result["dropped"].to_pylist()}
    return result["selected"]["rollout_id"].to_pylist(), reasons


def test_runs_that_two_rollout_sets_import_are_refused():
    with pytest.raises(BadData, match="'s' and 'also'"):
        chosen(ALL, {"id": "a"}, {"id": "b"}, {"id": "b", "rollout_set": "also"})


def test_rows_without_a_task_in_files_of_one_name_are_not_samples_of_one_task():
    place = {"task_id": "runs.jsonl, row 0", "source": "runs.jsonl#0"}
    selected, _ = chosen(
        SHORTEST, {"id": "a", "rollout_set": "may", **place}, {"id": "b", "rollout_set": "june", **place}
    )
    assert selected == ["a", "b"]


def test_shortest_correct_compares_tokens_then_turns_then_sample():
    rows = [
        {"id": "long", "output_tokens": 120, "turns": 2, "sample": 0},
        {"id": "turns", "output_tokens": 90, "turns": 9, "sample": 1},
        {"id": "late", "output_tokens": 90, "turns": 8, "sample": 3},
        {"id": "best", "output_tokens": 90, "turns": 8, "sample": 2},
        {"id": "wrong", "output_tokens": 10, "reward": 0.0, "verdict": "failed_tests"},
        {"id": "other", "task_id": "t2", "output_tokens": 500},
    ]
    for order in (rows, rows[::-1]):
        selected, reasons = chosen(SHORTEST, *order)
        assert sorted(selected) == ["best", "other"]
        assert reasons["late"] == (
            "not_the_shortest",
            "90 tokens in 8 turns (sample 3); 90 tokens in 8 turns (sample 2) was taken",
        )
        assert reasons["wrong"] == ("low_reward", "reward 0 < 1, verdict failed_tests")


@pytest.mark.parametrize(
    ("change", "reason", "detail"),
    [
        ({"infrastructure_error": True, "reward": None, "plan_first": None}, "infrastructure", None),
        ({"repo": "quay"}, "excluded_repo", None),
        ({"reward": 0.5}, "low_reward", None),
        ({"reward": None, "verdict": "unknown"}, "no_reward", None),
        ({"plan_first": False, "plan_first_reason": "agent1: no INBOX"}, "no_plan_first", "agent1: no INBOX"),
        ({"plan_first": False}, "no_plan_first", "not all of its agents"),
        ({"plan_content": None}, "no_plan_content", "not measured"),
        ({"follow_through": 0.5}, "no_follow_through", "0.5 of its agents"),
        ({"plan_content_published": False}, "no_plan_content_published", None),
    ],
)
def test_first_failed_rule_drops_the_rollout(change, reason, detail):
    section = SelectSection(
        min_reward=1.0,
        require=("plan_first", "plan_content", "follow_through", "plan_content_published"),
        shortest_correct=True,
        exclude_repos=("quay",),
    )
    selected, reasons = chosen(section, {"id": "r", **change}, {"id": "good", "task_id": "t2"})
    assert selected == ["good"] and reasons["r"][0] == reason and reasons["r"][1]
    assert detail is None or reasons["r"][1] == detail


def test_min_reward_none_keeps_every_reward_but_shortest_correct_still_requires_one():
    rows = [{"id": "a", "reward": 0.0}, {"id": "b", "reward": None, "sample": 1}, {"id": "c", "sample": 2}]
    assert chosen(ALL, *rows)[0] == ["a", "b", "c"]
    selected, reasons = chosen(SelectSection(min_reward=None, shortest_correct=True), *rows)
    assert selected == ["c"] and reasons["a"][0] == "not_correct"


def test_max_rollouts_takes_one_rollout_per_task_before_a_second():
    rows = [{"id": f"r{t}{s}", "task_id": f"t{t}", "sample": s} for s in (1, 0) for t in (2, 10, 1)]
    section = SelectSection(min_reward=None, require=(), shortest_correct=False, max_rollouts=3)
    selected, reasons = chosen(section, *rows)
    assert selected == ["r20", "r100", "r10"], "one of each task, in order of first appearance"
    assert {reason for reason, _ in reasons.values()} == {"over_max_rollouts"}
    section = section.model_copy(update={"max_rollouts": 4})
    assert chosen(section, *rows)[0] == ["r20", "r21", "r100", "r10"]


def test_rollouts_of_evaluation_and_reinforcement_are_ignored():
    selected, reasons = chosen(SHORTEST, {"id": "eval", "origin": "eval"}, {"id": "rl", "origin": "rl"}, {"id": "set"})
    assert selected == ["set"] and not reasons


def test_tasks_of_two_suites_and_unknown_tasks_are_separate():
    rows = [
        {"id": "a", "suite": "x"},
        {"id": "b", "suite": "y"},
        {"id": "c", "task_id": None},
        {"id": "d", "task_id": None},
    ]
    assert chosen(SHORTEST, *rows)[0] == ["a", "b", "c", "d"]


def test_rollouts_without_ids_are_compared_by_counted_tokens():
    rows = [{"id": "a", "output_tokens": None}, {"id": "b", "output_tokens": None, "sample": 1}]
    assert chosen(SHORTEST, *rows, tokens={"a": 9, "b": 8})[0] == ["b"]
    with pytest.raises(ValueError, match="rollout a "):
        chosen(SHORTEST, *rows)


def test_rollout_without_score_raises():
    rollouts, scores = tables({"id": "a"}, {"id": "b"})
    with pytest.raises(ValueError, match="rollout b .*scored_rollouts"):
        select(rollouts, scores.slice(0, 1), SHORTEST)


def test_selection_reconciles_fails_on_a_missing_rollout_and_on_an_empty_selection():
    rollouts, scores = tables({"id": "a"}, {"id": "b", "reward": 0.0})
    result = select(rollouts, scores, SHORTEST)
    good = counts_reconcile(rollouts, **result)
    assert good.passed and good.figures["reasons"] == {"low_reward": 1}
    lost = counts_reconcile(rollouts, result["selected"], result["dropped"].slice(0, 0))
    assert not lost.passed and "'b'" in lost.message
    twice = pa.concat_tables([result["selected"], result["selected"]])
    assert not counts_reconcile(rollouts, twice, result["dropped"]).passed
    empty = counts_reconcile(rollouts.slice(1), result["selected"].slice(1), result["dropped"])
    assert not empty.passed and empty.figures["selected"] == 0


@pytest.mark.parametrize(
    ("rewards", "passed"),
    [
        ((0.0, 1.0), True),
        ((0.0, 1.0, None), True),
        ((None, None), True),
        ((0.5, 0.75), False),  # none is solved
        ((1.0, 10.0), False),  # another scale
        ((1.0, 1.0), True),
    ],
)
def test_automatic_threshold_fails_where_rewards_have_another_scale(rewards: tuple[float | None, ...], passed: bool):
    rollouts, scores = tables(*({"id": str(n), "reward": reward} for n, reward in enumerate(rewards)))
    section, rule = resolved(SelectSection(), rollouts, scores)
    assert counts_reconcile(rollouts, **select(rollouts, scores, section), rule=rule).passed == passed
    assert resolved(SelectSection(min_reward=0.5), rollouts, scores)[1].problem is None


@pytest.mark.parametrize(
    ("change", "passed"),
    [({}, False), ({"reward": 0.0}, True), ({"infrastructure_error": True}, True), ({"origin": "eval"}, True)],
)
def test_automatic_threshold_fails_if_it_drops_a_whole_rollout_set_without_rewards(change: dict, passed: bool):
    bare = {"id": "b", "rollout_set": "other", "reward": None, **change}
    rollouts, scores = tables({"id": "a"}, {"id": "c", "reward": None}, bare)
    section, rule = resolved(SelectSection(), rollouts, scores)
    outcome = counts_reconcile(rollouts, **select(rollouts, scores, section), rule=rule)
    assert outcome.passed == passed and ("of other has" in outcome.message) == (not passed)
    assert resolved(SelectSection(min_reward=1.0), rollouts, scores)[1].problem is None


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
def test_each_rollout_is_selected_or_dropped_whatever_the_order_of_samples(rows, section, random):
    rows = [{"id": f"r{i}", "sample": i, **row} for i, row in enumerate(rows)]
    selected, reasons = chosen(section, *rows)
    assert len(selected) + len(reasons) == len(rows) and not set(selected) & set(reasons)
    kept_rows = [row for row in rows if row["id"] in selected]
    if section.shortest_correct:
        assert len({row["task_id"] for row in kept_rows}) == len(kept_rows)
        assert all(row["reward"] == 1.0 for row in kept_rows)
    if section.max_rollouts is None:
        shuffled = random.sample(rows, len(rows))
        assert sorted(chosen(section, *shuffled)[0]) == sorted(selected)


def test_rollout_sets_without_a_rollout_fail_with_the_place_of_the_reasons():
    rollouts, scores = tables()
    result = select(rollouts, scores, resolved(SelectSection(), rollouts, scores)[0])
    outcome = counts_reconcile(rollouts, **result)
    assert not outcome.passed and "`quarantined`" in outcome.message


@pytest.mark.parametrize(
    ("trust", "kept"), [("blind", True), ("reversed", True), ("unchallenged", False), (None, False)]
)
def test_min_trust_drops_rollouts_whose_verdict_is_trusted_less(trust, kept):
    selected, reasons = chosen(SelectSection(min_trust="reversed"), {"id": "r", "verdict_trust": trust})
    assert selected == (["r"] if kept else []) and (kept or reasons["r"][0] == "low_trust")
    assert chosen(SelectSection(), {"id": "r", "verdict_trust": trust})[0] == ["r"]


def test_named_rollouts_are_left_out_after_the_other_rules():
    section = SelectSection(min_reward=1.0, shortest_correct=True, exclude_rollouts=("short", "nobody"))
    tables_ = tables({"id": "short", "output_tokens": 10}, {"id": "long"}, {"id": "other", "task_id": "t2"})
    result = select(*tables_, section)
    assert result["selected"]["rollout_id"].to_pylist() == ["other"], "no other rollout takes its place"
    reasons = dict(zip(*(result["dropped"][name].to_pylist() for name in ("rollout_id", "reason")), strict=True))
    assert reasons == {"short": "excluded_rollout", "long": "not_the_shortest"}
