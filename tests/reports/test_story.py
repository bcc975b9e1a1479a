"""What a report says happened: the words of the rules, the order of sentences, and what is called held out."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import fields, replace

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from etpi_assets.reports import answer, changes, facts, story
from etpi_assets.reports.changes import Change
from etpi_assets.reports.facts import run_query
from etpi_assets.reports.html import failure_kinds
from etpi_assets.scoring.intervals import paired_difference
from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_resources.lake.schemas import empty, from_rows

CHANGE = Change("solved", "greedy", "base", "sft", 24, 0.5, 0.5, 0.0, -0.1, 0.1, 3, 3, 1.0)


def change(**values: object) -> Change:
    return replace(CHANGE, **values)  # type: ignore[arg-type]


FELL = change(value_after=0.2, difference=-0.3, ci_low=-0.5, ci_high=-0.1, higher=0, lower=8, sign_p=0.008)
IMPROVED = change(value_after=0.8, difference=0.3, ci_low=0.1, ci_high=0.5, higher=8, lower=0, sign_p=0.008)
LOWER = change(value_before=0.96, value_after=0.88, difference=-0.08, ci_low=-0.2, ci_high=0.03, higher=0, lower=2)
SAME = change(higher=0, lower=0)


@pytest.mark.parametrize(
    ("measured", "word", "tone"),
    [
        (SAME, "same", ""),
        (IMPROVED, "improved", "good"),
        (FELL, "fell", "bad"),
        (LOWER, "lower", "bad"),
        (change(difference=0.1), "higher", ""),
        (CHANGE, "even", ""),
        # Two pairs that both improve have an interval without width; the sign test says how little that is.
        (replace(IMPROVED, tasks=2, ci_low=0.3, ci_high=0.3, higher=2, sign_p=0.5), "higher", ""),
        (replace(FELL, tasks=2, ci_low=-0.3, ci_high=-0.3, lower=2, sign_p=0.5), "lower", "bad"),
        # Many small rises against few large falls: the sign test alone does not decide.
        (replace(IMPROVED, ci_low=-0.1), "higher", ""),
    ],
)
def test_rules(measured: Change, word: str, tone: str) -> None:
    assert (measured.word, measured.tone) == (word, tone)
    assert measured.undecided == (word in ("lower", "higher", "even"))


def test_every_rule_has_a_case_and_a_condition_in_words() -> None:
    words = [rule.word for rule in changes.RULES]
    assert words == ["same", "improved", "fell", "lower", "higher", "even"] and len(set(words)) == len(words)
    assert all(rule.condition for rule in changes.RULES)


def of(measured: Change, metric: str, decoding: str = "greedy") -> Change:
    return replace(measured, metric=metric, decoding=decoding)


WHY = "0 of 48 rollouts passed; 48 ended as `no_patch`."


@pytest.mark.parametrize(
    ("compared", "main", "tone", "first"),
    [
        ([IMPROVED, of(FELL, "parsed")], "solved", "good", "`solved` rose from 50 % to 80 %"),
        ([SAME, of(IMPROVED, "plan_first")], "solved", "", "`solved` is 50 % under greedy, the same on each"),
        ([LOWER, of(IMPROVED, "plan_first")], "solved", "bad", "`solved` fell from"),
        ([SAME, of(IMPROVED, "plan_first")], "plan_first", "good", "`plan_first` rose from"),
        ([of(IMPROVED, "plan_first")], "solved", "", "`solved` was not measured"),
    ],
)
def test_first_sentence_and_colour_are_of_the_main_metric(
    compared: list[Change], main: str, tone: str, first: str
) -> None:
    (_, said), (_, why), *beside = story.compared("heldout", compared, main, WHY)
    assert said.startswith(first) and why == WHY
    assert changes.tone_of(changes.summary(compared, main)[0]) == tone
    assert {of_beside for of_beside, _ in beside} <= {"", "bad"}, "what is beside the main metric is no success"


def test_both_decodings_are_said_and_drops_come_before_gains() -> None:
    compared = [
        LOWER,
        of(SAME, "solved", "t1"),
        of(IMPROVED, "plan_first"),
        of(FELL, "submitted"),
        of(CHANGE, "parsed"),
    ]
    said = story.compared("heldout", compared, "solved", WHY)
    assert [tone for tone, _ in said] == ["bad", "", "", "bad", ""]
    assert "`solved` fell from 96 % to 88 % (-8 points [-20, +3], 24 tasks) under greedy; not significant" in said[0][1]
    assert "the same on each of 24 tasks" in said[1][1]
    assert said[3][1].startswith("Fell: `submitted` 50 % to 20 % (-30 points")
    assert said[4][1].startswith("Improved: `plan_first`")
    assert "parsed" not in " ".join(text for _, text in said), "neither decided nor lower"


@pytest.mark.parametrize("names", [(), ("skip_rate",), ("skip_rate", "turns_lost")])
def test_every_override_is_said_with_its_reason(names: tuple[str, ...]) -> None:
    passed = {"name": "label_tokens", "passed": True, "blocking": True}
    checks = [
        passed | {"name": n, "blocking": False, "overridden": {"reason": f"why {n}", "passed": False}} for n in names
    ]
    tables = facts.ReportTables(**{field.name: empty(field.metadata["table"]) for field in fields(facts.ReportTables)})
    said = story.sentences("heldout", "solved", WHY, tables, [], [], [], [passed, *checks])
    assert [text for _, text in said if "overridden" in text] == [
        f"`{n}` failed and is overridden: why {n}" for n in names
    ]


def test_significant_changes_of_solved_are_called_so() -> None:
    for measured, verb in ((FELL, "fell"), (IMPROVED, "rose")):
        text = story.compared("heldout", [measured], "solved", WHY)[0][1]
        assert f"`solved` {verb} from" in text and "; significant (sign test p = 0.008" in text


def test_most_frequent_failure_has_its_reason_in_words() -> None:
    teacher = Counter(no_patch=300, passed=100)
    said = answer.why("sft", Counter(no_patch=40, failed_tests=8), teacher)
    assert said.startswith(
        "0 of 48 rollouts of the fine-tuned checkpoint (sft) passed; 40 ended as `no_patch`: no agent"
    )
    assert said.endswith(", as did 300 of the teacher's 400.")
    for counted, how in (
        (Counter(no_patch=2), "never"),
        (Counter(passed=2), "always"),
        (Counter(no_patch=2, passed=1), ""),
    ):
        assert (f"{how} solved" in answer.why("base", counted, {})) is bool(how)
    assert answer.why("rl", Counter(passed=3), teacher).endswith(
        "3 of 3 rollouts of the reinforced checkpoint (rl) passed."
    )


def test_infrastructure_errors_are_counted_apart() -> None:
    said = answer.why("sft", Counter(infrastructure=9, no_patch=4, passed=3), Counter(infrastructure=5, no_patch=2))
    assert said.startswith("3 of 7 rollouts of") and "; 4 ended as `no_patch`" in said
    assert ", as did 2 of the teacher's 2. 9 more ended as `infrastructure`: " in said
    assert answer.dominant(Counter(infrastructure=9, passed=3)) is None


@pytest.mark.parametrize(("rewards", "task", "verdicts"), [
    ({"a": (0.0, 0.0), "b": (0.0, 1.0), "c": (0.0, 1.0)}, "b", ["failed_tests", "passed"]),
    ({"a": (1.0, 1.0), "b": (0.0, 0.0), "c": (1.0, 0.0)}, "b", ["failed_tests", "failed_tests"]),
])  # fmt: skip
def test_example_shows_a_gained_task_or_the_most_frequent_failure(rewards, task, verdicts) -> None:
    tables = evaluated({(role, t): [pair[n]] for t, pair in rewards.items() for n, role in enumerate(("base", "sft"))})
    actions = '[{"kind": "bash", "command": "ls\\n-a"}]'
    turns = [{"rollout_id": f"sft-{task}-0", "agent_id": "a", "turn": n, "actions": actions} for n in range(9)]
    shown = answer.example("e", *tables[:2], from_rows("turns", turns))
    assert shown and (shown["task_id"], [a["verdict"] for a in shown["attempts"]]) == (task, verdicts)
    assert [a["steps"] for a in shown["attempts"]] == [[], ["a: ls -a"] * answer.MOST_STEPS]
    alone = [table.filter(pc.not_equal(tables[0]["checkpoint_role"], "base")) for table in tables[:2]]
    assert answer.example("e", *alone, from_rows("turns", turns)) is None


def test_first_and_last_checkpoint_are_compared() -> None:
    three = [replace(CHANGE, before=a, after=b) for a, b in (("base", "sft"), ("base", "rl"), ("sft", "rl"))]
    assert changes.roles(three) == ("base", "rl") and changes.roles([]) is None
    assert changes.between(three, "sft", "rl") == [three[2]]
    assert changes.roles(three[2:]) == ("sft", "rl")


def test_tasks_of_another_split_are_not_called_held_out() -> None:
    assert story.results_title("heldout", True) == "Held-out results"
    assert (
        "not held out" in story.results_title("train", True)
        and story.results_title("heldout", False) == "Not evaluated"
    )
    assert any(
        "none of its figures is held out" in text for _, text in story.compared("train", [IMPROVED], "solved", WHY)
    )


# --- figures -------------------------------------------------------------------------------------------------------


def evaluated(values: dict[tuple[str, str], list[float | None]]) -> tuple[pa.Table, pa.Table, pa.Table]:
    """Rollouts, scores and agent scores with the rewards of (role, task); None is an infrastructure error."""
    rollouts, scores, agents = [], [], []
    for (role, task), rewards in values.items():
        for sample, reward in enumerate(rewards):
            key = {"rollout_id": f"{role}-{task}-{sample}", "task_id": task}
            rollouts.append(
                key | {"checkpoint_role": role, "decoding": "greedy", "sample": sample, "exit_status": "Submitted"}
            )
            scores.append(
                key
                | {"reward": reward, "verdict": "passed" if reward == 1 else "failed_tests", "follow_through": 0.5}
                | {"infrastructure_error": reward is None, "plan_first": role == "sft"}
            )
            for agent, rate in (("a", 1.0), ("b", 0.5 if role == "base" else 1.0)):
                agent_row = {"agent_id": agent, "parse_rate": rate, "turns": 2, "exit_status": "Submitted"}
                agents.append({"rollout_id": key["rollout_id"]} | agent_row)
    return from_rows("rollouts", rollouts), from_rows("scores", scores), from_rows("agent_scores", agents)


def test_changes_are_paired_by_task_and_pooled_over_rollouts() -> None:
    tables = evaluated(
        {
            ("base", "a"): [1.0, 1.0], ("sft", "a"): [1.0, 0.0], ("base", "b"): [0.0], ("sft", "b"): [1.0],
            ("base", "c"): [1.0, None], ("sft", "c"): [1.0], ("base", "only"): [1.0],
        }
    )  # fmt: skip
    by_metric = {
        c.metric: c for c in changes.changes(*tables, ["solved", "plan_first", "parsed", "parse_rate", "called"])
    }
    solved = by_metric["solved"]
    assert (solved.before, solved.after, solved.tasks, solved.higher, solved.lower) == ("base", "sft", 3, 1, 1)
    assert (solved.value_before, solved.value_after) == pytest.approx((3 / 4, 3 / 4)), "of the tasks of both"
    expected = paired_difference([(1, 2), (1, 1), (1, 1)], [(2, 2), (0, 1), (1, 1)])
    assert (solved.difference, solved.ci_low, solved.ci_high) == (expected.value, expected.ci_low, expected.ci_high)
    assert by_metric["plan_first"].sign_p == pytest.approx(2 * 0.5**3), "3 of 3 tasks rose"
    assert (by_metric["parsed"].value_before, by_metric["parsed"].value_after) == (0.0, 1.0)
    assert (by_metric["parse_rate"].value_before, "called" in by_metric) == (0.75, False), "no tool was offered"


@pytest.mark.parametrize(("higher", "lower"), [(0, 0), (0, 2), (5, 1), (8, 0), (14, 1), (40, 25)])
def test_sign_test_is_exact(higher: int, lower: int) -> None:
    tasks = {f"{n}": (1.0, 0.0) if n < lower else (0.0, 1.0) for n in range(higher + lower)} | {"tie": (1.0, 1.0)}
    tables = evaluated(
        {(role, task): [pair[place]] for task, pair in tasks.items() for place, role in enumerate(("base", "sft"))}
    )
    (solved,) = changes.changes(*tables, ["solved"])
    n = higher + lower
    tail = sum(math.comb(n, k) for k in range(min(higher, lower) + 1)) / 2**n
    assert (solved.higher, solved.lower) == (higher, lower) and solved.sign_p == pytest.approx(min(1, 2 * tail))


def test_failures_are_counted_by_kind_and_link_to_their_rollouts() -> None:
    rollouts, scores, _ = evaluated({("sft", "a&b"): [0.0, 0.0, 1.0], ("sft", "c"): [None], ("base", "c"): [0.0]})
    rows = run_query("reports/failures.sql", {"rollouts": rollouts, "scores": scores}, {})
    first, second, third = failure_kinds(rows, rollouts, "my exp")
    assert [first[name] for name in ("role", "verdict", "count", "of")] == ["sft", "failed_tests", 2, 4]
    assert (second["verdict"], second["count"], third["role"]) == ("infrastructure", 1, "base")
    assert first["link"].endswith(
        "/rollouts?made_for=my+exp&origin=eval&role=sft&decoding=greedy&verdict=failed_tests&exit=Submitted"
    )


def test_training_figures_are_drawn_where_they_were_recorded() -> None:
    sft = [
        {"role": "sft", "seed": 0, "step": s, "loss": 1.0, "token_accuracy": 0.5, "learning_rate": 1e-3}
        for s in range(900)
    ]
    panels = dict(facts.training_curves(from_rows("training_log", sft), "sft"))
    assert list(panels) == ["Loss", "Token accuracy", "Learning rate"]
    ((name, points),) = panels["Loss"]
    assert name == "train" and points[-1] == (899, 1.0) and len(points) <= facts.MOST_POINTS + 1
    rl = [{"role": "rl", "seed": 0, "step": s, "reward": 0.1, "entropy": 2.0, "parsed": 1.0} for s in range(3)]
    assert [title for title, _ in facts.training_curves(from_rows("training_log", rl), "rl")] == [
        "Rollouts of reinforcement", "Reward", "Entropy, nats",
    ]  # fmt: skip
    assert facts.thinned([]) == []


# --- data card -----------------------------------------------------------------------------------------


def test_data_card_counts_each_source_and_its_licence() -> None:
    imported = RolloutSetSpec(title="t", kind="imported", path="x", license="mit")
    selected = [
        {"rollout_id": r, "rollout_set": s, "teacher": t}
        for r, s, t in (("r1", "one", "m"), ("r2", "one", None), ("r3", "two", "k"))
    ]
    rows = [
        {"rollout_id": r, "split": split, "output_tokens": 5, "weight": 2.0, "copies": 1, "repo": "h", "pair_id": r}
        for r, split in (("r1", "train"), ("r1", "train"), ("r2", "val"), ("r3", "train"))
    ]
    tasks = [{"split": "train", "payload": '{"license": "bsd"}'}, {"split": "heldout", "payload": '{"license": "x"}'}]
    one, two, lacking = facts.sources(
        ["one", "two", "gone"], {"one": imported, "two": imported.model_copy(update={"license": ""})},
        from_rows("tasks", tasks), from_rows("selected", selected), from_rows("dataset_rows", rows),
    )  # fmt: skip
    figures = {"teachers": "m, unknown", "rollouts": 1, "turns": 2, "tokens": 10}
    assert one == {"name": "one", "kind": "imported", "suite": "–", "licence": "mit", **figures}
    assert (two["licence"], lacking["kind"]) == ("bsd (1 tasks)", "unknown")
    assert (lacking["teachers"], lacking["rollouts"]) == ("–", 0)
    train, val = facts.split(from_rows("dataset_rows", rows))
    assert (train["split"], train["rollouts"], train["weighted_tokens"], val["rows"]) == (
        "train", 2, 30.0, 1,
    )  # fmt: skip
    assert facts.split(empty("dataset_rows")) == []
