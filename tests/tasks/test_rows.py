"""Rows of suites' files: what each file holds, within bounds of bytes and values."""

from __future__ import annotations

import gzip
import json

import pytest

from etpi_assets.tasks.rows import read_rows
from etpi_resources import rows as rows_module
from etpi_resources.rows import bounded

DEEP = b"[" * 400


@pytest.mark.parametrize(
    ("name", "data", "rows"),
    [
        ("rows.jsonl", b'{"a": 1}\n\n{"a": 2}\n', [{"a": 1}, {"a": 2}]),
        ("rows.jsonl.gz", gzip.compress(b'{"a": 1}\n'), [{"a": 1}]),
        ("rows.json", b'[{"a": 1}, {"a": 2}]', [{"a": 1}, {"a": 2}]),
        ("rows.json", b'{"t1": {"a": 1}, "t2": {"a": 2}}', [{"a": 1}, {"a": 2}]),
        ("rows.json", b'{"a": 1}', [{"a": 1}]),
        ("rows.jsonl", b"[1]\n7\n", ["no JSON object", "no JSON object"]),
        ("rows.jsonl", b'{"a"\n' + DEEP + b'\n{"a": 1}\n', ["truncated_json", "too_large", {"a": 1}]),
        ("rows.json", DEEP, ["too_large"]),
        ("rows.jsonl", json.dumps({"a": [0] * 100}).encode() + b'\n{"a": 1}\n', ["too_large", {"a": 1}]),
        ("rows.jsonl", b'{"a": "' + b"x" * 1000 + b'"}\n{"a": 1}\n', ["too_large", {"a": 1}]),
        ("rows.json", b'{"a": "' + b"x" * 1000 + b'"}', ["too_large"]),
        ("rows.parquet", b"PAR1", ["bad_parquet"]),
    ],
)
def test_rows_are_read_and_the_others_named(tmp_path, monkeypatch, name, data, rows):
    monkeypatch.setattr(bounded, "MOST_VALUES", 64)
    for module in (rows_module, bounded):
        monkeypatch.setattr(module, "MOST_ROW_BYTES", 900)
    (tmp_path / name).write_bytes(data)
    read = list(read_rows(tmp_path))
    assert [place for place, _ in read] == [f"{name}:{number}" for number in range(1, len(rows) + 1)]
    for (_, row), wanted in zip(read, rows, strict=True):
        assert row == wanted if isinstance(wanted, dict) else str(row).startswith(wanted)
