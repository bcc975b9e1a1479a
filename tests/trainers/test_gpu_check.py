"""The check of a GPU machine: its CPU twin runs every part that needs no server, and nothing is skipped in silence."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from etpi_resources.trainers.workers.collate import read_sequences

ROOT = Path(__file__).parents[2]


@pytest.fixture
def check(monkeypatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("gpu_check")


def test_branches_of_a_conversation_are_its_turns_with_their_histories(check, tmp_path):
    rows = importlib.import_module("gpu_parts").write_sequences(check.SMALL, tmp_path / "s.parquet")
    stored = read_sequences([tmp_path / "s.parquet"], "train", vocabulary=check.SMALL.vocabulary, longest=4096)
    assert stored.fork and set(stored.lengths().tolist()) == {check.SMALL.tree}
    branches = stored.branches()
    ends = branches.offsets[1:]
    ids = [branches.ids[a:b].tolist() for a, b in zip(branches.offsets, ends, strict=False)]
    assert sorted(ids) == sorted(row["input_ids"] for row in rows)
    trained = sum(label != -100 for row in rows for label in row["labels"])
    assert int((stored.labels != -100).sum()) == trained == len(rows) * check.SMALL.output


def test_figures_that_must_agree_stop_the_check(check):
    sft = {"loss": 6.25, "tflops": 1.0, "seconds_a_step": 1.0, "tokens_a_step": 10, "peak_gib": None}
    trl = {"loss": 6.25, "seconds_a_step": 3.0, "tokens_a_step": 40}
    compared = check.derived({"sft": sft, "trl": trl, "grpo": {"skipped": "no package trl"}}, "bf16")
    assert compared == {"sft_times_faster_than_trl": 3.0, "rows_tokens_for_tree_tokens": 4.0}
    with pytest.raises(AssertionError, match="6.25 .*5.0"):
        check.derived({"sft": sft, "trl": {**trl, "loss": 5.0}}, "bf16")


def test_part_that_lacks_a_package_or_a_gpu_is_skipped_by_name(check, monkeypatch):
    def lacking(*arguments: Any) -> Any:
        importlib.import_module("package_of_nobody")

    monkeypatch.setitem(check.PARTS, "sft", lacking)
    assert check.run_part("sft", True) == {"skipped": "no package package_of_nobody"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no GPU" in check.run_part("matmul", False)["skipped"]


@pytest.mark.long
def test_small_check_runs_on_a_cpu_and_its_figures_agree(tmp_path):
    parts = ["matmul", "sft", "trl", "grpo", "repeat", "shards"]
    command = [sys.executable, "bench/gpu_check.py", "--small", "--to", str(tmp_path / "figures.json"), *parts]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "figures.json").read_text())
    assert list(written["parts"]) == parts and written["machine"].startswith("machine: ")
    assert {"sft_times_faster_than_trl", "grpo_times_faster_than_trl", "two_processes_times_faster_than_one"} <= set(
        written["compared"]
    )
    repeat = written["parts"]["repeat"]
    assert (repeat["samples_equal_until_step"], repeat["grad_norms_equal_until_step"]) == (3, 3)
    assert written["parts"]["grpo"]["written_gb"] * 1e9 > 4 * written["parts"]["sft"]["parameters"] * 0.9
