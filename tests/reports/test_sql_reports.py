"""Every query of sql/reports returns rows on a lake with data, and runs on an empty one."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from etpi_assets.curation.upweight import loss_by_turn, shares
from etpi_assets.graph import GRAPH
from etpi_resources.lake import catalog
from etpi_resources.lake.lake import Lake
from tests.support import small_lake

REPORTS = {file.stem: file for file in sorted((catalog.sql_folder() / "reports").glob("*.sql"))}


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lake = small_lake.make(tmp_path_factory.mktemp("full") / "data")
    return catalog.build(lake, GRAPH.values(), vocabularies={"tiny": [f"<{number}>" for number in range(50)]})


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return catalog.build(Lake(tmp_path_factory.mktemp("bare") / "data"), GRAPH.values())


def ask(path: Path, report: str, **variables: object) -> list[dict]:
    """Run a report as `.read` does: the file as it is, after SET VARIABLE."""
    with catalog.connect(path) as db:
        for name, value in variables.items():
            db.execute(f"SET VARIABLE {name} = $value", {"value": value})
        return db.execute(REPORTS[report].read_text()).to_arrow_table().to_pylist()


@pytest.mark.parametrize("report", REPORTS)
def test_sql_report_begins_with_a_question_and_runs(report: str, full: Path, bare: Path) -> None:
    text = REPORTS[report].read_text()
    assert text.startswith("-- ") and "?" in text.splitlines()[0]
    sources = re.findall(r"\b(?:FROM|JOIN)\s+(\w+(?:\.\w+)?)", text)
    assert sources and not any("." in source for source in sources), "a user must be able to write it, on views alone"
    assert ask(full, report), "every query has rows on the small lake"
    assert ask(bare, report) == []


def test_turns_behind_a_checkpoint(full: Path) -> None:
    rows = ask(full, "turns_behind_a_checkpoint", checkpoint="sft1")
    assert len(rows) == 5 and {row["rollout_id"] for row in rows} == {"r1"}
    assert {row["instruction"] for row in rows} == {"fold the lantern"}
    assert {row["turn"]: row["total_weight"] for row in rows} == {0: 12.0, 1: 1.0, 2: 1.0}
    assert {row["sampler"] for row in rows} == {'{"temperature": 0.7}'}


def test_turns_behind_a_checkpoint_come_in_pages(full: Path) -> None:
    rows = ask(full, "turns_behind_a_checkpoint", checkpoint="rl1")
    pages = [ask(full, "turns_behind_a_checkpoint", checkpoint="rl1", page=n, page_rows=7) for n in range(4)]
    assert [len(page) for page in pages] == [7, 7, 3, 0]
    assert [row for page in pages for row in page] == rows


def test_turns_behind_a_reinforced_checkpoint(full: Path) -> None:
    """The rows are its own attempts, weighted by their advantage, and the training rows of its parent."""
    rows = ask(full, "turns_behind_a_checkpoint", checkpoint="rl1")
    own = [row for row in rows if row["via_checkpoint_id"] == "rl1"]
    assert {(row["rollout_id"], row["total_weight"]) for row in own} == {("s-0", 0.7), ("s-1", -0.7)} and len(own) == 12
    assert {(row["instruction"], json.loads(row["sampler"])["temperature"]) for row in own} == {("fold the lantern", 1)}
    assert {row["rollout_id"] for row in rows} == {"s-0", "s-1", "r1"}


def test_why_was_a_rollout_dropped(full: Path) -> None:
    rows = ask(full, "why_was_a_rollout_dropped", rollout="r2")
    fates = {(row["experiment"], row["fate"], row["stage"], row["reason"]) for row in rows}
    assert ("strong", "dropped", "selection", "reward_below_minimum") in fates
    assert ("follow_up", "taken", "selection", "shortest_correct") in fates
    assert {row["plan_first_reason"] for row in rows} == {"ls before the first message"}
    assert {row["turn"] for row in ask(full, "why_was_a_rollout_dropped", rollout="r1")} == {None, 3}


def test_a_dropped_rollout_is_shown_with_the_scores_of_its_own_set(full: Path, tmp_path: Path) -> None:
    lake = small_lake.make(tmp_path / "data")
    small_lake.put(lake, "scored_rollouts", "weak_set", {"scores": [small_lake.score("r2", 1.0, True)]})
    path = catalog.build(lake, GRAPH.values())
    again = ask(path, "why_was_a_rollout_dropped", rollout="r2")
    assert again == ask(full, "why_was_a_rollout_dropped", rollout="r2")


def test_think_tokens_by_turn(full: Path) -> None:
    rows = ask(full, "think_tokens_by_turn", rollout_set="strong_set")
    assert [(row["turn"], row["n"], row["think_mean"]) for row in rows] == [(0, 4, 2.5), (1, 4, 1.5), (2, 4, 0.5)]
    assert {row["made_for"] for row in ask(full, "think_tokens_by_turn", experiment="strong")} == {"strong"}


def test_solved_by_depth(full: Path) -> None:
    rows = [row for row in ask(full, "solved_by_depth") if row["checkpoint_role"] == "rl"]
    assert [(row["k"], row["n"], row["right_up_to_k"], row["solved"]) for row in rows] == [(3, 1, 0.0, 0.0)]


def test_structured_cot(full: Path) -> None:
    rows = ask(full, "structured_cot", rollout_set="strong_set")
    assert [(row["turn"], row["n"], row["adherence"]) for row in rows] == [(0, 4, 1.0), (1, 4, 0.5), (2, 4, 0.5)]
    assert [(row["think_mean"], row["after_mean"]) for row in rows] == [(20.0, 30.0), (19.0, 31.0), (18.0, 32.0)]
    assert ask(full, "structured_cot", experiment="strong") == []


def test_teacher_against_student(full: Path) -> None:
    (row,) = ask(full, "teacher_against_student", experiment="strong", metric="plan_first")
    assert row["teacher"] == "0.950 [0.850, 1.000] n=24" and row["sft"] == "0.900 [0.800, 0.950] n=24"
    assert row["student_minus_teacher"] == pytest.approx(-0.05)


def test_a_reinforced_student_that_fell_is_compared_with_its_teacher(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "data")
    figures = (("teacher", 0.95), ("sft", 0.9), ("rl", 0.5))
    metrics = [small_lake.metric("e", role, "solved", value) for role, value in figures]
    small_lake.put(lake, "eval_metrics", "e", {"metrics": metrics})
    (row,) = ask(catalog.build(lake, GRAPH.values()), "teacher_against_student")
    assert row["student_minus_teacher"] == pytest.approx(-0.45)


def test_what_a_rollout_taints(full: Path) -> None:
    rows = ask(full, "what_a_rollout_taints", rollout="r1")
    assert {(row["experiment"], row["checkpoint_id"]) for row in rows} == {
        ("strong", "sft1"),
        ("strong", "sft1-100"),
        ("follow_up", "sft2"),
        ("reinforced", "rl1"),
    }
    assert ask(full, "what_a_rollout_taints", rollout="r2") == []
    (attempt,) = ask(full, "what_a_rollout_taints", rollout="s-0")
    assert attempt["share_of_loss"] == 0.5, "the advantages of the two attempts add up to 0"


def test_exits_by_rollout_set(full: Path) -> None:
    exits = {
        (row["made_for"], row["model"]): (row["exit_status"], row["share"]) for row in ask(full, "exits_by_rollout_set")
    }
    assert exits["weak_set", "weak"] == ("LimitsExceeded", 1.0) and exits["strong", "sft"] == ("Submitted", 1.0)


def test_drift_by_rollout_set(full: Path, tmp_path: Path) -> None:
    (kept,) = ask(full, "drift_by_rollout_set", rollout_set="strong_set")
    assert (kept["turns"], kept["later_turns"], kept["extend_the_last"], kept["with_drift"]) == (12, 8, 8, 0)
    conversation = small_lake.conversation("r1")
    for turn in conversation["turns"][1:3]:  # the server removed a thought, which breaks the prefix
        drift = {"drift_at": 2, "drift": json.dumps({"expected_text": "<think>", "found_text": "ls"})}
        turn |= {"prefix_turn": None, "prompt_tokens": 8, **drift}
    conversation["turns"][4] |= {"output_ids": None, "output_tokens": None}
    lake = Lake(tmp_path / "data")
    small_lake.put(
        lake, "raw_rollouts", "chat", {"rollouts": [small_lake.rollout("r1", "t", rollout_set="chat")], **conversation}
    )
    (drifted,) = ask(catalog.build(lake, GRAPH.values()), "drift_by_rollout_set")
    assert (drifted["without_ids"], drifted["extend_the_last"], drifted["with_drift"]) == (1, 2, 2)
    assert (drifted["kept_median"], drifted["generated"], drifted["rendered"]) == (0.25, "<think>", "ls")


def test_loss_share_by_turn(full: Path) -> None:
    reported = {row["turn"]: row["share_of_loss"] for row in ask(full, "loss_share_by_turn", experiment="strong")}
    assert reported == pytest.approx({0: 24 / 27, 1: 2 / 27, 2: 1 / 27})
    with catalog.connect(full) as db:
        rows = db.execute("SELECT * FROM dataset_rows WHERE experiment = 'strong'").to_arrow_table()
    assert reported == pytest.approx(shares(loss_by_turn(rows))), "the data set's own figures"


def test_failed_checks(full: Path) -> None:
    (row,) = ask(full, "failed_checks")
    assert (row["key"], row["state"], row["check_name"]) == ("blocked", "blocked", "teacher_gate")


def test_cost_by_experiment(full: Path) -> None:
    costs = {row["experiment"]: row for row in ask(full, "cost_by_experiment")}
    strong = costs["strong"]
    assert (strong["rollouts"], strong["rollout_seconds"], strong["rollout_output_tokens"]) == (2, 5.0, 36)
    assert (strong["training_rows"], strong["label_tokens"], strong["training_seconds"]) == (5, 15, 12.0)
    assert (strong["eval_rollouts"], costs["follow_up"]["eval_rollouts"]) == (2, None)


def test_steps_to_learn(full: Path) -> None:
    (row,) = ask(full, "steps_to_learn")
    assert (row["experiment"], row["probe"], row["checkpoints"]) == ("strong", "first_turn_message", 2)
    assert (row["learnt_at_step"], row["value_at_the_end"]) == (200, 1.0)


def test_tokens_of_a_turn(full: Path) -> None:
    rows = ask(full, "tokens_of_a_turn", rollout="r1", agent="agent2", turn=1)
    assert "".join(row["text"] for row in rows) == "<10><11><12><20><30><40><1><2><21><30><40>"
    assert [row["side"] for row in rows].count("output") == 3
    assert [row["logprob"] for row in rows][-3:] == pytest.approx([-0.1, -0.2, -0.3])
    assert {row[name] for row in rows for name in ("policy_logprob", "entropy", "ratio")} == {None}


def test_tokens_of_a_turn_that_reinforcement_trained_on(full: Path) -> None:
    rows = ask(full, "tokens_of_a_turn", rollout="s-0", agent="agent2", turn=1)
    prompt, output = rows[:-3], rows[-3:]
    assert {row["side"] for row in prompt} == {"prompt"} and {row["policy_logprob"] for row in prompt} == {None}
    assert [row["policy_logprob"] for row in output] == pytest.approx([-0.12, -0.13, -0.14]), "after four turns"
    assert [row["entropy"] for row in output] == pytest.approx([1.2, 1.3, 1.4])
    ratios = [math.exp(row["policy_logprob"] - row["logprob"]) for row in output]
    assert [row["ratio"] for row in output] == pytest.approx(ratios) and ratios[2] > 1.15
    rows = ask(full, "tokens_of_a_turn", rollout="s-1", agent="agent1", turn=0)
    assert [row["token_id"] for row in rows if row["side"] == "output"] == [20, 30, 40]
    assert {row["ratio"] for row in rows} == {None}


def test_changed_by_reinforcement(full: Path) -> None:
    [row] = ask(full, "changed_by_reinforcement")
    assert (row["experiment"], row["task_id"], row["instruction"]) == ("reinforced", "t1", "fold the lantern")
    assert row["newly_parsed"] and row["newly_solved"] and not row["parse_lost"] and not row["newly_lost"]
    assert ask(full, "changed_by_reinforcement", experiment="strong") == []


def test_a_task_of_two_suites_changed_once_and_an_agent_without_turns_did_not_parse(tmp_path: Path) -> None:
    lake = small_lake.make(tmp_path / "data")
    task = {"task_id": "t1", "suite": "other", "repo": "harbor", "split": "train", "instruction": "another"}
    small_lake.put(lake, "tasks", "other", {"tasks": [task]})
    crashed = small_lake.agent_scores("f-sft", True)
    crashed[0] |= {"turns": 0, "parse_rate": None}
    scores = [small_lake.score(name, 1.0, True) for name in ("f-sft", "f-rl")]
    agents = crashed + small_lake.agent_scores("f-rl", True)
    small_lake.put(lake, "eval_metrics", "reinforced", {"scores": scores, "agent_scores": agents})
    (row,) = ask(catalog.build(lake, GRAPH.values()), "changed_by_reinforcement")
    assert (row["instruction"], row["newly_parsed"], row["newly_solved"]) == ("fold the lantern", True, False)


def test_pass_at_k(full: Path) -> None:
    rows = {row["made_for"]: row for row in ask(full, "pass_at_k") if row["origin"] == "set"}
    strong = rows["strong_set"]
    assert (strong["k"], strong["tasks"], strong["rollouts"]) == (2, 1, 2)
    assert (strong["pass_at_1"], strong["pass_at_k"]) == pytest.approx((0.5, 1.0))
    assert {row["made_for"] for row in ask(full, "pass_at_k", experiment="strong")} == {"strong"}


def test_solved_paired(full: Path) -> None:
    [row] = [row for row in ask(full, "solved_paired") if row["experiment"] == "reinforced"]
    assert (row["before"], row["after"], row["tasks"]) == ("sft", "rl", 1)
    assert (row["difference"], row["think_ratio"]) == (1.0, 1.0)
    assert -1 <= row["ci_low"] < 0 < row["ci_high"] <= 1, "one task says little of others"


def test_regressions_and_gains(full: Path, tmp_path: Path) -> None:
    (row,) = ask(full, "regressions", experiment="reinforced")
    assert (row["before"], row["after"], row["change"], row["task_id"]) == ("sft", "rl", "gained", "t1")
    assert (row["solved_before"], row["solved_after"], row["instruction"]) == (0.0, 1.0, "fold the lantern")
    assert (row["rollout_before"], row["rollout_after"]) == ("f-sft", "f-rl")
    lake = Lake(tmp_path / "data")
    rewards = {
        ("base", "lost"): [1, 1], ("sft", "lost"): [0, 0], ("base", "half"): [1, 1], ("sft", "half"): [1, 0],
        ("base", "won"): [0], ("sft", "won"): [1], ("base", "same"): [1], ("sft", "same"): [1], ("sft", "new"): [0],
    }  # fmt: skip
    rollouts, scores = [], []
    for (role, task), values in rewards.items():
        for sample, value in enumerate(values):
            name = f"{role}-{task}-{sample}"
            about = {"checkpoint_role": role, "task_id": task, "decoding": "greedy", "sample": sample}
            rollouts.append(small_lake.rollout(name, role, origin="eval", experiment="e", **about))
            scores.append(small_lake.score(name, value, True))
    rollouts.append(small_lake.rollout("x", "sft", origin="eval", checkpoint_role="sft", task_id="same"))
    scores.append(small_lake.score("x", 0.0, True) | {"infrastructure_error": True, "reward": None})
    small_lake.put(lake, "eval_rollouts", "e", {"rollouts": rollouts})
    small_lake.put(lake, "eval_metrics", "e", {"scores": scores})
    path = catalog.build(lake, GRAPH.values())
    changes = [
        (row["task_id"], row["change"], row["solved_after"], row["rollout_before"], row["rollout_after"])
        for row in ask(path, "regressions")
    ]
    assert changes == [
        ("lost", "lost", 0.0, "base-lost-0", "sft-lost-0"),
        ("half", "lost", 0.5, "base-half-0", "sft-half-1"),
        ("won", "gained", 1.0, "base-won-0", "sft-won-0"),
    ]
    assert ask(path, "regressions", decoding="t1") == []
    failures = ask(path, "failures")
    assert [row["rollout_id"] for row in failures if row["infrastructure"]] == ["x"]
    assert len(failures) == 6 and {row["checkpoint_role"] for row in failures[:5]} == {"sft"}


def test_failures_have_the_judges_reason(tmp_path: Path) -> None:
    details = {
        "features": {"features": {"f1": True, "f2": False}}, "why": {"why": "not equal"}, "wrong": {"wrong": ["t_a"]},
        "none": {"depth": 3},
    }  # fmt: skip
    lake = Lake(tmp_path / "data")
    rollouts = [
        small_lake.rollout(
            name, "sft", origin="eval", checkpoint_role="sft", task_id=name,
            outcome=json.dumps({"reward": 0.0, "verdict": "failed_tests", "details": detail}),
        )
        for name, detail in details.items()
    ]  # fmt: skip
    rollouts[-1] |= {"outcome": None}
    small_lake.put(lake, "eval_rollouts", "e", {"rollouts": rollouts})
    small_lake.put(lake, "eval_metrics", "e", {"scores": [small_lake.score(name, 0.0, True) for name in details]})
    rows = ask(catalog.build(lake, GRAPH.values()), "failures", experiment="e")
    reasons = {row["task_id"]: row["reason"] for row in rows}
    assert reasons == {"features": "failed: f2", "why": "not equal", "wrong": 'wrong: ["t_a"]', "none": None}


def test_transcript_puts_agents_on_one_clock(tmp_path: Path) -> None:
    """A message without a time has that of the message before it; without any, agents alternate by turn."""

    def message(agent: str, index: int, turn: int | None, second: int | None, role: str = "assistant") -> dict:
        at = None if second is None else small_lake.AT.replace(second=second)
        words = {"role": role, "content": f"{agent} {index}", "kind": "action", "at": at}
        return {"rollout_id": "r", "agent_id": agent, "index": index, "turn": turn, **words}

    timed = [
        message("a", 0, None, None, "system"), message("a", 1, 0, 10), message("a", 2, 0, None, "user"),
        message("a", 3, 1, 30), message("b", 0, None, None, "system"), message("b", 1, 0, 35), message("b", 2, 1, 40),
    ]  # fmt: skip
    turn = {"rollout_id": "r", "agent_id": "b", "turn": 1, "actions": '["ls"]', "exit_code": 2, "capture": "none"}
    made = small_lake.rollout("r", "t")
    lake = Lake(tmp_path / "data")
    for name, messages in (("timed", timed), ("untimed", [row | {"at": None} for row in timed])):
        tables = {"rollouts": [made | {"rollout_set": name}], "messages": messages, "turns": [turn]}
        small_lake.put(lake, "raw_rollouts", name, tables)
    path = catalog.build(lake, GRAPH.values())
    rows = ask(path, "transcript", rollout="r", made_for="timed")
    assert [row["content"] for row in rows] == ["a 0", "b 0", "a 1", "a 2", "a 3", "b 1", "b 2"], "a is faster"
    assert [row["clock"].second if row["clock"] else None for row in rows] == [None, None, 10, 10, 30, 35, 40]
    assert (rows[-1]["commands"], rows[-1]["exit_code"], rows[-2]["commands"]) == ('["ls"]', 2, None)
    rows = ask(path, "transcript", rollout="r", made_for="untimed", origin="set")
    assert [row["content"] for row in rows] == ["a 0", "b 0", "a 1", "a 2", "b 1", "a 3", "b 2"]
    assert len(ask(path, "transcript", rollout="r")) == 7, "of one place, though it is recorded in two"
    assert ask(path, "transcript", rollout="r", origin="eval") == []


def test_prompt_as_text(full: Path) -> None:
    captured, trained = ask(full, "prompt_as_text", rollout="r1", agent="agent2", turn=1)
    assert (captured["form"], captured["made_for"], captured["prompt_tokens"]) == ("captured", "strong_set", 8)
    assert captured["prompt"] == "<10><11><12><20><30><40><1><2>" and captured["output"] == "<21><30><40>"
    assert (trained["form"], trained["made_for"]) == ("trained", "strong") and trained["prompt"] == captured["prompt"]
    (of_student,) = ask(full, "prompt_as_text", rollout="e-sft")
    assert (of_student["made_for"], of_student["agent_id"], of_student["turn"]) == ("strong", "agent1", 0)
    assert ask(full, "prompt_as_text", rollout="r1", turn=9) == []


def test_diff_datasets(full: Path, tmp_path: Path) -> None:
    rows = ask(full, "diff_datasets")
    assert {(row["experiment"], row["change"], row["rollout_id"]) for row in rows} == {
        ("follow_up", "removed", "r3"),
        ("follow_up", "added", "r2"),
    }
    assert ask(full, "diff_datasets", experiment="strong") == [], "one version"
    lake = Lake(tmp_path / "data")
    small_lake.put(lake, "upweighted_dataset", "e", small_lake.dataset("r"))
    heavier = small_lake.dataset("r")
    heavier["dataset_rows"][0] |= {"weight": 4.0}
    old = small_lake.put(lake, "upweighted_dataset", "e", {"dataset_rows": heavier["dataset_rows"]}).version
    small_lake.put(lake, "upweighted_dataset", "e", {"dataset_rows": heavier["dataset_rows"][:-1]})
    path = catalog.build(lake, GRAPH.values())
    (gone,) = ask(path, "diff_datasets")
    assert (gone["change"], gone["pair_id"], gone["old_split"]) == ("removed", "r/agent2/2", "val")
    first = small_lake.put(lake, "upweighted_dataset", "e", small_lake.dataset("r")).version
    changes = ask(catalog.build(lake, GRAPH.values()), "diff_datasets", old=old, new=first)
    assert [(row["change"], row["old_weight"], row["new_weight"]) for row in changes] == [("changed", 4.0, 12.0)]
