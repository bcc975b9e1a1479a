"""Runs that are killed at random moments end as an undisturbed one; `make test-long` kills more, in every stage."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from etpi_resources.lake.lake import Lake, Ref
from tests.support.small_lake import make, put, score

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_lake_after_a_kill_equals_an_undisturbed_one(tmp_path):
    command = [sys.executable, "bench/kill.py", "1", "--only", "kill_data", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0 and "1 kills" in done.stdout, done.stdout + done.stderr


@pytest.fixture
def kill(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("kill")


def test_equal_lakes_have_no_differences(kill, tmp_path):
    make(tmp_path / "one"), make(tmp_path / "two")
    assert list(kill.differences(tmp_path / "one", tmp_path / "two")) == []


def test_a_doubled_row_is_a_difference(kill, tmp_path):
    make(tmp_path / "one")
    lake = make(tmp_path / "two")
    rows = lake.read(Ref("scored_rollouts", "rollout_set", "strong_set"), "scores").to_pylist()
    put(lake, "scored_rollouts", "strong_set", {"scores": [*rows, rows[0]]})
    assert any("scores has 3 rows, 2 undisturbed" in line for line in kill.differences(tmp_path / "one", lake.root))


def test_a_missing_step_of_a_training_is_a_difference(kill, tmp_path):
    steps = [{"experiment": "strong", "role": "sft", "step": step, "epoch": 0.0} for step in (1, 2, 3)]
    for name, log in (("one", steps), ("two", [steps[0], steps[2]])):
        put(make(tmp_path / name), "sft_checkpoint", "strong", {"training_log": log})
    (line,) = kill.differences(tmp_path / "one", tmp_path / "two")
    assert "training_log has 2 rows, 3 undisturbed" in line


def test_a_flipped_byte_and_a_living_process_are_faults(kill, tmp_path, monkeypatch):
    lake = Lake(tmp_path / "lake")
    put(lake, "scored_rollouts", "strong_set", {"scores": [score("r1", 1.0, True)]})
    assert list(kill.faults(lake.root)) == []
    path = lake.files(Ref("scored_rollouts", "rollout_set", "strong_set"), "scores")[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    monkeypatch.setattr(kill, "GRACE", 0.2)
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()", lake.root], stdin=-1) as process:
        lines = list(kill.faults(lake.root))
        assert len(lines) == 2 and "still running" in lines[0] and "damaged" in lines[1]
        process.communicate()


def test_a_rollout_with_another_start_was_rolled_out_again(kill, tmp_path):
    journal = tmp_path / "scratch" / "rollouts" / "journal-0.jsonl"
    journal.parent.mkdir(parents=True)
    line = {"key": "r1", "rows": {"rollouts": [{"started_at": "2026-01-02"}]}}
    journal.write_text(json.dumps(line) + "\n")
    assert list(kill.again(tmp_path, {"r1": "2026-01-02"})) == []
    assert list(kill.again(tmp_path, {"r1": "2026-01-01"})) == ["rolled out again: r1"]
