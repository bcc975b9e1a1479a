"""The catalog shows the current versions, returns every prompt, and never blocks a reader."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etpi_assets.graph import GRAPH
from etpi_resources.lake import catalog
from etpi_resources.lake.catalog import CatalogBusy
from etpi_resources.lake.lake import Lake, LakeError, Ref
from etpi_resources.lake.manifest import DamagedFile
from etpi_resources.lake.schemas import TABLES
from tests.support import small_lake

PROMISED = {
    "tasks", "rollouts", "turns", "messages", "agents", "scores", "agent_scores", "turn_scores", "selected", "dropped",
    "tito_pairs", "full_turns", "dataset_rows", "sequences", "checkpoints", "training_log", "probes", "metrics",
    "lineage", "experiments", "rollout_sets", "suites", "leaderboard", "teacher_ceiling", "quarantined", "checks",
    "manifests", "versions", "vocabulary", "specs", "reports",
}  # fmt: skip


def build(lake: Lake, **options) -> Path:
    return catalog.build(lake, GRAPH.values(), **options)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(small_lake.make(tmp_path_factory.mktemp("small") / "data"))


@pytest.fixture
def db(path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    with catalog.connect(path) as connection:
        yield connection


def rows(db: duckdb.DuckDBPyConnection, sql: str) -> list[tuple]:
    return db.sql(sql).fetchall()


def views(db: duckdb.DuckDBPyConnection) -> set[str]:
    return {
        name for (name,) in rows(db, "SELECT view_name FROM duckdb_views() WHERE schema_name = 'main' AND NOT internal")
    }


# --- what the views show -------------------------------------------------------------------------------------------


def test_an_empty_lake_gives_every_view_typed_and_empty(tmp_path: Path, path: Path) -> None:
    with catalog.connect(build(Lake(tmp_path / "data"))) as empty, catalog.connect(path) as full:
        assert PROMISED <= views(empty) == views(full)
        for view in views(empty):
            assert rows(empty, f"SELECT count(*) FROM {view}") == [(0,)], view
            assert rows(empty, f"DESCRIBE {view}") == rows(full, f"DESCRIBE {view}"), view
        for node in GRAPH.values():
            for table in node.tables:
                described = {name: kind for name, kind, *_ in rows(empty, f"DESCRIBE {node.name}.{table}")}
                assert set(TABLES[table].schema.names) <= set(described)
                assert node.set == "all" or node.set in described


def test_rollouts_are_the_union_by_origin(db: duckdb.DuckDBPyConnection) -> None:
    assert rows(
        db, "SELECT origin, rollout_set, experiment, checkpoint_role, count(*) FROM rollouts GROUP BY ALL ORDER BY ALL"
    ) == [
        ("eval", None, "reinforced", "rl", 1),
        ("eval", None, "reinforced", "sft", 1),
        ("eval", None, "strong", "base", 1),
        ("eval", None, "strong", "sft", 1),
        ("rl", None, "reinforced", None, 2),
        ("set", "strong_set", None, None, 2),
        ("set", "weak_set", None, None, 1),
    ]
    for view in ("turns", "messages", "agents", "scores"):
        origins = rows(db, f"SELECT DISTINCT origin, rollout_set, experiment FROM {view} ORDER BY ALL")
        assert origins == [
            ("eval", None, "reinforced"),
            ("eval", None, "strong"),
            *[("rl", None, "reinforced")] * (view != "scores"),
            ("set", "strong_set", None),
            ("set", "weak_set", None),
        ], view


def test_key_columns_come_from_the_path_of_a_version(db: duckdb.DuckDBPyConnection) -> None:
    assert "experiment" not in TABLES["dropped"].schema.names
    assert rows(db, "SELECT experiment, stage, count(*) FROM dropped GROUP BY ALL ORDER BY ALL") == [
        ("follow_up", "pairs", 1),
        ("follow_up", "selection", 1),
        ("strong", "pairs", 1),
        ("strong", "selection", 1),
    ]
    assert rows(db, "SELECT suite, reason FROM quarantined") == [("coop", "reference_fails")]


def test_pairs_carry_whole_inputs_and_all_their_columns(db: duckdb.DuckDBPyConnection) -> None:
    names = [name for name, *_ in rows(db, "DESCRIBE tito_pairs")]
    assert set(TABLES["pairs"].schema.names) - {"suffix_ids"} <= set(names) and {"input_ids", "experiment"} <= set(
        names
    )
    result = rows(db, "SELECT input_ids, output_ids, input_tokens FROM tito_pairs WHERE pair_id = 'r1/agent1/2'")
    assert result == [([10, 11, 12, 20, 30, 40, 1, 2, 21, 30, 40, 1, 2], [22, 30, 40], 13)]


def test_lineage_goes_from_checkpoint_to_task_and_back(db: duckdb.DuckDBPyConnection) -> None:
    forward = """
        SELECT DISTINCT rollout_id, task_id, repo, teacher, agent_id, turn, weight FROM lineage
        WHERE checkpoint_id = 'sft1' AND turn = 0 ORDER BY ALL
    """
    assert rows(db, forward) == [("r1", "t1", "harbor", "strong", a, 0, 12.0) for a in ("agent1", "agent2")]
    back = (
        "SELECT DISTINCT experiment, checkpoint_id, via_checkpoint_id FROM lineage WHERE rollout_id = '{}' ORDER BY ALL"
    )
    # r1 trained `strong`, and through its checkpoint also what started from it.
    assert rows(db, back.format("r1")) == [
        ("follow_up", "sft2", "sft1"),
        ("reinforced", "rl1", "sft1"),
        ("strong", "sft1", "sft1"),
        ("strong", "sft1-100", "sft1-100"),
    ]
    # The data set of `follow_up` holds r2 by now; what trained its checkpoint is r3.
    assert rows(db, "SELECT DISTINCT rollout_id FROM dataset_rows WHERE experiment = 'follow_up'") == [("r2",)]
    assert rows(db, back.format("r3")) == [("follow_up", "sft2", "sft2")]
    assert rows(db, back.format("r2")) == []
    trust = "SELECT DISTINCT verdict_trust FROM lineage WHERE rollout_id = '{}'"
    assert [rows(db, trust.format(name)) for name in ("r1", "r3")] == [[("blind",)], [(None,)]]
    held_back = "SELECT count(*) FROM lineage WHERE origin = 'set' AND agent_id = 'agent2' AND turn = 2"
    assert rows(db, held_back) == [(0,)], "val rows train nothing"


def test_experiments_that_share_a_training_are_traced_to_their_own_rows(tmp_path: Path) -> None:
    lake = small_lake.make(tmp_path / "data")
    # The same sequences, and so the same checkpoint, in a data set that dropped more.
    dropped = {"stage": "dataset", "rollout_id": "r9", "agent_id": "a", "turn": 0, "reason": "over_max_length"}
    other = small_lake.put(lake, "upweighted_dataset", "zz", {**small_lake.dataset("r1"), "dropped": [dropped]}).version
    tuned = small_lake.checkpoint("sft1", "zz", "sft", parent_id="base0", dataset_version=other, seed=0, step=200)
    small_lake.put(lake, "sft_checkpoint", "zz", {"checkpoints": [tuned]})
    # Each experiment records the rollouts of the same reinforcement under ids of its own.
    sample = {"rollout_id": "z-0", "task_id": "t1", "seed": 0, "step": 0, "place": 0, "reward": 1.0, "advantage": 0.7}
    attempt = small_lake.rollout("z-0", "sft1", origin="rl", experiment="zz", seed=0)
    same = small_lake.checkpoint("rl1", "zz", "rl", parent_id="sft1", seed=0, step=1)
    tables = {"checkpoints": [same], "rl_samples": [sample], "rollouts": [attempt], **small_lake.conversation("z-0")}
    small_lake.put(lake, "rl_checkpoint", "zz", tables)
    with catalog.connect(catalog.build(lake, GRAPH.values(), tmp_path / "c.duckdb")) as db:
        traced = "SELECT experiment, rollout_id, count(*) FROM lineage WHERE checkpoint_id = 'rl1' GROUP BY ALL"
        assert sorted(rows(db, traced)) == [
            *(("reinforced", "r1", 5), ("reinforced", "s-0", 6), ("reinforced", "s-1", 6)),
            *(("zz", "r1", 5), ("zz", "z-0", 6)),
        ]
        assert rows(db, "SELECT count(*) FROM lineage WHERE checkpoint_id = 'sft2' AND rollout_id = 'r1'") == [(5,)]


def test_specs_become_nouns(db: duckdb.DuckDBPyConnection) -> None:
    assert rows(db, "SELECT experiment, rollout_sets, seeds, method FROM experiments WHERE experiment = 'strong'") == [
        ("strong", ["strong_set"], [0], "full")
    ]
    assert rows(db, "SELECT rollout_set, suite, teacher, k FROM rollout_sets ORDER BY ALL") == [
        ("strong_set", "coop", "strong", 2),
        ("weak_set", "coop", "weak", 2),
    ]
    assert rows(db, "SELECT suite, family FROM suites") == [("coop", "coop_tiny_shared")]


def test_checks_and_versions_show_blocked_versions(db: duckdb.DuckDBPyConnection) -> None:
    outcomes = "SELECT asset, key, state, check_name, passed, blocking, message FROM checks ORDER BY check_name DESC"
    gate, balance = rows(db, outcomes)
    assert gate == (
        "upweighted_dataset", "blocked", "blocked", "teacher_gate", False, True,
        "plan_first of the teacher is 0.13, below 0.7; choose another",
    )  # fmt: skip
    assert balance[3:6] == ("role_balance", True, False)
    (version, blocked) = rows(
        db, "SELECT version, blocked_version FROM versions WHERE key = 'blocked' AND asset LIKE 'up%'"
    )[0]
    assert version is None and blocked is not None
    assert rows(db, "SELECT count(*) FROM dataset_rows WHERE experiment = 'blocked'") == [(0,)], "no consumer sees it"
    states = "SELECT state, count(*) FROM manifests WHERE key = 'follow_up' AND asset = 'tito_pairs' GROUP BY ALL"
    assert sorted(rows(db, states)) == [("current", 1), ("past", 1)]


def test_times_are_utc_and_views_have_comments(db: duckdb.DuckDBPyConnection) -> None:
    assert str(rows(db, "SELECT DISTINCT turns.at FROM turns")[0][0]) == "2026-01-02 03:04:05+00:00"
    uncommented = "SELECT view_name FROM duckdb_views() WHERE schema_name = 'main' AND NOT internal AND comment IS NULL"
    assert rows(db, uncommented) == []


def test_small_tables_outlive_the_lake(tmp_path: Path) -> None:
    lake = small_lake.make(tmp_path / "data")
    path = build(lake)
    (tmp_path / "data").rename(tmp_path / "gone")
    with catalog.connect(path) as db:
        assert rows(db, "SELECT count(*) FROM metrics") == [(9,)] and rows(db, "SELECT count(*) FROM leaderboard") == [
            (1,)
        ]
        assert rows(db, "SELECT count(*) FROM checkpoints") == [(6,)]
        with pytest.raises(duckdb.IOException):
            rows(db, "SELECT count(*) FROM turns")


@pytest.mark.parametrize("move", [shutil.copytree, shutil.move])
@pytest.mark.parametrize(
    ("lake", "file"), [("lake", "lake/etpi.duckdb"), ("data", "data/etpi.duckdb"), ("data", "x.duckdb")]
)
def test_catalog_of_a_moved_or_copied_lake_is_refused_until_it_is_built_again(tmp_path: Path, move, lake, file) -> None:
    small_lake.publish(first := Lake(tmp_path / "first" / lake), inputs={})
    catalog.connect(build(first, path=tmp_path / "first" / file)).close()
    move(tmp_path / "first", other := tmp_path / "another's")
    with pytest.raises(LakeError, match="etpi run catalog"):
        catalog.connect(other / file)
    with catalog.connect(build(Lake(other / lake), path=other / file)) as db:
        assert rows(db, "SELECT count(*) FROM manifests") == [(1,)]


def test_odd_names(tmp_path: Path) -> None:
    """Keys that look like numbers stay text, quotes in paths do no harm, a path that reads as a column is refused."""
    lake = Lake(tmp_path / "it's" / "data")
    small_lake.put(lake, "selected_trajectories", "007", {"selected": [{"rollout_id": "r"}]})
    small_lake.put(lake, "upweighted_dataset", "1e3", {"sequences": [{"sequence_id": "s"}]})
    published = {"a.b": {"value": 0.2}, "pass@1": 0.3}
    small_lake.put(lake, "experiment_spec", "007", small_lake.spec("experiment", "007", "t", published=published))
    with catalog.connect(build(lake)) as db:
        assert rows(db, "SELECT experiment, rollout_id FROM selected") == [("007", "r")]
        assert rows(db, "SELECT experiment FROM sequences") == [("1e3",)]
        assert rows(db, "SELECT metric, value FROM leaderboard ORDER BY ALL") == [("a.b", 0.2), ("pass@1", 0.3)]
    for odd in ("seed=1", "all*", "which?"):
        with pytest.raises(LakeError, match=re.escape(repr(odd))):
            build(Lake(tmp_path / odd / "data"))


def test_many_files(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "data")
    for number in range(60):
        small_lake.put(lake, "selected_trajectories", f"e{number}", {"selected": [{"rollout_id": f"r{number}"}]})
    with catalog.connect(build(lake)) as db:
        assert rows(db, "SELECT count(*), count(DISTINCT experiment) FROM selected") == [(60, 60)]
        plan = rows(db, "EXPLAIN ANALYZE SELECT * FROM selected WHERE experiment = 'e7'")[0][1]
        assert "Total Files Read: 1" in plan, "a question about one experiment reads its files alone"


# --- prompts come back ---------------------------------------------------------------------------------------------


def prompts_by(db: duckdb.DuckDBPyConnection, sql: str) -> small_lake.Prompts:
    table = db.sql(sql).to_arrow_table()
    columns = [table.column(name).to_pylist() for name in ("rollout_id", "agent_id", "turn", "ids")]
    result = {(r, a, t): ids for r, a, t, ids in zip(*columns, strict=True)}
    assert len(result) == table.num_rows
    return result


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32), rollouts=st.integers(1, 6), turns=st.integers(1, 9),
    fork=st.sampled_from([0.0, 0.3, 1.0]), captured=st.sampled_from([1.0, 0.7]), shuffled=st.booleans(),
)  # fmt: skip
def test_branching_prompts_are_rebuilt_exactly(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    rollouts: int,
    turns: int,
    fork: float,
    captured: float,
    shuffled: bool,
) -> None:
    rng = random.Random(seed)
    stored, prompts = small_lake.random_turns(rng, rollouts, turns, fork, captured=captured)
    if shuffled:
        rng.shuffle(stored)
    lake = Lake(tmp_path_factory.mktemp("lake") / "data")
    # The same rollouts in two places must not run into each other.
    small_lake.put(lake, "raw_rollouts", "one", {"turns": stored})
    small_lake.put(lake, "eval_rollouts", "two", {"turns": stored})
    small_lake.put(lake, "eval_rollouts", "three", {"turns": stored})
    pairs = [
        {name: row[name] for name in row if name != "prompt_tokens"} | {"pair_id": str(number)}
        for number, row in enumerate(stored)
        if row["suffix_ids"] is not None
    ]
    small_lake.put(lake, "tito_pairs", "e", {"pairs": pairs})
    with catalog.connect(build(lake)) as db:
        for part in ("rollout_set = 'one'", "experiment = 'two'", "experiment = 'three'"):
            asked = f"SELECT rollout_id, agent_id, turn, prompt_ids AS ids FROM full_turns WHERE {part}"
            assert prompts_by(db, asked) == prompts
        asked = "SELECT rollout_id, agent_id, turn, input_ids AS ids FROM tito_pairs"
        assert prompts_by(db, asked) == {key: ids for key, ids in prompts.items() if ids is not None}


def test_prompt_that_cannot_be_rebuilt_is_null_and_fails_a_check(tmp_path: Path) -> None:
    key = {"rollout_id": "r", "agent_id": "a", "capture": "native", "prompt_tokens": 1}
    broken = [
        key | {"turn": 0, "suffix_ids": [1], "output_ids": None},
        key | {"turn": 1, "suffix_ids": [2], "output_ids": [3], "prefix_turn": 0},  # the extended output is unknown
        key | {"turn": 2, "suffix_ids": [4], "output_ids": [5], "prefix_turn": 9},  # no such turn
        key | {"turn": 3, "suffix_ids": [6], "output_ids": [7], "prefix_turn": 2},  # extends what cannot be rebuilt
        key | {"turn": 4, "suffix_ids": [8], "output_ids": [9], "prefix_turn": 5},  # extends a later turn
        key | {"turn": 5, "suffix_ids": [8], "output_ids": [9]},
    ]
    lake = Lake(tmp_path / "data")
    small_lake.put(lake, "raw_rollouts", "s", {"turns": broken})
    path = build(lake)
    with catalog.connect(path) as db:
        assert rows(db, "SELECT prompt_ids FROM full_turns ORDER BY turn") == [
            ([1],),
            (None,),
            (None,),
            (None,),
            (None,),
            ([8],),
        ]
    outcomes = {outcome.name: outcome for outcome in catalog.verify(path)}
    assert not outcomes["prompts_come_back"].passed and outcomes["prompts_come_back"].message.startswith("4 found")
    assert not outcomes["turns_have_rollouts"].passed
    assert not any(outcome.blocking for outcome in outcomes.values())


def test_rows_pairs_and_checkpoints_that_lost_what_they_came_from_fail_their_checks(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "data")
    key = {"rollout_id": "r", "agent_id": "a", "turn": 0, "pair_id": "r/a/0"}
    lost = {"dataset_row_id": "d", **key, "pair_id": "lost", "split": "train"}
    small_lake.put(
        lake, "tito_pairs", "e", {"pairs": [{**key, "suffix_ids": [1], "output_ids": [2], "input_tokens": 2}]}
    )
    small_lake.put(lake, "upweighted_dataset", "e", {"dataset_rows": [lost]})
    checkpoint = {"checkpoint_id": "c", "role": "sft", "seed": 0, "dataset_version": "pruned"}
    small_lake.put(lake, "sft_checkpoint", "e", {"checkpoints": [checkpoint]})
    failed = {outcome.name for outcome in catalog.verify(build(lake)) if not outcome.passed}
    assert failed == {"inputs_come_back", "rows_have_pairs", "checkpoints_have_lineage"}


def test_a_sound_lake_passes_every_check(path: Path) -> None:
    outcomes = catalog.verify(path)
    assert len(outcomes) >= 5 and all(outcome.passed for outcome in outcomes)


def test_prompts_of_many_turns_are_rebuilt_whole(tmp_path: Path) -> None:
    """20,000 turns in chains of 12: 13 million ids in all prompts, and one rollout's alone."""
    rng = random.Random(0)
    stored, prompts = small_lake.random_turns(rng, 1112, 12, 0.0, ids=100)
    lake = Lake(tmp_path / "data")
    small_lake.put(lake, "raw_rollouts", "s", {"turns": stored})
    assert len(stored) > 20_000
    with catalog.connect(build(lake)) as db:
        (count,) = rows(db, "SELECT sum(len(prompt_ids)) FROM full_turns")[0]
        assert count == sum(len(ids) for ids in prompts.values() if ids is not None)
        ids_of_one = rows(db, "SELECT prompt_ids FROM full_turns WHERE rollout_id = 'r77' ORDER BY agent_id, turn")
        assert [ids for (ids,) in ids_of_one] == [ids for key, ids in sorted(prompts.items()) if key[0] == "r77"]


