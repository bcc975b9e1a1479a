"""Whole rehearsals: experiments run small to their end, and a fault of a spec is found before training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etpi.rehearsal import starts

FAULTY = """
extends = "tito_native_v1"
title = "An empty think block in the prompts of serving only"

[serving.untrained_kwargs]
enable_thinking = false
"""


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    # A folder that other users can enter, as sandboxes need.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "specs" / "experiments").mkdir(parents=True)
        (folder / "specs" / "experiments" / "faulty.toml").write_text(FAULTY)
        yield folder


def rehearse(home: Path, name: str) -> tuple[int, str, dict[str, Any]]:
    """Return (exit status, the page, the record) of `etpi rehearse NAME` without any data of the suites."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("ETPI_")}
    environment = {**kept, "ETPI_DATA": str(home), "ETPI_SPECS": str(home / "specs"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "etpi", "rehearse", name]
    done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, timeout=600)
    record = home / "rehearsals" / name / "rehearsal.json"
    assert record.exists(), done.stderr[-3000:]
    return done.returncode, done.stdout, json.loads(record.read_text())


def verdicts(record: dict[str, Any]) -> dict[str, str]:
    return {stage["asset"]: stage["verdict"] for stage in record["stages"]}


@pytest.mark.long
def test_reinforcement_with_tools_is_rehearsed_to_its_card(home):
    status, page, record = rehearse(home, "grpo_tcr_4b")
    assert status == 0, page
    by_asset = verdicts(record)
    assert set(by_asset.values()) == {"passes", "not applicable"} and {"rl_checkpoint", "model_card"} <= set(by_asset)
    assert "not proved  base_checkpoint of grpo_tcr_4b: the weights of Qwen/Qwen3-4B-Instruct-2507" in page
    assert "GPU time:" in page and "No fault in" in page
    assert "not proved  first_turn_parses, format_exposure" in page


@pytest.mark.long
def test_live_teacher_is_rehearsed_with_its_grammar(home):
    status, page, record = rehearse(home, "etpi_phase1")
    docker = starts.docker_answers()
    assert status == (0 if docker else 1) and ("FAULT       containers for" in page) != docker, page
    assert set(verdicts(record).values()) == {"passes", "not applicable"}
    (need,) = [line["why"] for line in record["starts"] if line["what"] == "raw_rollouts of r2e_gym_lite_phase1"]
    assert need == "a GPU that serves hub:Qwen/Qwen3.6-27B@6a9e13bd6fc8f0983b9b99948120bc37f49c13e9"


@pytest.mark.slow
def test_fault_of_a_spec_is_found_before_training(home):
    status, page, record = rehearse(home, "faulty")
    assert status == 1 and "The real run would stop at upweighted_dataset of faulty." in page
    blocks = {block["check"]: block["message"] for stage in record["stages"] for block in stage["blocks"]}
    assert "prompts of training with no think block" in blocks["generation_prompt"] and "prompt_parity" in blocks, page
    assert verdicts(record)["model_card"] == "passes"  # all faults are found in one run
