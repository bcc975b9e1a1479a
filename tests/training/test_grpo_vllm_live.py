"""Reinforcement through a real vLLM on a CPU: it generates from each step's weights, full and LoRA, and ends with the
run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from etpi_resources.chat.format import load_chat_format
from etpi_resources.process.locks import machine_locks
from tests.support.models import make_base
from tests.support.reinforcement import BY_VLLM, KILLED, LORA, judge, make, prepared, processes
from tests.support.serving import NEEDS_VLLM

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"), load_chat_format("tiny"))


def test_a_run_that_is_killed_leaves_no_server_and_goes_on_from_its_checkpoint(tmp_path, base):
    lake = prepared(tmp_path, base, **BY_VLLM)
    script = KILLED
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], env=environment)
    while not list(lake.root.glob("checkpoints/rounds/*/round-000002.jsonl")):
        assert run.poll() is None, "it never came to its third round"
        time.sleep(0.05)
    owned = processes(lake, base)
    run.send_signal(signal.SIGKILL)
    run.wait()
    _, alive = psutil.wait_procs(owned, timeout=60)
    assert not alive and not processes(lake, base)
    with machine_locks().hold(lake.root / "locks" / "server.lock", wait=False):
        pass
    outcome = make(tmp_path, lake, "rl_checkpoint")
    assert not outcome.manifest.blocked, outcome.manifest.failures
    assert outcome.metadata["seed 0"]["resumed from step"] in (1, 2, 3)
    judge(lake, base)


def test_an_adapter_is_rolled_out_merged_step_by_step(tmp_path, base):
    lake = prepared(tmp_path, base, **BY_VLLM, **LORA)
    outcome = make(tmp_path, lake, "rl_checkpoint")
    assert not outcome.manifest.blocked, outcome.manifest.failures
    judge(lake, base)
