"""A rollout as a conversation: rounds, columns, messages, verdict, patch and lineage."""

from __future__ import annotations

import json
import re
from datetime import timedelta

from etpi.view.app import _templates
from etpi.view.conversation import read_conversation
from etpi_resources.links import rollout_page, task_page
from tests.support.small_lake import AT
from tests.support.viewed_lake import NAMES, SET, STUDY, action, turn


def rows_of(turns: list[dict]) -> list[dict]:
    return [row | {"finished_at": row["at"], "reasoning": row.get("reasoning"), "parse_error": row.get("parse_error"),
                   "drift_at": None} for row in turns]  # fmt: skip


def cells(conversation) -> list[list[str | None]]:
    return [[f"{t.agent}/{t.turn}" if t else None for t in row] for row in conversation.rounds]


def test_calls_branches_and_roles_of_a_harness_are_shown(pages) -> None:
    text = pages.get(rollout_page("set", SET, NAMES["dropped"])).text
    assert re.findall(r"<summary>(\w+ side1) ", text) == ["user side1", "assistant side1"]
    assert re.search(r"<b>agent1</b> proposer", text) and "side user &lt;script&gt;" in text
    for name, count in {"calls": 6, "side": 1, "drift": 2, "refused": 1}.items():
        assert re.search(rf"<dt>{name}</dt><dd>\s*{count}\s*</dd>", text), name


def test_turns_of_a_round_are_side_by_side() -> None:
    turns = rows_of([turn("r", "a", 0, "x"), turn("r", "a", 1, "x"), turn("r", "b", 0, "x")])
    conversation = read_conversation([], turns, [])
    assert cells(conversation) == [["a/0", "b/0"], ["a/1", None]] and conversation.clock == "round"


def test_excerpt_counts_the_turns_that_each_agent_has_more() -> None:
    turns = rows_of([turn("r", agent, n, "x") for agent, count in (("a", 4), ("b", 2)) for n in range(count)])
    rollout = {"origin": "set", "made_for": SET, "rollout_id": "r", "side": "base", "verdict": "passed"}
    rollout |= {"exit_status": "Submitted", "decoding": None, "seed": None, "teacher": None}
    column = {"rollout": rollout, "side": "base", "conversation": read_conversation([], turns, [])}
    page = _templates().get_template("macros.html.jinja").module.attempt(column, 2)
    assert re.findall(r"\d+ more", page) == ["2 more"]


def test_recorded_turns_are_in_the_order_of_time() -> None:
    times = {("a", 0): 0, ("a", 1): 1, ("b", 0): 2, ("a", 2): 3, ("b", 1): 3}
    turns = rows_of([turn("r", agent, n, "x", at=AT + timedelta(seconds=s)) for (agent, n), s in sorted(times.items())])
    conversation = read_conversation([], turns, [], recorded=True)
    assert cells(conversation) == [["a/0", None], ["a/1", "b/0"], ["a/2", "b/1"]] and conversation.clock == "time"
    turns[0]["finished_at"] = None
    unknown = read_conversation([], turns, [], recorded=True)
    assert unknown.clock == "number" and cells(unknown)[0] == ["a/0", "b/0"]


def test_message_is_joined_to_where_it_was_read() -> None:
    read = json.dumps([{"from": "a", "message": "take b"}])
    turns = rows_of(
        [
            turn("r", "a", 0, "x", action(to="b", message="take b")),
            turn("r", "a", 1, "x", action(to="b", message="take b")),
            turn("r", "b", 0, "x"),
            turn("r", "b", 1, "x", inbox=read),
            turn("r", "b", 2, "x", inbox=read),
        ]
    )
    shown = {(t.agent, t.turn): t for row in read_conversation([], turns, []).rounds for t in row if t}
    assert [shown["a", n].sent[0].received_in for n in (0, 1)] == [1, 2], "the earliest unread message first"
    assert [shown["b", n].received[0].sent_in for n in (1, 2)] == [0, 1]


def test_thought_prose_and_calls_are_told_apart() -> None:
    def one(content: str, *actions: dict, **more) -> object:
        return next(iter(read_conversation([], rows_of([turn("r", "a", 0, content, *actions, **more)]), []).rounds))[0]

    call = "<tool_call>\n<function=bash>ls</function>\n</tool_call>"
    shown = one(f"<think>\nhow\n</think>\n\nNow I look.\n{call}", action("ls"))
    assert (shown.thought, shown.prose, [a["command"] for a in shown.commands]) == ("how", "Now I look.", ["ls"])
    assert one(f"how\n</think>\n{call}", action("ls")).thought == "how", "the prompt opened the block"
    assert one("<think>no end").thought == "no end"
    assert one("text", reasoning="apart").thought == "apart"
    assert one(call, parse_error="two calls").prose == call, "what could not be read is shown whole"
    imported = one('Look.\n[tool_use Bash] {"command": "ls"}\nDone.', action("ls"))
    assert imported.prose.split() == ["Look.", "Done."]


def test_rollout_page_shows_the_run(pages) -> None:
    text = pages.get(rollout_page("set", SET, NAMES["teacher"])).text
    order = [text.index(f'id="{cell}"') for cell in ("agent1-0", "agent2-0", "agent1-1", "agent2-1")]
    assert order == sorted(order)
    plain = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", text))
    for expected in (
        "who does what", "first words", "cat a #", "exit 2", "read in its turn 1", "sent in its turn 0",
        "system prompt of agent2", "observation of agent2 0", "Traceback", "old line", "new line", "temperature" * 0,
        "trained on study: 2 training rows", "sft1", "shortest_correct",
    ):  # fmt: skip
        assert expected in plain, expected
    assert '<span class="line removed">-old line' in text and '<span class="line added">+new line' in text
    assert '<span class="tag good">passed</span>' in text


def test_dropped_rollout_says_why(pages) -> None:
    text = pages.get(rollout_page("set", SET, NAMES["dropped"])).text
    assert "reward_below_minimum" in text and "0 &lt; 1" in text and "training rows" not in text
    assert "ls before the first message" in text, "the reason of a score"


def test_reinforced_rollout_shows_its_advantage(pages) -> None:
    text = pages.get(rollout_page("rl", STUDY, NAMES["rl"])).text
    assert "advantage 0.250" in text and "None" not in text
    assert "<dt>reward</dt><dd>1.00</dd>" in text, "of the verdict, as in the list of rollouts"


def test_regressions_and_task_put_base_beside_student(pages) -> None:
    text = pages.get(f"/regressions/{STUDY}").text
    assert "Lost: the base solved it, the student did not" in text
    lost = text.split("Gained")[0]
    assert NAMES["base"] in lost and NAMES["student"] in lost and task_page(STUDY, "t2").split("?")[0] in lost
    beside = pages.get(task_page(STUDY, "t2")).text
    assert re.findall(r"<h2>(\w+)", beside) == ["base", "student", "teacher"]
    assert beside.index(NAMES["base"]) < beside.index(NAMES["student"]) < beside.index(NAMES["dropped"])
    text = pages.get(f"/experiment/{STUDY}").text
    assert "1 lost, 0 gained" in text and "rl in training" in text, "not the evaluation of its checkpoint"
