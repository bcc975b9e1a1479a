"""The lake keeps what was published, in one state or the other, whatever dies in between."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etpi_resources.lake import parquet
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.lake import BlockedInput, Lake, LakeError, MissingInput, Ref
from etpi_resources.lake.parquet import SchemaMismatch
from etpi_resources.lake.schemas import empty, from_rows
from etpi_resources.process.locks import LockHeld
from tests.support.small_lake import PAIRS, publish, turns


def failed(message: str = "3 outputs hold a think id; run strip-think") -> CheckOutcome:
    return CheckOutcome("no_think_in_output", False, message)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path / "data")


def test_published_table_reads_back_from_the_documented_path(lake: Lake) -> None:
    manifest = publish(lake, seeds=(3,), notes={"why": "test"})
    assert lake.read(PAIRS, "turns").equals(turns(5))
    assert lake.current(PAIRS) == manifest == lake.require(PAIRS)
    assert lake.files(PAIRS, "turns") == [
        lake.root / f"tito_pairs/turns/experiment=plan_first/version={manifest.version}/part-0.parquet"
    ]
    pointer = json.loads((lake.root / "tito_pairs/experiment=plan_first/current").read_text())
    assert pointer["version"] == manifest.version
    stored = json.loads((lake.root / "tito_pairs/experiment=plan_first" / pointer["manifest"]).read_text())
    assert stored["blocked"] is False and stored["seeds"] == [3] and stored["tables"]["turns"]["rows"] == 5
    assert stored["fingerprint"]["pyarrow"] == pa.__version__
    assert lake.keys("tito_pairs", "experiment") == ["plan_first"] and lake.refs() == [PAIRS]
    assert lake.read(PAIRS, "turns", ["turn", "content"]).column_names == ["turn", "content"]
    assert not list((lake.root / ".staging").iterdir())


def test_version_depends_only_on_the_rows(lake: Lake) -> None:
    first = publish(lake)
    again = publish(lake)
    assert again == first, "publishing the same thing again is the same publication, its time included"
    other_inputs = publish(lake, input_key="k2", inputs={"raw_rollouts/s": "v2"})
    assert other_inputs.version == first.version and other_inputs.input_key == "k2"
    assert lake.current(PAIRS) == other_inputs
    assert lake.history(PAIRS) == [first, other_inputs]
    assert publish(lake, rows=6).version != first.version


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(1, 4199), max_size=6))
def test_bytes_do_not_depend_on_chunks(tmp_path_factory: pytest.TempPathFactory, cuts: list[int]) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    table = turns(4200)
    parquet.write("turns", table, folder / "whole")
    edges = sorted({0, *cuts, table.num_rows})
    pieces = [table.slice(a, b - a) for a, b in itertools.pairwise(edges)]
    batches = (batch for piece in pieces for batch in piece.to_batches())
    assert parquet.write("turns", batches, folder / "streamed") == 4200
    assert (folder / "whole").read_bytes() == (folder / "streamed").read_bytes()


def test_later_columns_that_are_null_are_not_in_the_file(tmp_path: Path) -> None:
    without = {"experiment": "e", "role": "sft", "seed": 0, "step": 1, "loss": 0.5}
    for rows, stored in ([without], False), ([without | {"weight_mean": 1.0}], True):
        path = tmp_path / f"{stored}.parquet"
        parquet.write("training_log", from_rows("training_log", rows), path)
        names = pq.read_schema(path).names
        assert ("weight_mean" in names) == stored and "staleness_max" not in names and "loss" in names
        assert parquet.read("training_log", [path]).to_pylist() == from_rows("training_log", rows).to_pylist()


def test_a_stream_is_written_with_flat_memory(tmp_path: Path) -> None:
    """Each batch has memory of its own, so a writer that keeps the batches until its end holds all of them."""
    peak = 0

    def stream() -> Iterator[pa.RecordBatch]:
        nonlocal peak
        for number in range(100):  # 200 MB of ids
            ids = np.full((256, 2000), number, np.int32)
            rows = [{"sequence_id": "s", "input_ids": row} for row in ids]
            yield from from_rows("sequences", rows).to_batches()
            peak = max(peak, pa.total_allocated_bytes())

    before = pa.total_allocated_bytes()
    assert parquet.write("sequences", stream(), tmp_path / "s.parquet") == 25_600
    assert peak - before < 80e6

    def written(batches: Iterator[pa.RecordBatch]) -> int:
        return sum(batch.nbytes for batch in list(batches))  # keeps everything, as a writer that never flushes

    before, peak = pa.total_allocated_bytes(), 0
    assert written(stream()) > 150e6 and peak - before > 150e6, "the bound would catch it"


def test_ranges_of_rows_are_those_of_the_whole_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 4)
    paths = [tmp_path / name for name in ("a.parquet", "b.parquet")]
    for path, rows in zip(paths, (10, 7), strict=True):
        parquet.write("turns", turns(rows), path)
    ranges, whole = (parquet.RowRanges("turns", paths, ["turn"]), parquet.read("turns", paths, ["turn"]))
    for start, stop in ((0, 17), (3, 4), (3, 9), (8, 12), (16, 17), (5, 5)):
        assert ranges.read(start, stop).equals(whole.slice(start, stop - start))
    assert ranges.take([1, 9, 10, 16]).equals(whole.take([1, 9, 10, 16]))


def test_table_that_does_not_fit_its_schema_raises_with_all_mismatches(lake: Lake) -> None:
    bad = turns(2).drop(["content"]).append_column("extra", pa.array([1, 2]))
    bad = bad.set_column(bad.column_names.index("turn"), "turn", pa.array(["0", "1"]))
    with pytest.raises(SchemaMismatch) as caught:
        lake.publish(PAIRS, {"turns": bad}, input_key="k", inputs={}, spec_hash="h")
    text = str(caught.value)
    missing, unknown = "'content' (string) is missing", "'extra' is not"
    for words in ("table turns", missing, unknown, "'turn': expected int32, found string", "TABLES"):
        assert words in text
    assert lake.current(PAIRS) is None and not lake.refs()
    with pytest.raises(SchemaMismatch, match="'no_such'"):
        lake.publish(PAIRS, {"no_such": turns(1)}, input_key="k", inputs={}, spec_hash="h")
    with pytest.raises(SchemaMismatch, match=r"pyarrow\.RecordBatch.* dict;"):
        lake.publish(PAIRS, {"turns": iter([{}])}, input_key="k", inputs={}, spec_hash="h")  # type: ignore[list-item]


def retyped(column: str, values: pa.Array) -> pa.Table:
    table = turns(len(values))
    return table.set_column(table.column_names.index(column), column, values)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("turn", pa.array([0, 2**31 - 1], pa.int64())),
        ("turn", pa.nulls(2)),
        ("suffix_ids", pa.array([[1, 2], None], pa.large_list(pa.int64()))),
        ("suffix_ids", pa.array([[], None], pa.list_(pa.null()))),
        ("content", pa.array(["a", "b"], pa.large_string())),
        ("content", pa.array(["a", "a"]).dictionary_encode()),
        ("at", pa.array([10**12, None], pa.timestamp("ms", tz="UTC"))),
    ],
)
def test_lossless_casts_are_made(lake: Lake, column: str, values: pa.Array) -> None:
    lake.publish(PAIRS, {"turns": retyped(column, values)}, input_key="k", inputs={}, spec_hash="h")
    assert lake.read(PAIRS, "turns", [column]).column(0).to_pylist() == values.to_pylist()


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("turn", pa.array([0, 2**31], pa.int64())),
        ("turn", pa.array([0.0, 1.0])),
        ("suffix_ids", pa.array([[2**40]], pa.list_(pa.int64()))),
        ("logprobs", pa.array([[0.1]], pa.list_(pa.float64()))),
        ("content", pa.array([1, 2])),
        ("at", pa.array([10**12], pa.timestamp("us"))),
        ("at", pa.array([1001], pa.timestamp("ns", tz="UTC"))),
    ],
)
def test_lossy_casts_are_refused(lake: Lake, column: str, values: pa.Array) -> None:
    with pytest.raises(SchemaMismatch, match=f"column '{column}': "):
        lake.publish(PAIRS, {"turns": retyped(column, values)}, input_key="k", inputs={}, spec_hash="h")


def test_failed_blocking_check_blocks_until_a_good_version(lake: Lake) -> None:
    with pytest.raises(MissingInput, match="etpi run plan_first"):
        lake.require(PAIRS)
    good = publish(lake)
    bad = publish(lake, rows=6, checks=[failed()])
    assert bad.blocked and lake.current(PAIRS) == good and lake.blocked(PAIRS) == bad
    for reach in (lambda: lake.require(PAIRS), lambda: lake.read(PAIRS, "turns"), lambda: lake.files(PAIRS, "turns")):
        with pytest.raises(BlockedInput, match="no_think_in_output: 3 "):
            reach()
    assert lake.files_of(bad, "turns")[0].exists(), "the refused version is there as evidence"
    assert publish(lake) == good, "the older good content, published again"
    assert lake.blocked(PAIRS) is None and lake.require(PAIRS) == good
    assert not (lake.root / "tito_pairs/experiment=plan_first/blocked").exists(), "gc keeps files that pointers name"


def test_only_failed_blocking_checks_block(lake: Lake) -> None:
    passed, warned = CheckOutcome("a", True, "fine"), CheckOutcome("b", False, "look at it", blocking=False)
    assert not publish(lake, checks=[passed, warned]).blocked
    blocked = publish(lake, checks=[passed, failed()])
    assert blocked.version == lake.current(PAIRS).version, "same rows, same version, another verdict"  # type: ignore[union-attr]
    with pytest.raises(BlockedInput):
        lake.require(PAIRS)


def test_stale_blocked_pointer_does_not_block(lake: Lake) -> None:
    """Dying between moving `current` and removing `blocked` leaves both; the newer publication counts."""
    publish(lake, rows=6, checks=[failed()])
    left = (lake.root / "tito_pairs/experiment=plan_first/blocked").read_text()
    publish(lake)
    (lake.root / "tito_pairs/experiment=plan_first/blocked").write_text(left)
    assert lake.blocked(PAIRS) is None
    publish(lake, rows=7, checks=[failed()])
    assert lake.blocked(PAIRS) is not None


def test_values_that_are_not_json_are_refused_before_publishing(lake: Lake) -> None:
    for bad in (object(), float("nan")):
        with pytest.raises(LakeError, match="tito_pairs .*JSON"):
            publish(lake, notes={"x": bad})
    assert lake.refs() == []


def test_names_cannot_leave_the_lake() -> None:
    for name in ("../x", "a/b", "", ".hidden", "a=b"):
        with pytest.raises(LakeError, match=re.escape(repr(name))):
            Ref("asset", "experiment", name)


def test_empty_tables_and_no_tables(lake: Lake) -> None:
    ref = Ref("rl_checkpoint", "experiment", "e")
    notes = {"not_applicable": "no RL"}
    lake.publish(ref, {"checkpoints": empty("checkpoints")}, input_key="k", inputs={}, spec_hash="h", notes=notes)
    assert lake.read(ref, "checkpoints").num_rows == 0
    catalog = Ref("catalog", "all", "all")
    assert (str(catalog), str(ref)) == ("catalog", "rl_checkpoint (experiment e)")
    first = lake.publish(catalog, {}, input_key="k", inputs={"a": "1"}, spec_hash="h")
    assert first.version != lake.publish(catalog, {}, input_key="k", inputs={"a": "2"}, spec_hash="h").version
    assert str(catalog) == "catalog" and catalog.command == "etpi run catalog"


def test_missing_file_is_named_and_publishing_again_restores_it(lake: Lake) -> None:
    publish(lake)
    path = lake.files(PAIRS, "turns")[0]
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(LakeError, match=str(path)):
        lake.read(PAIRS, "turns")
    publish(lake)
    assert lake.read(PAIRS, "turns").equals(turns(5))


def test_a_file_written_before_a_column_existed_reads_as_null(lake: Lake, tmp_path: Path) -> None:
    old = tmp_path / "old.parquet"
    pq.write_table(turns(3).select(["rollout_id", "turn"]), old)
    table = parquet.read("turns", [old])
    assert table.schema.names == empty("turns").schema.names and table.column("content").null_count == 3
    with pytest.raises(SchemaMismatch, match=r"\['nonsense'\]"):
        parquet.read("turns", [old], ["nonsense"])


def test_query_joins_tables_files_and_refs(lake: Lake) -> None:
    publish(lake, rows=8)
    wanted = pa.table({"rollout_id": ["r1"], "label": ["second"]})
    sql = "SELECT label, count(*) AS n FROM t JOIN w USING (rollout_id) GROUP BY ALL"
    assert lake.query(sql, t=(PAIRS, "turns"), w=wanted).to_pylist() == [{"label": "second", "n": 4}]
    assert lake.query("SELECT max(turn) AS m FROM f", f=lake.files(PAIRS, "turns")).to_pylist() == [{"m": 3}]


# --- processes -----------------------------------------------------------------------------------------------------

CHILD = """
import sys, time
from pathlib import Path
from tests.lake import test_lake as t
lake = t.Lake(Path({root!r}))
"""


def child(lake: Lake, body: str) -> subprocess.Popen[str]:
    code = CHILD.format(root=str(lake.root)) + body
    here = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, process.communicate()[1]
    return line


def test_killed_in_mid_publish_leaves_current_and_the_next_publish_works(lake: Lake) -> None:
    good = publish(lake)
    process = child(
        lake,
        """
