"""Behaviours of recorded rollouts: each predicate, each reason of failure, and the variations it must ignore."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from etpi_assets.scoring.behaviours import ScoringOptions, score
from etpi_assets.scoring.entities import KnownFiles, Patterns, edited, touched
from etpi_assets.scoring.rewards.verdict import read_reward
from etpi_assets.specs.rollout_set import ScoringSection
from etpi_assets.trajectories.records import Message
from etpi_assets.trajectories.tables import to_tables
from tests.support.rollouts import INSTRUCTION, PLAN, REPLY, agent, planning_pair, prompt, rollout, run, say, tasks

SCORING = ScoringSection()


def score_records(*records, scoring=SCORING, task_table=None, messages=False):
    tables = to_tables(records)
    scored = score(
        tables["rollouts"],
        tables["agents"],
        tables["turns"],
        tasks() if task_table is None else task_table,
        ScoringOptions(scoring),
        tables["messages"] if messages else None,
    )
    return scored["scores"].to_pylist(), scored["agent_scores"].to_pylist()


def score_pair(*agents, **options):
    columns = {k: options.pop(k) for k in ("outcome", "error", "task_id") if k in options}
    scores, rows = score_records(rollout(*agents, **columns), **options)
    return scores[0], rows


def replies(first=None, *rest, mail=None):
    """Return the second agent of a pair, which acknowledges the plan by default."""
    mail = {"agent1": PLAN} if mail is None else mail
    return agent("agent2", [(first or say(REPLY, "agent1"), mail), *rest], role="responder")


def plans(*rest, text=PLAN, mail=None):
    return agent("agent1", [(say(text), {"agent2": REPLY} if mail is None else mail), *rest])


def test_pair_that_plans_and_follows_through_passes_everything():
    scores, rows = score_records(planning_pair())
    assert scores[0]["plan_first"] and scores[0]["plan_content"] and scores[0]["follow_through"] == 1.0
    assert scores[0]["reward"] == 1.0 and scores[0]["verdict"] == "passed" and scores[0]["output_tokens"] == 60
    assert not [key for key in ("plan_first_reason", "plan_content_reason") if scores[0][key]]
    assert json.loads(rows[0]["plan_entities"]) == ["src/harbor/tides.py", "src/harbor/quay.py", "fold_lantern"]
    for name in ("follow_through", "follow_own", "follow_edited", "follow_by_turn_5"):
        assert rows[0][name] and rows[1][name]


# --- plan_first --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (run("ls"), "agent1: first action not send_message"),
        (run(f"ls && send_message agent2 '{PLAN}'".replace("'ll", " will")), "agent1: first action not send_message"),
        (run("send_message agent2 'plan' && ls"), "agent1: first action not a pure send_message"),
        ("I would plan.", "agent1: no readable action"),
    ],
)
def test_plan_first_needs_a_pure_message_as_first_action(first, reason):
    score_row, rows = score_pair(agent("agent1", [(first, {"agent2": REPLY})]), replies())
    assert score_row["plan_first"] is False and score_row["plan_first_reason"] == reason
    assert [row["plan_first"] for row in rows] == [False, True]


def test_unreadable_turn_is_not_an_action():
    waits = agent("agent1", ["hm, let me think", (say(PLAN), {"agent2": REPLY}), run("ls")])
    assert score_pair(waits, replies())[0]["plan_first"]


def test_plan_first_needs_an_inbox_before_bash():
    late = agent("agent1", [say(PLAN), (run("ls"), {"agent2": REPLY})])
    assert score_pair(late, replies())[0]["plan_first_reason"] == "agent1: no INBOX before bash"
    never = agent("agent1", [say(PLAN), say("still there?")])
    assert score_pair(never, replies())[0]["plan_first_reason"] == "agent1: no INBOX"
    own = agent("agent1", [(say(PLAN), {"agent1": PLAN}), run("ls")])
    assert score_pair(own, replies())[0]["plan_first_reason"] == "agent1: no INBOX before bash"
    second_round = agent("agent1", [say(PLAN), (say("well?"), {"agent2": REPLY}), run("ls")])
    assert score_pair(second_round, replies())[0]["plan_first"]


def test_two_calls_in_one_turn_are_two_actions():
    both = say(PLAN) + "\n" + run("ls")
    assert (
        score_pair(agent("agent1", [(both, {"agent2": REPLY})]), replies())[0]["plan_first_reason"]
        == "agent1: no INBOX before bash"
    )


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("You take tides.py, I take ./src/harbor/quay.py.", None),
        ("Fine.", "agent2: acknowledgement names 0 of 2 paths"),
        ("I take src/harbor/quay.py.", "agent2: acknowledgement names 1 of 2 paths"),
        ("I take src/harbor/quay.py and src/harbor/ropes.py.", "agent2: acknowledgement names 1 of 2 paths"),
    ],
)
def test_responder_passes_if_it_acknowledges_both_paths(answer, reason):
    responder = agent("agent2", [("hm", {"agent1": PLAN}), say(answer, "agent1"), run("ls")], role="responder")
    assert score_pair(plans(run("ls")), responder)[0]["plan_first_reason"] == reason


def test_responder_names_the_only_path_of_the_task():
    task = tasks({"instruction": "fold_lantern and moor_skiff in src/harbor/tides.py"})
    responder = agent("agent2", [("hm", {"agent1": "I'll do src/harbor/tides.py"}), say("tides.py: fine", "agent1")])
    assert score_pair(plans(run("ls"), text="I'll do src/harbor/tides.py"), responder, task_table=task)[0]["plan_first"]


def test_message_before_the_first_turn_makes_a_responder():
    responder = agent("agent2", [say("Fine.", "agent1")], role="responder")
    responder.messages = [prompt(INSTRUCTION), Message("user", f"[Message from agent1]: {PLAN}", kind="inbox")]
    score_row, _ = score_pair(plans(), responder, messages=True)
    assert score_row["plan_first_reason"] == "agent2: acknowledgement names 0 of 2 paths"


def test_missing_turns_and_agents_have_a_reason():
    score_row, rows = score_pair(agent("agent1", [], exit_status="LimitsExceeded"), replies())
    assert score_row["plan_first_reason"] == "agent1: missing assistant turns" and not score_row["plan_first"]
    assert score_row["plan_content_reason"] == "agent1: missing assistant turns"
    assert rows[0]["reason"] == "missing assistant turns" and rows[0]["parse_rate"] is None
    assert score_pair()[0]["plan_first_reason"] == "missing agents"


# --- plan_content ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("PLAN: YOU take src/harbor/tides.py", None),
        ("I\u2019ll go first with `fold_lantern`", None),
        ("planning to split src/harbor/tides.py", "keywords 1 of 2"),
        ("plan plan plan src/harbor/tides.py", "keywords 1 of 2"),
        ("you'll see the plan of src/harbor/tides.py", "keywords 1 of 2"),
        ("'plan': 'first' src/harbor/tides.py", None),
        ("first step: src/harbor/ropes.py", "no task entity named"),
        ("first step: `haul_anchor`", "no task entity named"),
        ("hello", "keywords 0 of 2; no task entity named"),
        ("take src/plan/first.py and src/harbor/tides.py", "keywords 0 of 2"),
        ("first step: /workspace/repo/src/harbor/tides.py", None),
        ("first step: ./src/harbor/tides.py:12", None),
        ("first step: tides.py", None),
    ],
)
def test_plan_content_needs_two_keywords_and_a_task_entity(text, reason):
    score_row, _ = score_pair(plans(text=text), replies())
    assert score_row["plan_content_reason"] == (f"agent1: {reason}" if reason else None)
    assert score_row["plan_content"] is (reason is None)


def test_plan_content_accepts_any_turn_and_any_quoting():
    for quoting in ("heredoc", "double", "single"):
        assert score_pair(agent("agent1", [run("ls"), say(PLAN, quoting=quoting)]), replies())[0]["plan_content"]
    assert score_pair(agent("agent1", [run("ls")]), replies())[0]["plan_content_reason"] == "agent1: no message sent"


def test_unknown_task_is_read_from_the_prompt_or_reported():
    first = plans()
    first.messages = [prompt(INSTRUCTION)]
    assert score_pair(first, replies(), task_id="stale", messages=True)[0]["plan_content"]
    reason = score_pair(plans(), replies(), task_id="stale")[0]["plan_content_reason"]
    assert reason.startswith("agent1: the task is unknown")


# --- follow_through ----------------------------------------------------------------------------------------------


def followed(*commands, plan=PLAN, scoring=SCORING, second=REPLY):
    _, rows = score_pair(plans(*map(run, commands), text=plan), replies(say(second, "agent1")), scoring=scoring)
    return rows[0]


@pytest.mark.parametrize(
    ("command", "union", "own", "edit"),
    [
        ("cat src/harbor/tides.py", True, True, False),
        ("cat ./src/harbor/tides.py", True, True, False),
        ("cat /testbed/src/harbor/tides.py", True, True, False),
        ("cd src/harbor && cat tides.py", True, True, False),
        ("cd tests && cat tides.py", False, False, False),
        ("cat src/harbor/quay.py", True, False, False),
        ("cat src/harbor/ropes.py", False, False, False),
        ("grep -rn moor_skiff .", True, False, False),
        ("grep -rn haul_anchor .", False, False, False),
        ("ls", False, False, False),
        ("sed -i 's/1/7/' src/harbor/tides.py", True, True, True),
        ("cat src/harbor/tides.py > /tmp/copy.py", True, True, False),
        ("grep -n moor_skiff . > /tmp/found.txt", True, False, False),
        ("git diff src/harbor/tides.py 2>/dev/null", True, True, False),
        ("cat > src/harbor/quay.py <<'EOF'\nx = 1\nEOF", True, False, True),
    ],
)
def test_follow_through_needs_bash_that_names_an_entity_after_the_plan(command, union, own, edit):
    row = followed(command, plan="Plan: I'll take src/harbor/tides.py")
    assert (row["follow_through"], row["follow_own"], row["follow_edited"]) == (union, own, edit)
    assert (row["reason"] is None) is union
    if not union:
        assert row["reason"].startswith("never touched: ")


def test_paths_inside_a_message_do_not_count_as_follow_through():
    row = followed(
        "send_message agent2 'I cat src/harbor/tides.py now'",
        "echo hi; send_message agent2 <<'M'\nsrc/harbor/tides.py\nM",
    )
    assert not row["follow_through"]


def test_bash_before_the_plan_does_not_count_as_follow_through():
    early = agent("agent1", [run("cat src/harbor/tides.py"), (say(PLAN), {"agent2": REPLY}), run("ls")])
    assert not score_pair(early, replies())[1][0]["follow_through"]
    assert score_pair(agent("agent1", [run("cat src/harbor/tides.py")]), replies())[1][0]["reason"] == "no plan message"
    assert score_pair(plans(), replies())[1][0]["reason"] == "no bash after the plan"
    assert followed("cat src/harbor/tides.py", plan="I'll plan", second="ok")["reason"] == "plan names no entity"


def test_follow_through_respects_window_and_turn_five():
    late = ["ls"] * 5 + ["cat src/harbor/tides.py"]
    row = followed(*late)
    assert row["follow_through"] and not row["follow_by_turn_5"]
    assert followed(*late[1:])["follow_by_turn_5"]
    assert not followed(*late, scoring=replace_window(5))["follow_through"]
    assert followed(*late, scoring=replace_window(6))["follow_through"]


def replace_window(window):
    return ScoringSection.model_validate({"window": window})


def test_word_with_underscore_is_not_a_function_unless_the_task_names_it():
    assert followed("grep stand_by .", plan="I'll stand_by first", second="ok")["reason"] == "plan names no entity"


def test_new_file_counts_though_the_task_does_not_name_it():
    assert followed("touch src/harbor/ropes.py", plan="Plan: I'll add src/harbor/ropes.py")["follow_own"]


@pytest.mark.parametrize(
    ("command", "files"),
    [
        ("sed -i.bak -e 's/x; y/z/' src/a.py", {"src/a.py"}),
        ("sed -n '1,5p' src/a.py", set()),
        ("perl -pi -e 's/a/b/' src/a.py; ls src/b.py", {"src/a.py"}),
        ("echo 'a > src/b.py' >> src/a.py", {"src/a.py"}),
        ("cat src/b.py | tee -a src/a.py", {"src/a.py"}),
        ("cp /tmp/x.py src/a.py && ls src/b.py", {"src/a.py"}),
        ("patch -p1 <<'EOF'\n--- a/src/a.py\n+++ b/src/a.py\nEOF", {"src/a.py"}),
        ("git apply <<'EOF'\n--- a/src/a.py\n+++ b/src/a.py\nEOF", {"src/a.py"}),
        ("python3 - <<'PY'\np = 'src/a.py'\nopen(p, 'w').write('x')\nPY", {"src/a.py"}),
        ("python3 -c \"print(open('src/a.py').read())\"", set()),
        ("python3 -c \"from pathlib import Path; Path('src/a.py').write_text('')\"", {"src/a.py"}),
        ('str_replace_editor {"command": "str_replace", "path": "/repo/src/a.py"}', {"src/a.py"}),
        ('str_replace_editor {"command": "view", "path": "/repo/src/a.py"}', set()),
        ('Edit {"file_path": "/repo/src/a.py", "old_string": "x"}', {"src/a.py"}),
        ('Read {"file_path": "/repo/src/a.py"}', set()),
        ("str_replace_editor create src/a.py --file_text x", {"src/a.py"}),
        ("cd src && sed -i s/a/b/ a.py", {"src/a.py"}),
        ("it's > src/a.py", set()),
        ("test 1 -gt 0 && grep -c '=>' src/a.py", set()),
        ("bash -lc 'sed -i s/a/b/ src/a.py'", {"src/a.py"}),
        ("bash -lc 'cat src/a.py'", set()),
        ('cd /repo && sh -ec "echo x > src/a.py; ls src/b.py"', {"src/a.py"}),
        (
            "bash -lc \"apply_patch <<'EOF'\n*** Begin Patch\n*** Update File: src/a.py\n@@\n*** End Patch\nEOF\"",
            {"src/a.py"},
        ),
        ("for f in src/a.py src/b.py; do sed -i 's/x/y/' \"$f\"; done", {"src/a.py", "src/b.py"}),
        ("for f in src/a.py; do\n  if grep -q x ${f}; then sed -i s/x/y/ ${f}; fi\ndone", {"src/a.py"}),
        ("for f in src/a.py; do sed -n 1p $f; done", set()),
        ("ls src/b.py | xargs sed -i s/x/y/ src/a.py", {"src/a.py"}),
        ("apply_patch '*** Begin Patch\n*** Update File: src/a.py\n@@'", {"src/a.py"}),
        ('apply_patch {"input": "*** Begin Patch\\n*** Update File: src/a.py\\n@@"}', {"src/a.py"}),
        ('edit {"filePath": "/repo/src/a.py", "oldString": "x"}', {"src/a.py"}),
        ('read {"filePath": "/repo/src/a.py"}', set()),
        ('replace {"file_path": "/repo/src/a.py", "old_string": "x"}', {"src/a.py"}),
        ('write_to_file {"path": "src/a.py", "content": "x"}', {"src/a.py"}),
    ],
)
def test_commands_that_count_as_edits(command, files):
    known = KnownFiles(["src/a.py", "src/b.py"])
    written = edited(command, Patterns.of(SCORING), known)
    assert {name for name in written if name.endswith(".py")} == files
    assert files <= touched(command, Patterns.of(SCORING), known)


def test_spellings_of_one_file_have_one_canonical_path():
    files = KnownFiles(["src/a.py", "lib/a.py", "setup.py", "src/click/termui.py"])
    same = {"./src/a.py", "a/src/a.py", "/w/repo/src/a.py", "src//a.py", "src/x/../a.py"}
    assert {files.canonical(path) for path in same} == {"src/a.py"}
    assert files.canonical("a.py") == "a.py", "two files end in it"
    assert files.canonical("/testbed/setup.py") == "setup.py" and files.canonical("docs/setup.py") == "docs/setup.py"
    assert "click/termui.py" in files and "xsrc/a.py" not in files


# --- who counts ----------------------------------------------------------------------------------------------------


def test_infrastructure_errors_are_marked_and_crashed_agents_count():
    broken, rows = score_pair(plans(), replies(), error="engine: ConnectionError")
    assert broken["infrastructure_error"] and broken["plan_first"] is None and broken["follow_through"] is None
    assert broken["verdict"] == "infrastructure" and rows[0]["reason"] == "infrastructure error"
    crashed, rows = score_pair(replace(plans(), exit_status="Error"), replies())
    assert (
        not crashed["infrastructure_error"] and crashed["follow_through"] == 0.0 and rows[0]["exit_status"] == "Error"
    )


def test_single_agent_has_no_pair_behaviour():
    score_row, rows = score_pair(agent("solo", [run("ls")]))
    assert score_row["plan_first"] is None and score_row["plan_first_reason"] == "one agent alone"
    assert rows[0]["plan_first"] is None and rows[0]["follow_through"] is None and score_row["follow_through"] is None


def test_message_commands_of_the_scoring_section_split_captured_bash():
    steps = [(run(f'coop-send agent2 "{PLAN}"'), {"agent2": REPLY}), run("cat src/harbor/tides.py")]
    assert not score_pair(agent("agent1", steps), replies())[0]["plan_first"]
    score_row, rows = score_pair(
        agent("agent1", steps), replies(), scoring=ScoringSection(message_commands=("send_message", "coop-send"))
    )
    assert score_row["plan_first"] and rows[0]["follow_own"]


def test_verdicts_are_read_and_malformed_outcomes_rejected():
    assert read_reward(None, None).verdict == "unknown" and read_reward(None, None).reward is None
    assert read_reward('{"reward": 0, "verdict": "merge_conflict"}', None).reward == 0.0
    assert read_reward('{"reward": null, "verdict": "infrastructure"}', None).infrastructure
    for outcome in ('{"reward": "1"}', "[]", "{", '{"reward": NaN}'):
        with pytest.raises(ValueError, match="rollout r9"):
            read_reward(outcome, None, "r9")


def test_every_rollout_and_agent_is_scored_in_order():
    tables = to_tables([planning_pair(f"r{i}") for i in (3, 1, 2)])
    scored = score(tables["rollouts"], tables["agents"], tables["turns"], tasks(), ScoringOptions(SCORING))
    assert scored["scores"]["rollout_id"].to_pylist() == ["r3", "r1", "r2"]
    assert scored["agent_scores"]["agent_id"].to_pylist() == ["agent1", "agent2"] * 3
