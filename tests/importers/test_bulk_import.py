"""Importing in bulk: however files are divided and whoever reads them, the rows are those of reading one by one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from etpi_assets.checks import judged
from etpi_assets.importers import bulk, import_runs
from etpi_assets.importers.bulk import ImportSource, import_in_bulk
from etpi_assets.trajectories.records import RolloutRecord
from etpi_assets.trajectories.rollout_checks import captures_outcome, counts_outcome
from etpi_assets.trajectories.tables import TABLES, to_tables
from etpi_resources.lake.parquet import write
from etpi_resources.process import pool
from etpi_resources.process.pool import WorkerDied
from tests.support.recorded_runs import PAIR_OPTIONS, native_messages, pair_run, verdict
from tests.support.rows import messages_row, write_lines


def source(root: Path, format: str = "cooperbench") -> ImportSource:
    return ImportSource(format, str(root), PAIR_OPTIONS, "old", None)


def read(
    root: Path, spill: Path, workers: int, format: str = "cooperbench"
) -> tuple[dict[str, pa.Table], bulk.BulkImport]:
    created = import_in_bulk(source(root, format), spill, hashes={"harbor_task/7/f1_f3": "h"}, workers=workers)
    tables = {
        name: pa.Table.from_batches(batches, schema)
        for name, batches in created.tables.items()
        if (schema := bulk.storage_schema(name))
    }
    return tables, created


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for number in range(60):
        where = f"run_{number:02d}/coop/harbor_task/{7 + number % 2}/f1_f3"
        talk = [native_messages(), native_messages()] if number % 3 else [[], []]
        pair_run(tmp_path / "runs", where=where, messages=talk, verdict=verdict())
    return tmp_path / "runs"


def test_workers_give_the_same_rows_as_one_process(runs: Path, tmp_path: Path) -> None:
    alone, _ = read(runs, tmp_path / "alone", 1)
    many, created = read(runs, tmp_path / "many", 2)
    for name in alone:
        assert many[name].equals(alone[name]), name
        files = [tmp_path / f"{which}.parquet" for which in ("a", "b")]
        for file, tables in zip(files, (alone, many), strict=True):
            write(name, tables[name], file)
        assert files[0].read_bytes() == files[1].read_bytes(), name
    records = [item for item in import_runs("cooperbench", runs, PAIR_OPTIONS) if isinstance(item, RolloutRecord)]
    for record in records:
        record.rollout_set = "old"
        record.task_hash = "h" if record.task_id == "harbor_task/7/f1_f3" else None
    expected = to_tables(records)
    for name in TABLES:
        assert many[name].to_pylist() == expected[name].to_pylist(), name
    assert created.total == 60 and created.figures["reasons"] == {"empty": 20} and many["quarantined"].num_rows == 20
    assert not list((tmp_path / "many").iterdir()), "what was read is gone"


def test_the_checks_of_parts_are_those_of_the_whole(runs: Path, tmp_path: Path) -> None:
    _, created = read(runs, tmp_path / "spill", 1)
    figures = created.figures
    assert judged("prompts_reconstruct", figures["prompts"]).figures == {
        "prompts": 160,
        "broken_rollouts": 0,
        "stored_ids": 320,
        "prompt_ids": 720,
    }
    assert captures_outcome(figures["capture"], live=False).figures == {
        "captures": {"native": 160},
        "turns_without_ids": 0,
    }
    outcome = counts_outcome(figures["counts"], total=created.total, quarantined=20)
    assert outcome.passed and outcome.message == "60 found = 40 rollouts + 20 quarantined."
    assert outcome.figures["messages"] == len(read(runs, tmp_path / "again", 1)[0]["messages"])
    assert not counts_outcome(figures["counts"], total=61, quarantined=20).passed
    for name in ("messages", "calls"):  # one that was read is not in the tables
        stored = {**figures["counts"]["stored"], name: figures["counts"]["stored"][name] - 1}
        assert not counts_outcome({**figures["counts"], "stored": stored}, total=60, quarantined=20).passed
    twice = {**figures["counts"], "ids": figures["counts"]["ids"] * 2}
    assert "40 rollout ids occur more than once" in counts_outcome(twice, total=100, quarantined=20).message


def test_a_large_file_is_spilled_chunk_by_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "_CHUNK_TURNS", 10)
    path = write_lines(tmp_path / "rows" / "a.jsonl", [messages_row(), {"messages": []}] * 40)
    tables, created = read(path.parent, tmp_path / "spill", 1, "auto")
    assert created.total == 80 and tables["turns"].num_rows == 80
    assert tables["turns"].column("turn").num_chunks == 12
    assert tables["quarantined"].column("row").to_pylist() == list(range(1, 80, 2))
    assert tables["rollouts"].column("sample").to_pylist() == list(range(40))


@pytest.mark.parametrize("row", [messages_row(), {"messages": []}], ids=["read", "refused"])
def test_no_more_inputs_wait_for_a_writer_than_a_chunk_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any]
) -> None:
    waiting: list[int] = []
    tables = bulk._tables
    monkeypatch.setattr(bulk, "_CHUNK_TURNS", 10)
    monkeypatch.setattr(bulk, "_tables", lambda inputs: waiting.append(len(inputs)) or tables(inputs))
    path = write_lines(tmp_path / "rows" / "a.jsonl", [row] * 100)
    assert read(path.parent, tmp_path / "spill", 1, "messages")[1].total == 100
    assert max(waiting) <= 10


PEAK = """
import resource, sys
from etpi_assets.importers.bulk import ImportSource, import_in_bulk
created = import_in_bulk(ImportSource("messages", sys.argv[1], {}, "s", None), __import__("pathlib").Path(sys.argv[2]),
    hashes={}, workers=1)
rows = sum(batch.num_rows for batches in created.tables.values() for batch in batches)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


@pytest.mark.long
def test_a_hundred_thousand_rows_are_imported_in_flat_memory(tmp_path: Path) -> None:
    """Their messages alone take 200 MiB."""

    def peak(rows: int) -> float:
        text = {"messages": [{"role": r, "content": "moor the boat " * 70} for r in ("user", "assistant")]}
        path = write_lines(tmp_path / f"{rows}.jsonl", [{**text, "id": number} for number in range(rows)])
        command = [sys.executable, "-c", PEAK, str(path), str(tmp_path / "spill")]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert peak(100_000) - peak(10_000) < 100


def test_dead_worker_names_the_file_it_was_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        write_lines(tmp_path / "rows" / f"{name}.jsonl", [messages_row()])
    monkeypatch.setattr(bulk, "_PART_UNITS", 1)
    monkeypatch.setattr(pool.sys, "executable", "/bin/false")
    with pytest.raises(WorkerDied, match=r"a\.jsonl"):
        read(tmp_path / "rows", tmp_path / "spill", 2, "messages")


def test_unknown_option_is_refused_before_reading(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [messages_row()])
    wrong = ImportSource("auto", str(tmp_path), {"tokeniser": "tiny"}, "old", None)
    with pytest.raises(ValueError, match="'tokenizer'"):
        import_in_bulk(wrong, tmp_path / "spill", hashes={})