def stream():
    yield from t.turns(3000).to_batches()
    print("halfway", flush=True)
    time.sleep(60)
lake.publish(t.PAIRS, {"turns": stream()}, input_key="k", inputs={}, spec_hash="h")
""",
    )
    assert wait_for_line(process) == "halfway"
    staged = list((lake.root / ".staging").glob("*/"))
    assert len(staged) == 1
    publish(lake, Ref("tito_pairs", "experiment", "other"))
    assert staged[0].exists(), "a living process's staging is left alone"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert lake.require(PAIRS) == good and lake.read(PAIRS, "turns").equals(turns(5))
    assert publish(lake, rows=6).rows == {"turns": 6}
    assert lake.read(PAIRS, "turns").num_rows == 6
    assert not list((lake.root / ".staging").iterdir()), "what the dead process left is swept"


def test_processes_publishing_at_once_all_succeed(lake: Lake) -> None:
    body = """
for i in range(8):
    t.publish(lake, rows=4 + i % 2)
    t.publish(lake, t.Ref("tito_pairs", "experiment", "shared"), rows=9)
    assert lake.read(t.PAIRS, "turns").num_rows in (4, 5)
print("done", flush=True)
"""
    processes = [child(lake, body) for _ in range(3)]
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0 and out == "done\n", err
    assert lake.read(Ref("tito_pairs", "experiment", "shared"), "turns").num_rows == 9
    assert not list((lake.root / ".staging").iterdir())


def test_locks_have_documented_files(lake: Lake) -> None:
    """Other versions of etpi and child processes take them by these paths."""
    with lake.lock("publish") as publishing, lake.machine_lock("gpu", 2) as one, lake.machine_lock("gpu", 2) as other:
        names = [held.path.relative_to(lake.root).as_posix() for held in (publishing, one, other)]
    assert names == ["locks/publish.lock", "locks/gpu.lock", "locks/gpu-1.lock"]
    assert lake.machine_lock_file("gpu-1") == other.path


def test_lock_names_its_process_and_ends_with_it(lake: Lake) -> None:
    process = child(lake, "with lake.lock('sandboxes'):\n    print('held', flush=True)\n    time.sleep(60)\n")
    assert wait_for_line(process) == "held"
    with pytest.raises(LockHeld, match=f"sandboxes .*{process.pid}"), lake.lock("sandboxes", wait=False):
        pass
    with lake.lock("accelerator", wait=False):
        pass
    told: list[str] = []

    def kill_the_holder(line: str) -> None:
        told.append(line)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()

    started = time.monotonic()
    with lake.lock("sandboxes", log=kill_the_holder):
        assert time.monotonic() - started < 30
    assert len(told) == 1 and f"waits for sandboxes that process {process.pid} " in told[0]


# --- checkpoints ---------------------------------------------------------------------------------------------------


def saved(lake: Lake, name: str, **files: str) -> Path:
    folder = lake.scratch(f"train/{name}")
    for file, text in files.items():
        path = folder / file.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_a_checkpoint_is_adopted_once_by_content(lake: Lake, flushed: list[Path]) -> None:
    first = saved(lake, "a", model_safetensors="w", adapter__config_json="{}")
    content_hash, folder = lake.adopt_checkpoint(first)
    assert sorted(flushed) == sorted([first / "model.safetensors", first / "adapter/config.json", folder.parent])
    assert folder == lake.checkpoint_dir(content_hash) and (folder / "adapter/config.json").read_text() == "{}"
    assert not first.exists()
    again = saved(lake, "b", model_safetensors="w", adapter__config_json="{}")
    assert lake.adopt_checkpoint(again) == (content_hash, folder)
    for name, files in {"bytes": {"model_safetensors": "w2"}, "name": {"other_safetensors": "w"}}.items():
        assert lake.adopt_checkpoint(saved(lake, name, adapter__config_json="{}", **files))[0] != content_hash


def test_a_checkpoint_holds_no_pickles_or_links(lake: Lake) -> None:
    for name in ("pytorch_model_bin", "optimizer_pt", "state_pkl", "weights"):
        staging = saved(lake, name, model_safetensors="w", **{name: "x"})
        with pytest.raises(LakeError, match="checkpoint"):
            lake.adopt_checkpoint(staging)
        assert staging.exists()
    linked = saved(lake, "link", model_safetensors="w")
    (linked / "secret.json").symlink_to("/etc/hostname")
    with pytest.raises(LakeError, match=r"secret\.json"):
        lake.adopt_checkpoint(linked)
    with pytest.raises(LakeError, match="scratch/nothing"):
        lake.adopt_checkpoint(lake.scratch("nothing"))


def test_nulls_survive(lake: Lake) -> None:
    publish(lake, rows=9)
    assert pc.sum(pc.is_null(lake.read(PAIRS, "turns").column("suffix_ids"))).as_py() == 3  # type: ignore[attr-defined]
