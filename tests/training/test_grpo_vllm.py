"""Reinforcement whose rollouts a server generates: it has the weights of each step, or the run stops; it ends with it.

Without vLLM a program of the same arguments and endpoints stands in for it, over real weights (`fake_vllm`).
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from etpi_assets.training.grpo import WORKER
from etpi_resources.engines.vllm_server import PROGRAM_VARIABLE
from etpi_resources.trainers.pipes import WorkerFailed
from tests.support.reinforcement import BY_VLLM, LORA, judge, make, prepared, processes
from tests.support.tiny_training import make_speaking_base

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_speaking_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(autouse=True)
def _stand_in(tmp_path, monkeypatch):
    """What is started as vLLM."""
    root = Path(__file__).parents[2]
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    start = f'PYTHONPATH="{root}" exec {sys.executable} {root / "tests/support/fake_vllm.py"} "$@"'
    program.write_text(f"#!/bin/sh\n{start}\n")
    program.chmod(0o755)
    monkeypatch.setenv(PROGRAM_VARIABLE, str(program))


def test_an_adapter_is_rolled_out_merged_step_by_step(tmp_path, base):
    lake = prepared(tmp_path, base, **BY_VLLM, **LORA)
    outcome = make(tmp_path, lake, "rl_checkpoint")
    assert not outcome.manifest.blocked, outcome.manifest.failures
    judge(lake, base)


def test_killed_worker_ends_its_server_and_the_run_resumes(tmp_path, base):
    lake = prepared(tmp_path, base, **BY_VLLM)

    def kill() -> None:
        while not list(lake.root.glob("checkpoints/rounds/*/round-000002.jsonl")):
            time.sleep(0.02)
        [worker] = [p for p in processes(lake, base) if p.cmdline()[1:3] == ["-m", WORKER]]
        worker.kill()

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(WorkerFailed, match="signal 9"):
        make(tmp_path, lake, "rl_checkpoint")
    assert not processes(lake, base)
    outcome = make(tmp_path, lake, "rl_checkpoint")
    assert not outcome.manifest.blocked, outcome.manifest.failures
    assert outcome.metadata["seed 0"]["resumed from step"] in (1, 2, 3)
    judge(lake, base)


def test_a_server_that_keeps_its_old_weights_stops_the_run(tmp_path, base, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "deaf")
    lake = prepared(tmp_path, base, **BY_VLLM)
    with pytest.raises(WorkerFailed, match=r"(?s)step 1:.*vLLM.*rl\.engine = "):
        make(tmp_path, lake, "rl_checkpoint")
    [kept] = (lake.root / "checkpoints" / "rounds").iterdir()
    assert [path.name for path in kept.glob("*.jsonl")] == ["round-000000.jsonl"], (
        "nothing was rolled out with old weights"
    )
    assert not processes(lake, base)
