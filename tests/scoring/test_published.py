"""The published reading of the behaviours: where it agrees with the hardened one, and where it is more lenient."""

from __future__ import annotations

import pytest

from etpi_assets.scoring.behaviours import ScoringOptions, score
from etpi_assets.scoring.published import COLUMNS, in_reading
from etpi_assets.specs.rollout_set import ScoringSection
from etpi_assets.trajectories.tables import to_tables
from tests.support.rollouts import PLAN, REPLY, agent, planning_pair, rollout, run, say, tasks

FIRST, CONTENT, FOLLOWED = COLUMNS


def scored(*agents, **columns):
    tables = to_tables([rollout(*agents, **columns)])
    result = score(tables["rollouts"], tables["agents"], tables["turns"], tasks(), ScoringOptions(ScoringSection()))
    return result["scores"].to_pylist()[0], result["agent_scores"].to_pylist()


def pair(first, *rest, mail=REPLY):
    """Return a pair whose first agent does this and is answered, and whose second one plans."""
    turns = [(first, {"agent2": mail} if mail else {}), *rest]
    return agent("agent1", turns), agent("agent2", [(say(PLAN, "agent1"), {"agent1": "ok"})], role="responder")


def test_pair_that_passes_the_hardened_reading_passes_this_one():
    tables = to_tables([planning_pair()])
    result = score(tables["rollouts"], tables["agents"], tables["turns"], tasks(), ScoringOptions(ScoringSection()))
    (row,) = result["scores"].to_pylist()
    assert (row[FIRST], row[CONTENT], row[FOLLOWED]) == (True, True, 1.0)


@pytest.mark.parametrize(
    ("first", "mail", "expected"),
    [
        (say("hello"), REPLY, True),
        (say("hello"), "", False),
        (run("echo waiting"), REPLY, False),
        (run("ls && send_message agent2 'plan'"), REPLY, False),
        (run("send_message agent2 'plan' && ls"), REPLY, False),  # its bash ran before the answer came
        ("I would plan.", REPLY, False),
    ],
)
def test_plan_first_is_a_message_and_an_answer_before_bash(first, mail, expected):
    assert scored(*pair(first, mail=mail))[1][0][FIRST] is expected


def test_responder_need_not_name_the_paths():
    answer = agent("agent2", [(run("send_message agent1 'fine'"), {})], role="responder")
    row, agents = scored(agent("agent1", [(say(PLAN), {"agent2": "fine"})]), answer)
    assert not agents[1][FIRST]  # nothing was shown to it
    received = agent("agent2", [("hm", {"agent1": PLAN}), (run("send_message agent1 'fine'"), {})], role="responder")
    row, agents = scored(agent("agent1", [(say(PLAN), {"agent2": "fine"})]), received)
    assert row[FIRST] and not row["plan_first"] and "acknowledgement" in row["plan_first_reason"]


@pytest.mark.parametrize(
    ("text", "expected", "hardened"),
    [
        ("Plan: first I'll take other/place.py", True, False),  # no path of the task
        ("Explanation: yourself, see other/place.py", True, False),  # parts of words
        ("I\u2019ll do it first: src/harbor/tides.py", True, True),
        ("Plan: first the parser", False, False),
        ("I take src/harbor/tides.py", False, False),
    ],
)
def test_plan_content_counts_keywords_anywhere_and_any_path(text, expected, hardened):
    _, agents = scored(*pair(run(f"send_message agent2 <<'MSG'\n{text}\nMSG")))
    assert (agents[0][CONTENT], agents[0]["plan_content"]) == (expected, hardened)


def test_follow_through_is_any_command_with_a_path_as_it_is_written():
    named = say("Plan: first src/harbor/tides.py")
    before = pair(run("cat src/harbor/tides.py"), named)
    assert [row[FOLLOWED] for row in scored(*before)[1]] == [True, False]
    assert [row["follow_through"] for row in scored(*before)[1]] == [False, False]
    other_spelling = pair(named, run("cd src/harbor && cat tides.py"))
    assert [row[FOLLOWED] for row in scored(*other_spelling)[1]] == [False, False]
    assert scored(*other_spelling)[1][0]["follow_through"]


def test_reading_is_null_where_the_hardened_one_is():
    for row, agents in (scored(*pair(say(PLAN)), error="the sandbox died"), scored(pair(say(PLAN))[0])):
        assert [row[name] for name in COLUMNS] == [None] * 3
        assert all(of_agent[name] is None for of_agent in agents for name in COLUMNS)


def test_only_behaviours_have_two_readings():
    assert in_reading("plan_first", "published") == "plan_first_published"
    assert in_reading("plan_first", "hardened") == "plan_first" and in_reading("solved", "published") == "solved"
