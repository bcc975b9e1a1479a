"""Tables that need not be in memory: cut at rollouts, or walked through on the disk, they give the same."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etpi_assets.curation.captured import COLUMNS, captured_agents
from etpi_assets.curation.pairs import make_pairs
from etpi_assets.scoring import assets as scoring
from etpi_assets.scoring.behaviours import ScoringOptions, score
from etpi_assets.specs.experiment import PairsSection
from etpi_assets.specs.rollout_set import ScoringSection
from etpi_assets.trajectories import tables as cutting
from etpi_assets.trajectories.tables import blocks, iter_turns
from etpi_resources.lake import parquet
from etpi_resources.lake.schemas import from_rows
from etpi_resources.lake.stored import Stored, batches, columns_of, counts
from tests.support.datasets import CHAT, dataset, default, rollouts


def stored(folder, name, table):
    parquet.write(name, table, folder / name)
    return Stored(name, [folder / name])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=12), st.integers(1, 5), st.integers(1, 4))
def test_blocks_are_the_tables_cut_at_whole_rollouts(sizes, rollouts_each, group):
    def table(name, column, counts):
        rows = [{"rollout_id": f"r{n}", column: i} for n, count in enumerate(counts) for i in range(count)]
        return from_rows(name, rows)

    tables = {
        "rollouts": table("rollouts", "seed", [1] * len(sizes)),
        "turns": table("turns", "turn", [turns for turns, _ in sizes]),
        "agents": table("agents", "turns", [agents for _, agents in sizes]),
    }
    columns = {"rollouts": ["rollout_id"], "turns": ["rollout_id", "turn"], "agents": ["rollout_id", "turns"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "_ROLLOUTS", rollouts_each)
        patch.setattr(parquet, "ROW_GROUP_ROWS", group)
        result = list(blocks(tables, columns))
    assert all(0 < len(block["rollouts"]) <= rollouts_each for block in result)
    for name, whole in tables.items():
        for block in result:
            assert set(block[name]["rollout_id"].to_pylist()) <= set(block["rollouts"]["rollout_id"].to_pylist())
        assert not result or pa.concat_tables([b[name] for b in result]).equals(whole.select(columns[name]))


def test_a_table_in_another_order_is_refused(monkeypatch):
    monkeypatch.setattr(cutting, "_ROLLOUTS", 2)
    tables = {
        "rollouts": from_rows("rollouts", [{"rollout_id": name} for name in "abc"]),
        "turns": from_rows("turns", [{"rollout_id": name, "turn": 0} for name in "abca"]),
    }
    with pytest.raises(ValueError, match="turns: .* rollout a"):
        list(blocks(tables, {"rollouts": ["rollout_id"], "turns": ["rollout_id", "turn"]}))


@pytest.mark.parametrize("capture", ["native", "retokenised"])
def test_pairs_and_scores_of_blocks_are_those_of_the_whole(tmp_path, monkeypatch, capture):
    tables, section = rollouts(), PairsSection.model_validate({"capture": capture})
    on_disk = {name: stored(tmp_path, name, table) for name, table in tables.items()}
    whole = make_pairs(captured_agents(tables, section, CHAT, default, {}), section, CHAT)
    whole_scores = score(
        tables["rollouts"], tables["agents"], tables["turns"], dataset().tasks, ScoringOptions(ScoringSection())
    )
    monkeypatch.setattr(cutting, "_ROLLOUTS", 2)
    parts = [
        make_pairs(captured_agents(block, section, CHAT, default, {}), section, CHAT)
        for block in blocks(on_disk, COLUMNS)
    ]
    assert len(parts) == 3
    for name, table in whole.items():
        assert pa.concat_tables([part[name] for part in parts]).equals(table) and len(table)
    scored = [
        score(b["rollouts"], b["agents"], b["turns"], dataset().tasks, ScoringOptions(ScoringSection()))
        for b in blocks({name: on_disk[name] for name in scoring.COLUMNS}, scoring.COLUMNS)
    ]
    for name, table in whole_scores.items():
        assert pa.concat_tables([part[name] for part in scored]).equals(table)


def test_turns_of_an_unknown_agent_raise():
    tables = dict(rollouts())
    tables["agents"] = tables["agents"].slice(0, len(tables["agents"]) - 1)
    with pytest.raises(ValueError, match="another order"):
        list(captured_agents(tables, PairsSection(capture="native"), CHAT, default, {}))


def test_streaming_a_table_gives_the_same_rows_as_reading_it(tmp_path):
    pairs = dataset().pairs
    parquet.write("pairs", pairs, tmp_path / "a")
    parquet.write("pairs", pairs.slice(0, 5), tmp_path / "b")
    both, there = pa.concat_tables([pairs, pairs.slice(0, 5)]), Stored("pairs", [tmp_path / "a", tmp_path / "b"])
    columns = ["pair_id", "turn", "prefix_turn"]
    assert len(there) == len(both)
    assert columns_of(there, columns).equals(both.select(columns))
    assert counts(there, "turn") == counts(both, "turn")
    assert [ids.tolist() for _, ids, _ in iter_turns(there)] == [ids.tolist() for _, ids, _ in iter_turns(both)]
    with pytest.raises(parquet.SchemaMismatch, match=r"\['nonsense'\]"):
        list(batches(there, ["nonsense"]))


def test_streaming_a_table_takes_the_memory_of_a_row_group(tmp_path):
    rows = [{"rollout_id": "r", "agent_id": "a", "turn": i, "suffix_ids": list(range(500))} for i in range(2048)]
    some = from_rows("turns", rows)
    with parquet.Writer("turns", tmp_path / "turns") as writer:
        for _ in range(30):
            writer.add(some)
    before, peak = pa.total_allocated_bytes(), 0
    for batch in batches(Stored("turns", [tmp_path / "turns"]), ["suffix_ids"]):
        assert batch.num_rows == 2048
        peak = max(peak, pa.total_allocated_bytes())
    assert peak - before < 30e6 < 30 * 2048 * 500 * 4
