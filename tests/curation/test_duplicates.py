"""Imported rows that occur twice: counted, dropped by default, kept on request, and reported with the key."""

from __future__ import annotations

import pytest

from etpi.run.console_table import lost_lines
from etpi_assets.curation.lost import keeping, listed_with_keys
from etpi_assets.planning.planner import Step
from etpi_resources.lake.lake import Ref
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
"""
ROW = recorded_run(0, 2)
NO_ID = {key: value for key, value in ROW.items() if key != "instance_id"}
ROWS = [
    ROW,
    {**ROW, "instance_id": "own__repo-9"},  # the same conversation about another task
    ROW,
    {**ROW, "reward": 0.5},
    NO_ID,
    NO_ID,
    {**ROW, "tools": []},
    recorded_run(1, 2),
    {"messages": [{"role": "wizard", "content": "x"}]},
]
COPIES = [2, 5]


@pytest.fixture(scope="module")
def curation(tmp_path_factory: pytest.TempPathFactory) -> CurationLake:
    folder = tmp_path_factory.mktemp("twice")
    curation = CurationLake(folder)
    curation.write("rollout_sets", "mine", SET.replace("PATH", str(write_runs(folder, ROWS))))
    for rule in ("drop", "keep"):
        curation.write("experiments", rule, EXPERIMENT.replace("RULE", rule))
    curation.make_set("mine")
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
    (check,) = curation.lake.require(ref).checks
    assert check["figures"]["reasons"] == {"duplicate": 2} and 'select.duplicates = "keep"' in check["message"]


def test_row_that_occurs_twice_is_trained_twice_on_request(curation):
    assert len(curation.lake.read(Ref("selected_trajectories", "experiment", "keep"), "selected")) == len(ROWS) - 1


def test_status_names_what_is_lost_and_the_key_that_keeps_it(curation):
    steps = [
        Step("raw_rollouts", "rollout_set", "mine", "ok"),
        Step("selected_trajectories", "experiment", "drop", "ok"),
    ]
    raw, selected = lost_lines(steps, curation.lake)
    assert "1 of 9 inputs" in raw and "FROM quarantined" in raw
    assert "2 of 8: duplicate 2" in selected and "select.duplicates" in selected


def test_reasons_are_listed_most_first_with_their_keys():
    assert keeping("no_plan_first") == "select.require" and keeping("infrastructure") is None
    text = listed_with_keys({"infrastructure": 1, "unparseable": 4, "low_reward": 2})
    assert text == (
        "unparseable 4 (pairs.drop_unparseable = false keeps them), "
        "low_reward 2 (another select.min_reward keeps them), infrastructure 1"
    )
