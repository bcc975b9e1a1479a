"""The check of reinforcement on two GPUs: its CPU twin runs, and figures that are not expected are named."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def test_figures_that_are_not_expected_are_named(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    check: Any = importlib.import_module("gpu_two")
    line = {"staleness_max": 0, "logprob_gap": 1e-4, "kl": 0.0, "weight_mean": None}
    after = line | {"kl": 0.5}
    one = {"log": [line, after], "turns": [[1, 2]]}
    assert check.faults("ddp", one, one, 0.005) == []
    for name, value in {"staleness_max": 1, "logprob_gap": 0.1, "kl": 0.1, "weight_mean": 0.9}.items():
        assert len(check.faults("ddp", {**one, "log": [line | {name: value}, after]}, one, 0.005)) == 1
    assert len(check.faults("ddp", {**one, "log": [line, line | {"kl": 0.2}]}, one, 0.005)) == 1
    assert len(check.faults("ddp", {**one, "turns": [[1, 3]]}, one, 0.005)) == 1


@pytest.mark.long
def test_part_for_a_cpu_runs_and_is_as_expected(tmp_path) -> None:
    command = [sys.executable, "bench/gpu_two.py", "--cpu", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert {name: figures["result"] for name, figures in results.items()} == dict.fromkeys(
        ["one", "ddp"], "as expected"
    )
