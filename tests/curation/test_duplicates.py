"""Imported rows that share turns: each turn is trained once, rows are kept on request, and all is counted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from etpi.run.console_table import lost_lines
from etpi_assets.curation.gates import lost_figures
from etpi_assets.curation.joins import once_outcome, paths_of
from etpi_assets.curation.label_syntax import LabelSyntax
from etpi_assets.curation.lost import keeping, listed_with_keys
from etpi_assets.curation.pair_blocks import PairBuilder
from etpi_assets.curation.select import select
from etpi_assets.graph import GRAPH
from etpi_assets.planning.planner import Step
from etpi_assets.specs.experiment import GatesSection, PairsSection, SelectSection
from etpi_resources.chat.format import load_chat_format
from etpi_resources.lake.catalog import build, connect
from etpi_resources.lake.lake import Ref
from etpi_resources.lake.schemas import from_rows
from tests.support.conversations import NoDefault, tables_of
from tests.support.curation import CurationLake
from tests.support.own_runs import recorded_run, write_runs

SET = 'title = "mine"\nkind = "imported"\nformat = "messages"\npath = "PATH"\n[options]\nteacher = "me"\n'
EXPERIMENT = """title = "own"
rollout_sets = ["mine"]
evaluate = "none"
select = {require = [], shortest_correct = false, min_reward = "none", duplicates = "RULE"}
[pairs]
capture = "retokenised"
[base]
kind = "none"
tokenizer = "tiny"
chat_template = "tiny"
[gates.override]
tools_offered = "one row has none"
"""
ROW = recorded_run(0, 2)
NO_ID = {key: value for key, value in ROW.items() if key != "instance_id"}
ROWS = [
    ROW,
    {**ROW, "instance_id": "own__repo-9"},  # the same conversation under another name
    ROW,
    {**ROW, "reward": 0.5},
    NO_ID,
    NO_ID,
    {**ROW, "tools": []},
    recorded_run(1, 2),
    {"messages": [{"role": "wizard", "content": "x"}]},
]
COPIES = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def curation(tmp_path_factory: pytest.TempPathFactory) -> CurationLake:
    folder = tmp_path_factory.mktemp("twice")
    curation = CurationLake(folder)
    curation.write("rollout_sets", "mine", SET.replace("PATH", str(write_runs(folder, ROWS))))
    for rule in ("drop", "keep"):
        curation.write("experiments", rule, EXPERIMENT.replace("RULE", rule))
    (other := folder / "other").mkdir()
    curation.write("rollout_sets", "other", SET.replace("PATH", str(write_runs(other, ROWS[-2:]))))
    curation.make_set("mine")
    curation.make_set("other")
    for rule in ("drop", "keep"):
        curation.make("selected_trajectories", rule)
    return curation


def test_row_that_occurs_twice_is_dropped_and_counted(curation):
    rollouts = curation.lake.read(Ref("raw_rollouts", "rollout_set", "mine"), "rollouts").to_pylist()
    number = {row["rollout_id"]: int(row["source"].rpartition("#")[2]) for row in rollouts}
    ref = Ref("selected_trajectories", "experiment", "drop")
    dropped = curation.lake.read(ref, "dropped").to_pylist()
    assert sorted(number[row["rollout_id"]] for row in dropped) == COPIES
    assert {row["reason"] for row in dropped} == {"duplicate"}
    check, once = curation.lake.require(ref).checks
    # The conversation with other tools has the same turns after another prompt.
    assert (once["name"], once["passed"], once["figures"]["rollouts"]) == ("turns_trained_once", False, 2)
    assert check["figures"]["reasons"] == {"duplicate": 5} and 'select.duplicates = "keep"' in check["message"]


def test_row_that_occurs_twice_is_trained_twice_on_request(curation):
    assert len(curation.lake.read(Ref("selected_trajectories", "experiment", "keep"), "selected")) == len(ROWS) - 1


def test_status_names_what_is_lost_and_the_key_that_keeps_it(curation):
    steps = [
        Step("raw_rollouts", "rollout_set", "mine", "ok"),
        Step("selected_trajectories", "experiment", "drop", "ok"),
    ]
    raw, selected = lost_lines(steps, curation.lake)
    assert "1 of 9 inputs" in raw
    assert "5 of 8: duplicate 5" in selected and "select.duplicates" in selected


def test_query_that_status_prints_shows_the_rows_that_it_counted(curation, tmp_path):
    for asset in ("tito_pairs", "upweighted_dataset"):
        curation.make(asset, "drop")
    steps = [
        Step("raw_rollouts", "rollout_set", "mine", "ok"),
        Step("raw_rollouts", "rollout_set", "other", "ok"),
        Step("upweighted_dataset", "experiment", "drop", "ok"),
    ]
    queries = [line.split('"')[1] for line in lost_lines(steps, curation.lake) if "quarantined" in line]
    with connect(build(curation.lake, GRAPH.values(), tmp_path / "catalog.duckdb")) as db:
        quarantined = [db.sql(query).fetchall() for query in queries]
    assert [[row[1] for row in rows] for rows in quarantined] == [[8], [1]]


def test_reasons_are_listed_most_first_with_their_keys():
    assert keeping("no_plan_first") == "select.require" and keeping("infrastructure") is None
    text = listed_with_keys({"infrastructure": 1, "unparseable": 4, "low_reward": 2})
    assert text == (
        "unparseable 4 (pairs.drop_unparseable = false keeps them), "
        "low_reward 2 (another select.min_reward keeps them), infrastructure 1"
    )


# --- turns that rollouts share --------------------------------------------------------------------------------------


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


GO, NEXT, OTHER = ({"role": "user", "content": text} for text in ("Go.", "Next.", "Other."))
LONG = (
    "The parser drops the last field of each line, so I will change how it splits a line and then run the tests again."
)
CASES = {
    "a run saved after each step": ([[GO, said("a")], [GO, said("a"), NEXT, said("b")]], {0: "part_of_another"}, {}, 0),
    "a retry": (
        [[GO, said("a"), NEXT, said("b"), NEXT, said("c")], [GO, said("a"), NEXT, said("d")]],
        {}, {1: {"agent1": [0]}}, 0,
    ),
    "another answer": ([[GO, said("a")], [GO, said("b")]], {}, {}, 0),
    "another question": ([[GO, said("a")], [OTHER, said("a")]], {}, {}, 0),
    "other thoughts": (
        [[GO, said("a", reasoning_content="x")], [GO, said("<think>y</think>a")]], {}, {}, 0,
    ),
    "histories without thoughts": (
        [[GO, said("a", reasoning_content="x")], [GO, said("a"), NEXT, said("b", reasoning_content="y")]],
        {}, {1: {"agent1": [0]}}, 0,
    ),
    "a rewritten history": (
        [[GO, said("a"), NEXT, said(LONG)], [GO, said("A summary."), NEXT, said(LONG)]], {}, {}, 1,
    ),
}  # fmt: skip
"""Case -> conversations, {number: why it is dropped}, {number: its repeated turns}, turns that could not be joined."""


@pytest.mark.parametrize("case", CASES)
def test_turn_after_the_same_messages_is_trained_once(case: str) -> None:
    conversations, reasons, repeated, unjoined = CASES[case]
    tables = tables_of(*conversations)
    paths = paths_of(tables)
    scores = from_rows(
        "scores",
        [
            {"rollout_id": name, "reward": 1.0, "turns": 1, "output_tokens": 9, "infrastructure_error": False}
            for name in tables["rollouts"]["rollout_id"].to_pylist()
        ],
    )
    result = select(tables["rollouts"], scores, SelectSection(min_reward=None), {}, paths)
    dropped = {int(row["rollout_id"][1:]): row["reason"] for row in result["dropped"].to_pylist()}
    assert dropped == reasons
    found = {int(row["rollout_id"][1:]): row["repeated"] for row in result["selected"].to_pylist()}
    assert {number: json.loads(text) for number, text in found.items() if text} == repeated
    outcome = once_outcome(result["selected"], paths)
    assert (outcome.passed, outcome.figures["repeated_turns"]) == (not unjoined, unjoined)


def test_rollouts_that_are_kept_twice_repeat_no_turn_elsewhere() -> None:
    tables = tables_of([GO, said(LONG)], [GO, said(LONG)])
    names = tables["rollouts"]["rollout_id"].to_pylist()
    rows = from_rows("selected", [{"rollout_id": name, "repeated": None} for name in names])
    figures = once_outcome(rows, paths_of(tables)).figures
    assert (figures["repeated_turns"], figures["rollouts"]) == (0, 0)


def test_long_turn_that_one_rollout_says_twice_is_not_repeated_by_another() -> None:
    tables = tables_of([GO, said(LONG), {"role": "user", "content": "Again."}, said(LONG)])
    rows = from_rows("selected", [{"rollout_id": "r0", "repeated": None}])
    outcome = once_outcome(rows, paths_of(tables))
    assert outcome.passed and (outcome.figures["repeated_turns"], outcome.figures["rollouts"]) == (0, 0)


def test_repeated_turn_is_context_in_one_rollout_and_trained_in_the_other() -> None:
    tables = tables_of(*CASES["a retry"][0])
    repeats = {"r1": {"agent1": [0]}}
    chat, section, prompts = (
        load_chat_format("tiny"),
        PairsSection(capture="retokenised", drop_unparseable=False),
        NoDefault(),
    )
    syntax = LabelSyntax(chat, GatesSection())
    built = PairBuilder(section, chat, {}, None, frozenset(), prompts, syntax, repeats).build(tables)
    trained = [(row["rollout_id"], row["turn"]) for row in built["pairs"].to_pylist()]
    assert trained == [("r0", 0), ("r0", 1), ("r0", 2), ("r1", 1)]
    (dropped,) = built["dropped"].to_pylist()
    assert (dropped["turn"], dropped["reason"]) == (0, "repeated_turn")
    assert lost_figures(built["dropped"])["reasons"] == {}
