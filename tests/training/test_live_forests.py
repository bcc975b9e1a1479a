"""A live policy whose turns fork, in whole runs: every generated id is trained once, where it was sampled."""

from __future__ import annotations

from pathlib import Path

import pytest

from etpi_assets.graph import GRAPH
from etpi_resources.lake import catalog
from etpi_resources.lake.lake import Lake
from tests.support.reinforcement import make, prepared, rows
from tests.support.tiny_training import make_speaking_base

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lake(tmp_path_factory) -> Lake:
    folder: Path = tmp_path_factory.mktemp("live")
    agent = '{prompt = "terminal_tiny", max_steps = 3, max_tokens = 12, temperature = 0.9, compact_after = 1}'
    rewards = '[{function = "overlong", params = {limit = 100, buffer = 100}}]'  # of some variance
    more = {
        "rewards": rewards,
        "max_response_tokens": "900",
        "steps": "2",
        "save_steps": "2",
        "pass_tokens": "400",
        "refill": "1",
    }
    lake = prepared(folder, make_speaking_base(folder / "base"), agent=agent, **more)
    make(folder, lake, "rl_checkpoint")
    return lake


def test_probabilities_on_every_branch_are_those_of_sampling(lake):
    assert all(line["logprob_gap_max"] < 1e-3 for line in rows(lake, "training_log"))
    trained = [sample for sample in rows(lake, "rl_samples") if sample["left_out"] is None]
    assert len(trained) == 16 and any((sample["agent_branches"] or [1])[0] > 1 for sample in trained)
    turns = sorted(rows(lake, "turns"), key=lambda turn: (turn["rollout_id"], turn["agent_id"], turn["turn"]))
    for sample in trained:
        own = [turn for turn in turns if turn["rollout_id"] == sample["rollout_id"]]
        assert sum(len(turn["output_ids"]) for turn in own) == sample["policy_tokens"]
        sampled = [logprob for turn in own for logprob in turn["logprobs"]]
        assert sample["policy_logprobs"] == pytest.approx(sampled, abs=1e-3)


def test_views_have_the_turns_that_were_trained_on(lake, tmp_path):
    path = tmp_path / "catalog.duckdb"
    catalog.build(lake, GRAPH.values(), path)
    with catalog.connect(path) as connection:
        [differing] = connection.execute(
            "SELECT count(*) FILTER (WHERE len(policy_logprobs) != len(output_ids)) FROM rl_turns"
        ).fetchone() or (None,)
    assert differing == 0