# --- the file ------------------------------------------------------------------------------------------------------


def in_another_process(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "import duckdb, sys, time\n" + code, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n", process.communicate()[1]
    return process


def test_readers_are_never_blocked(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "data")
    small_lake.put(lake, "selected_trajectories", "a", {"selected": [{"rollout_id": "r1"}]})
    path = build(lake)
    code = """
db = duckdb.connect(sys.argv[1], read_only=True)
print("open", flush=True)
sys.stdin.readline()
print(db.sql("SELECT list(rollout_id) FROM selected").fetchall())
"""
    command = [sys.executable, "-c", "import duckdb, sys\n" + code, str(path)]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None and reader.stdout.readline() == "open\n"
    mine = catalog.connect(path)
    small_lake.put(lake, "selected_trajectories", "a", {"selected": [{"rollout_id": "r2"}]})
    build(lake, wait_seconds=0)
    assert rows(mine, "SELECT rollout_id FROM selected") == [("r1",)], "an open connection keeps what it opened"
    mine.close()
    assert reader.communicate("go\n", timeout=20)[0] == "[(['r1'],)]\n"
    with catalog.connect(path) as db:
        assert rows(db, "SELECT rollout_id FROM selected") == [("r2",)]


def test_a_writer_is_named_and_waited_for(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "data")
    path = build(lake)
    before = path.stat().st_ino
    code = """
db = duckdb.connect(sys.argv[1])
db.execute("CREATE TABLE mine AS SELECT 1 AS x")
print("open", flush=True)
time.sleep(float(sys.argv[2]))
"""
    writer = in_another_process(code, path, 60)
    assert path.with_name("etpi.duckdb.wal").exists()
    with pytest.raises(CatalogBusy, match=rf"{writer.pid}.*-readonly etpi\.duckdb"):
        build(lake, wait_seconds=0.3)
    assert path.stat().st_ino == before and not list(tmp_path.glob(".*building*"))
    writer.kill()
    writer.communicate()
    with pytest.raises(CatalogBusy, match=r"etpi\.duckdb\.wal "):
        build(lake, wait_seconds=0)
    path.with_name("etpi.duckdb.wal").unlink()
    brief = in_another_process(code, path, 1)
    build(lake, wait_seconds=30)
    brief.communicate()
    assert path.stat().st_ino != before


def test_a_writer_in_this_process_is_found(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "data")
    with catalog.connect(build(lake), read_only=False), pytest.raises(CatalogBusy, match="this process"):
        build(lake, wait_seconds=0)


def test_a_build_that_fails_or_died_leaves_the_old_file(tmp_path: Path) -> None:
    lake = small_lake.make(tmp_path / "data")
    path = build(lake)
    (tmp_path / ".etpi.duckdb.building").write_text("half a file of a process that was killed")
    file = lake.files(Ref("tasks", "suite", "coop"), "tasks")[0]
    file.rename(tmp_path / "kept")
    with pytest.raises(DamagedFile, match=r"suite=coop/version=.*/part-0\.parquet"):
        build(lake)
    with catalog.connect(path) as db:
        assert rows(db, "SELECT count(*) FROM metrics") == [(9,)]
    (tmp_path / "kept").rename(file)
    build(lake)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "etpi.duckdb"]


