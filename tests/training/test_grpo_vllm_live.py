"""Reinforcement through a real vLLM on a CPU: it generates from each step's weights, full and LoRA, and ends with the
run."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from etpi_resources.chat.format import load_chat_format
from etpi_resources.process.locks import machine_locks
from tests.support.models import make_base
from tests.support.reinforcement import BY_VLLM, LORA, judge, kill_when, make, prepared, processes
from tests.support.serving import NEEDS_VLLM

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"), load_chat_format("tiny"))


def test_a_run_that_is_killed_leaves_no_server_and_goes_on_from_its_checkpoint(tmp_path, base):
    lake = prepared(tmp_path, base, **BY_VLLM)
    owned = kill_when(tmp_path, lambda: list(lake.root.glob("checkpoints/rounds/*/round-000002.jsonl")))
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
