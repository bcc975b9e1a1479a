"""Records as tables and back: lossless, prompts stored once, departures recorded, and checks that notice."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etpi_assets.agent.loop import rollout_id
from etpi_assets.checks import judged
from etpi_assets.rollouts.journal import from_line, to_line
from etpi_assets.tasks.family import Task
from etpi_assets.trajectories.records import Action, AgentRecord, Message, RolloutRecord, Turn
from etpi_assets.trajectories.rollout_checks import (
    capture_figures,
    captures_outcome,
    count_figures,
    counts_outcome,
    drift_figures,
    merged,
    prompt_figures,
    set_figures,
    set_outcomes,
    tasks_as_asked,
)
from etpi_assets.trajectories.tables import captured_digest, from_tables, to_tables, worst_exit
from etpi_resources.lake.schemas import TABLES, empty
from tests.support.rollouts import prompts_of

IDS = st.lists(st.integers(0, 9), max_size=6)
TEXT = st.text(st.characters(blacklist_categories=("Cs",)), max_size=8)
TIMES = st.none() | st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1)).map(lambda t: t.replace(tzinfo=UTC))


def test_actions_and_tools_are_stored_as_json():
    actions = [
        Action("bash", 'echo "é\n\x01"\\', form="fenced"),
        Action("send_message", "send b 'x'", to="b", message='"hm" é', form="xml", pure=False, wait=True),
    ]
    tools = [{"name": "é", "b": None, "a": [1, 2.5, True]}]
    records = [
        RolloutRecord(name, "set", None, None, None, [AgentRecord("a", "", "solo", "x", [turn])], tools=offered)
        for name, turn, offered in [
            ("1", Turn(0, "x", actions=actions), tools),
            ("2", Turn(0, "x"), tools),
            ("3", Turn(0, "x"), []),
        ]
    ]
    tables = to_tables(records)
    assert tables["turns"]["actions"].to_pylist() == [
        json.dumps([vars(action) for action in actions], ensure_ascii=False, sort_keys=True),
        "[]",
        "[]",
    ]
    text = json.dumps(tools, ensure_ascii=False)
    assert tables["rollouts"]["tools"].to_pylist() == [text, text, "[]"]


def prompts_reconstruct(digests, tables):
    return judged("prompts_reconstruct", prompt_figures(digests, tables))


def native_ids_present(tables, *, live):
    return captures_outcome(capture_figures(tables["turns"], live=live), live=live)


def drift_bounded(*turns, **more):
    record = rollout(*turns)
    for turn in record.agents[0].turns:
        turn.capture = more.get("capture", "native")
    return judged("drift_bounded", drift_figures(to_tables([record])["turns"]))


def counts_reconcile(tables, *, total, quarantined):
    return counts_outcome(count_figures(tables), total=total, quarantined=quarantined)


@st.composite
def turns(draw):
    """Turns whose prompts extend the last one, an earlier one, or nothing, with or without ids."""
    created: list[Turn] = []
    for number in range(draw(st.integers(0, 5))):
        earlier = [
            t.prompt_ids + t.output_ids for t in created if t.prompt_ids is not None and t.output_ids is not None
        ]
        how = draw(st.sampled_from(["extend", "extend", "fork", "new", "none"]))
        prompt: list[int] | None = draw(IDS)
        if how in ("extend", "fork") and earlier:
            base = earlier[-1] if how == "extend" else draw(st.sampled_from(earlier))
            prompt = [*base, *(prompt or [])]
        output = draw(IDS)
        if how == "none":
            prompt = output = None
        created.append(
            Turn(
                turn=number,
                content=draw(TEXT),
                prompt_ids=prompt,
                output_ids=output,
                logprobs=None if output is None or draw(st.booleans()) else [-0.5] * len(output),
                capture="none" if output is None else "native",
                finish_reason=draw(st.sampled_from(["stop", "length", None])),
                reasoning=draw(st.none() | TEXT),
                think_tokens=draw(st.none() | st.integers(0, 5)),
                actions=draw(st.lists(st.builds(Action, st.just("bash"), TEXT, form=st.just("xml")), max_size=2)),
                parse_error=draw(st.none() | TEXT),
                observation=draw(st.none() | TEXT),
                exit_code=draw(st.none() | st.integers(0, 255)),
                inbox=draw(st.lists(st.fixed_dictionaries({"from": TEXT, "message": TEXT}), max_size=2)),
                at=draw(TIMES),
            )
        )
    return created


MESSAGES = st.lists(
    st.builds(Message, st.sampled_from(["user", "assistant"]), TEXT, turn=st.none() | st.integers(0, 9), at=TIMES),
    max_size=3,
)


@st.composite
def records(draw, number: int = 0):
    agents = [
        AgentRecord(
            f"agent{i}", f"f{i}", "solo", draw(st.sampled_from(["Submitted", "Error"])), draw(turns()), draw(MESSAGES)
        )
        for i in range(draw(st.integers(0, 2)))
    ]
    return RolloutRecord(
        f"r{number}",
        "set",
        "suite",
        "task",
        "repo",
        agents,
        outcome={"reward": 1.0, "verdict": "passed"},
        started_at=draw(TIMES),
    )


@settings(deadline=None)
@given(records(0), records(1))
def test_tables_give_the_records_back(one, two):
    tables = to_tables([one, two])
    assert from_tables(tables) == [one, two]
    for name, table in tables.items():
        assert table.schema.equals(TABLES[name].schema)
    prompts = prompts_of(tables["turns"])
    captured = {
        (r.rollout_id, a.agent_id, t.turn): t.prompt_ids
        for r in (one, two)
        for a in r.agents
        for t in a.turns
        if t.prompt_ids is not None
    }
    assert prompts == captured
    digests = {r.rollout_id: captured_digest(r) for r in (one, two)}
    assert prompts_reconstruct(digests, tables).passed
    assert counts_reconcile(tables, total=2, quarantined=0).passed


@settings(deadline=None)
@given(records())
def test_lines_give_the_record_back(record):
    record.rollout_id = rollout_id(Task("task", "suite", "", "", "", {}, ""), 0, "spec")  # else from_line refuses it
    record.task_hash = ""
    assert from_line(to_line(record, "spec"), "spec") == record


def replaced(table: pa.Table, column: str, values: list) -> pa.Table:
    index = table.schema.get_field_index(column)
    return table.set_column(index, table.schema.field(index), pa.array(values, table.schema.field(index).type))


def rollout(*prompts: tuple[list[int], list[int]]) -> RolloutRecord:
    created = [Turn(i, "x", prompt, output, capture="native") for i, (prompt, output) in enumerate(prompts)]
    return RolloutRecord("r", "set", "s", "t", "repo", [AgentRecord("agent1", "f1", "solo", "Submitted", created)])


def test_a_prompt_is_stored_as_what_it_adds():
    record = rollout(([1, 2, 3], [4, 5]), ([1, 2, 3, 4, 5, 6], [7]), ([1, 2, 3, 4, 5, 6, 7, 8, 9], [10]))
    rows = to_tables([record])["turns"].to_pylist()
    assert [row["prefix_turn"] for row in rows] == [None, 0, 1]
    assert [row["suffix_ids"] for row in rows] == [[1, 2, 3], [6], [8, 9]]
    assert [row["prompt_tokens"] for row in rows] == [3, 6, 9]
    assert all(row["drift_at"] is None for row in rows)


def test_drift_is_recorded_with_both_texts():
    record = rollout(([1, 2], [3, 4]), ([1, 2, 3, 5, 6], [7]), ([1, 2, 3, 4, 8], [9]))
    rows = to_tables([record], decode=lambda ids: "".join(map(str, ids)))["turns"].to_pylist()
    assert [row["prefix_turn"] for row in rows] == [None, None, 0]
    assert [row["drift_at"] for row in rows] == [None, 3, 3]
    assert rows[1]["drift"] == '{"expected_ids": [4], "expected_text": "4", "found_ids": [5, 6], "found_text": "56"}'


def test_prompt_that_ends_early_drifts_at_its_end():
    rows = to_tables([rollout(([1, 2], [3]), ([1, 2], [4]))])["turns"].to_pylist()
    assert rows[1]["drift_at"] == 2 and rows[1]["prefix_turn"] is None


def test_turns_are_numbered_upwards():
    record = rollout(([1], [2]), ([1, 2, 3], [4]))
    record.agents[0].turns[1].turn = 0
    with pytest.raises(ValueError, match="turn 0 .*turn 0;"):
        to_tables([record])


def test_a_broken_prefix_is_noticed():
    record = rollout(([1, 2, 3], [4, 5]), ([1, 2, 3, 4, 5, 6], [7]))
    tables = to_tables([record])
    suffixes = tables["turns"]["suffix_ids"].to_pylist()
    suffixes[1] = [99]
    broken = replaced(tables["turns"], "suffix_ids", suffixes)
    outcome = prompts_reconstruct({"r": captured_digest(record)}, {**tables, "turns": broken})
    assert not outcome.passed and "'r'" in outcome.message
    for rows in (broken.slice(0, 1), broken.slice(0, 0)):
        assert not prompts_reconstruct({"r": captured_digest(record)}, {**tables, "turns": rows}).passed


def test_a_prefix_that_is_not_there_is_an_error():
    turns_table = to_tables([rollout(([1], [2]), ([1, 2, 3], [4]))])["turns"]
    with pytest.raises(ValueError, match="turn .*turn 0,"):
        prompts_of(turns_table.slice(1))


def test_turns_without_ids_are_noticed():
    tables = to_tables([rollout(([1], [2]), ([1, 2, 3], [4]))])
    assert native_ids_present(tables, live=True).passed
    record = rollout(([1], [2]))
    record.agents[0].turns.append(Turn(1, "lost"))
    outcome = native_ids_present(to_tables([record]), live=True)
    assert not outcome.passed and "r/agent1/1" in outcome.message
    assert native_ids_present(to_tables([record]), live=False).passed
    record.agents[0].turns[1].capture = "native"
    assert not native_ids_present(to_tables([record]), live=False).passed
    record.agents[0].turns.clear()
    assert not native_ids_present(to_tables([record]), live=True).passed
    for column in ("prompt_tokens", "output_tokens"):
        for value in (None, 0):
            turns = replaced(tables["turns"], column, [1, value])
            assert not native_ids_present({**tables, "turns": turns}, live=False).passed, column
    record.error = "the harness is gone"
    failed = to_tables([record]) | {"quarantined": empty("quarantined")}
    figures = set_figures(failed, {"r": captured_digest(record)}, live=True)
    (outcome,) = [o for o in set_outcomes(figures, total=1, live=True) if o.name == "native_ids_present"]
    assert not outcome.passed and "the harness is gone" in outcome.message


def test_number_of_tasks_is_judged_only_if_it_was_requested():
    unlimited, equal, fewer = (tasks_as_asked(requested, 7, "train") for requested in (None, 7, 8))
    assert [each.passed for each in (unlimited, equal, fewer)] == [True, True, False]
    assert "requested" in equal.message and "requested" not in unlimited.message


def test_drift_is_counted_and_bounded():
    grown = [([*range(n)], [n]) for n in range(1, 12)]  # ten later turns
    once = [*grown[:6], ([7], [8]), *(([7, *range(8, n)], [n]) for n in range(9, 13))]
    outcomes = [
        judged("drift_bounded", drift_figures(to_tables([rollout(*turns)])["turns"]))
        for turns in (grown, once, [*once, ([1], [2])])
    ]
    assert [outcome.passed for outcome in outcomes] == [True, True, False]
    assert [outcome.figures["with_drift"] for outcome in outcomes] == [0, 1, 2]
    assert [outcome.figures["later_turns"] for outcome in outcomes] == [10, 10, 11]
    assert drift_bounded(([1], [2]), ([3], [4]), capture="retokenised").passed, "no model read these prompts"


def test_lost_and_doubled_rows_are_noticed():
    record = rollout(([1], [2]))
    record.agents[0].messages = [Message("user", "x")]
    tables = to_tables([record])
    assert counts_reconcile(tables, total=3, quarantined=2).passed
    assert not counts_reconcile(tables, total=2, quarantined=0).passed
    assert not counts_reconcile(to_tables([record, record]), total=2, quarantined=0).passed
    for name in ("agents", "turns"):
        assert not counts_reconcile({**tables, name: tables[name].slice(1)}, total=1, quarantined=0).passed, name
    strange = replaced(tables["messages"], "rollout_id", ["other"])
    assert not counts_reconcile({**tables, "messages": strange}, total=1, quarantined=0).passed


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: {"agents": rows["agents"].slice(0, 1)},
        lambda rows: {"agents": pa.concat_tables([rows["agents"], renamed(rows["agents"].slice(1))])},
        lambda rows: {"turns": rows["turns"].slice(0, 1)},
        lambda rows: {"turns": pa.concat_tables([rows["turns"], renamed(rows["turns"].slice(1))])},
        lambda rows: {"messages": pa.concat_tables([rows["messages"], renamed(rows["messages"])])},
    ],
    ids=["agent lost", "agent of no rollout", "turn lost", "turn of no rollout", "message of no rollout"],
)
def test_each_row_is_counted_with_its_parent(change):
    record = rollout(([1], [2]), ([1, 2, 3], [4]))
    record.agents[0].messages = [Message("user", "x")]
    record.agents.append(AgentRecord("agent2", "f2", "solo", "Submitted", []))
    tables = to_tables([record])
    assert counts_reconcile(tables, total=1, quarantined=0).passed
    assert not counts_reconcile({**tables, **change(tables)}, total=1, quarantined=0).passed


def test_rollout_that_two_parts_of_an_import_have_is_noticed():
    figures = count_figures(to_tables([rollout(([1], [2]))]))
    assert counts_outcome(figures, total=1, quarantined=0).passed
    assert not counts_outcome(merged([figures, figures]), total=2, quarantined=0).passed


def renamed(table: pa.Table) -> pa.Table:
    return replaced(table, "rollout_id", ["other"] * len(table))


def test_pair_has_the_worse_exit_of_its_agents():
    assert worst_exit(["Submitted", "LimitsExceeded"]) == "LimitsExceeded"
    assert worst_exit(["FormatError", "exit_cost", "Submitted"]) == "exit_cost"
    assert worst_exit(["Error", "exit_cost"]) == "Error"
    assert worst_exit([]) == "Error"