def test_a_damaged_catalog_is_replaced(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "data")
    (tmp_path / "etpi.duckdb").write_bytes(os.urandom(8192))
    with catalog.connect(build(lake)) as db:
        assert "rollouts" in views(db)


def test_missing_catalog_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(LakeError, match="etpi run catalog"):
        catalog.connect(tmp_path / "etpi.duckdb")


def test_catalog_path_follows_the_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ETPI_CATALOG", raising=False)
    monkeypatch.setenv("ETPI_DATA", str(tmp_path / "data"))
    assert catalog.default_path() == tmp_path / "data" / "etpi.duckdb"
    assert catalog.default_path(Lake(tmp_path / "other" / "data")) == tmp_path / "other" / "etpi.duckdb"
    monkeypatch.setenv("ETPI_DATA", "")
    assert catalog.default_path() == Path("etpi.duckdb").resolve(), "beside ./data"
    monkeypatch.setenv("ETPI_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("ETPI_CATALOG", str(tmp_path / "x.duckdb"))
    assert build(Lake.open()) == tmp_path / "x.duckdb"


def test_tokens_read_as_text(tmp_path: Path) -> None:
    path = build(Lake(tmp_path / "data"), vocabularies={"tiny": ["a", "b"], "other": ["c"]})
    with catalog.connect(path) as db:
        assert rows(db, "FROM vocabulary ORDER BY ALL") == [("other", 0, "c"), ("tiny", 0, "a"), ("tiny", 1, "b")]


def test_every_stored_type_has_a_duckdb_type() -> None:
    for table in TABLES.values():
        for field in table.schema:
            assert catalog._type(field.type)
    with pytest.raises(KeyError):
        catalog._type(pa.float16())


@pytest.mark.parametrize(("name", "is_refused"), [("lake", True), ("tasks", True), ("etpi", False)])
def test_a_file_with_the_name_of_a_schema_is_refused(tmp_path, name, is_refused):
    file = tmp_path / f"{name}.duckdb"
    if is_refused:
        with pytest.raises(LakeError, match=rf"{name}\.duckdb .*'{name}'.*ETPI_CATALOG"):
            catalog.refuse_other_file(file, ["tasks"])
    else:
        catalog.refuse_other_file(file, ["tasks"])
