"""Files made to exhaust memory, or to lead out of the import's folder, are quarantined with the reason."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etpi_assets.importers import count_found, generic, import_runs
from etpi_assets.importers.bulk import ImportSource, import_in_bulk
from etpi_assets.tasks.family import RejectedInput
from etpi_resources import rows
from etpi_resources.rows.bounded import MOST_ROW_BYTES, MOST_VALUES

MESSAGES = [{"role": "user", "content": "list the files"}, {"role": "assistant", "content": "ls"}]
ROW = {"messages": MESSAGES}

READ = """
import json, resource, sys
from pathlib import Path
from etpi_assets.importers import import_runs
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
reasons = [getattr(item, "reason", "imported") for item in import_runs("messages", Path(sys.argv[1]))]
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({"reasons": reasons, "mib": peak / 1024}))
"""


def read_apart(path: Path) -> dict:
    """Import a file in a process of its own: the reasons, and MiB of memory above an idle process."""
    done = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def zstd_bomb(path: Path, start: bytes) -> None:
    with pa.CompressedOutputStream(str(path), "zstd") as out:
        out.write(start)
        for _ in range(48):
            out.write(b" " * (64 << 20))


def gzip_bomb(path: Path, start: bytes) -> None:
    with gzip.open(path, "wb", compresslevel=1) as out:
        out.write(start)
        for _ in range(6):
            out.write(b" " * (64 << 20))


def gzip_of_values(path: Path) -> None:
    """Small values, each of which takes twenty times its text in memory."""
    with gzip.open(path, "wb", compresslevel=1) as out:
        out.write(b'{"messages": [{}' + b",{}" * (MOST_VALUES // 2) + b"]}\n")


def parquet_of_one_page(path: Path) -> None:
    """One value of 256 MiB in a few KiB."""
    text = pa.array([" " * (256 << 20)], pa.large_string())
    pq.write_table(pa.table({"messages": text}), path, compression="zstd", use_dictionary=False)


def parquet_of_repeated_values(path: Path) -> None:
    """A value of 30 MiB that a dictionary repeats in 60 rows."""
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 60, pa.int32()), pa.array(["x" * (30 << 20)]))
    pq.write_table(pa.table({"prompt": text}), path, compression="zstd")


@pytest.mark.parametrize(
    ("name", "write", "reasons"),
    [
        (
            "lines.jsonl.zst",
            lambda p: zstd_bomb(p, json.dumps(ROW).encode() + b"\n"),
            ["imported", "decompression_bomb"],
        ),
        ("one.json.zst", lambda p: zstd_bomb(p, b"["), ["decompression_bomb"]),
        (
            "lines.jsonl.gz",
            lambda p: gzip_bomb(p, json.dumps(ROW).encode() + b"\n"),
            ["imported", "too_large"],
        ),
        ("values.json.gz", gzip_of_values, ["too_large"]),
        ("values.jsonl.gz", gzip_of_values, ["too_large"]),
        pytest.param("page.parquet", parquet_of_one_page, ["decompression_bomb"], marks=pytest.mark.slow),
    ],
)
def test_decompression_bomb_is_quarantined_within_bounded_memory(tmp_path, name, write, reasons):
    path = tmp_path / name
    write(path)
    result = read_apart(path)
    assert result["reasons"] == reasons
    assert result["mib"] < 400, result


def test_parquet_that_repeats_a_large_value_is_read_in_bounded_memory(tmp_path):
    path = tmp_path / "repeated.parquet"
    parquet_of_repeated_values(path)
    assert path.stat().st_size < 1 << 20
    result = read_apart(path)
    assert len(result["reasons"]) == 60 and result["mib"] < 900, result


def test_reading_parquet_may_take_little_memory_even_if_its_footer_lies():
    with rows._headroom(64 << 20), pytest.raises(MemoryError):
        bytearray(512 << 20)
    assert len(bytearray(512 << 20)) == 512 << 20, "the limit ends with the block"


def test_long_line_is_quarantined_and_the_next_row_imported(tmp_path):
    path = tmp_path / "long.jsonl"
    with path.open("wb") as out:
        out.write(json.dumps(ROW).encode() + b"\n")
        out.seek(MOST_ROW_BYTES + (20 << 20), 1)  # a sparse line of zeros
        out.write(b"\n" + json.dumps(ROW).encode() + b"\n")
    result = read_apart(path)
    assert result["reasons"] == ["imported", "too_large", "imported"] and result["mib"] < 900, result


def test_compressible_but_honest_rows_are_imported(tmp_path):
    """Rows that repeat a long history compress well, and are no bomb."""
    path = tmp_path / "rows.jsonl.gz"
    row = json.dumps({"messages": [{"role": "user", "content": "the same words " * 4000}, *MESSAGES[1:]]})
    with gzip.open(path, "wt") as out:
        for _ in range(100):
            out.write(row + "\n")
    assert [isinstance(item, RejectedInput) for item in import_runs("messages", path)] == [False] * 100


def test_link_out_of_the_folder_is_quarantined(tmp_path):
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    for folder in (outside, inside):
        (folder / "own.jsonl").write_text(json.dumps(ROW) + "\n")
    (inside / "linked.jsonl").symlink_to(outside / "own.jsonl")
    (inside / "within.jsonl").symlink_to(inside / "own.jsonl")
    items = list(import_runs("messages", inside))
    refused = {item.source: item.reason for item in items if isinstance(item, RejectedInput)}
    assert refused == {"linked.jsonl": "link_outside"} and len(items) == count_found("messages", inside) == 3
    (tmp_path / "root").symlink_to(inside)
    assert len(list(import_runs("messages", tmp_path / "root"))) == 3, "the user named this link"


def test_empty_folder_with_a_named_format_is_refused_by_name(tmp_path):
    (tmp_path / "runs").mkdir()
    source = ImportSource("messages", str(tmp_path / "runs"), {}, "set", None)
    with pytest.raises(FileNotFoundError, match="runs .*messages"):
        import_in_bulk(source, tmp_path / "spill", hashes={})


@pytest.mark.parametrize("field", ["returncode", "timestamp"])
def test_one_bad_row_never_ends_an_import(tmp_path, field):
    path, huge = tmp_path / "rows.jsonl", int("9" * 400)
    bad = {"messages": [*MESSAGES, {"role": "tool", "content": "x", "extra": {field: huge}}]}
    path.write_text("".join(json.dumps(row) + "\n" for row in (ROW, bad, ROW)))
    source = ImportSource("messages", str(path), {}, "set", None)
    created = import_in_bulk(source, tmp_path / "spill", hashes={}, workers=1)
    rows = {table: [row for batch in batches for row in batch.to_pylist()] for table, batches in created.tables.items()}
    assert created.total == 3 == len(rows["rollouts"]) + len(rows["quarantined"])
    assert [row["reason"] for row in rows["quarantined"]] == ["unconvertible"] * (field == "returncode")


def test_error_that_no_reader_expects_refuses_its_row_alone(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": MESSAGES, "number": n}) + "\n" for n in range(3)))
    real = generic.fill_agent
    calls = []

    def failing(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError("of a reader")
        return real(*arguments, **options)

    monkeypatch.setattr(generic, "fill_agent", failing)
    items = list(import_runs("messages", path))
    (refused,) = [item for item in items if isinstance(item, RejectedInput)]
    assert (refused.reason, refused.row) == ("unconvertible", 1) and len(items) == 3


def test_loop_of_links_and_fifo_do_not_end_an_import(tmp_path):
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "b.jsonl")
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "a.jsonl")
    (tmp_path / "own.jsonl").write_text(json.dumps(ROW) + "\n")
    os.mkfifo(tmp_path / "fifo.jsonl")
    items = list(import_runs("messages", tmp_path))
    assert sum(not isinstance(item, RejectedInput) for item in items) == 1
