"""The structured-CoT reference at full size: it says what the card states, resolves, and asks for its hardware."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from etpi_assets.asset import AssetDefinition
from etpi_assets.planning.planner import plan
from etpi_assets.resources import HardwareMissing, Resources, require_hardware
from etpi_assets.specs.load import load_specs
from etpi_assets.training import checkpoints
from etpi_assets.training.assets import sft_checkpoint
from etpi_assets.training.sft import settings
from etpi_resources.chat.grammars import SLOTS
from etpi_resources.lake.lake import Lake
from etpi_resources.trainers.workers.checkpointing import lora_config
from etpi_resources.trainers.workers.device import Compute
from etpi_resources.trainers.workers.plan import PlanSettings, make_plan
from etpi_resources.trainers.workers.sft_worker import sft_arguments

SPECS = load_specs()
NAME = "etpi_phase1"
SPEC = SPECS.experiments[NAME]


def test_rollouts_come_from_the_base_under_the_grammar_four_per_task():
    (name,) = SPEC.rollout_sets
    result: Any = SPECS.rollout_sets[name]
    assert result.k == 4 and result.engine.kind == "vllm" and SPECS.suites[result.suite].family == "r2e"
    assert result.engine.model == f"hub:{SPEC.base.repo}@{SPEC.base.revision}" == result.agent.tokenizer
    assert result.agent.grammar and result.agent.grammar.slots == SLOTS and not result.agent.tools
    assert SPEC.select.min_reward == 1.0 and SPEC.select.shortest_correct and not SPEC.select.require
    assert not SPEC.pairs.strip_think, "the thought is what is learnt"
    assert SPEC.evaluate and SPEC.evaluate.agent.grammar is None, "the grammar is off where the student is measured"


def test_experiment_resolves_and_its_base_is_pinned(tmp_path: Path):
    assert {step.state for step in plan(NAME, SPECS, Lake(tmp_path))} == {"missing"}
    row, pinned = checkpoints.pointer(SPEC.base)
    assert pinned.passed and row["path"] == f"hub:Qwen/Qwen3.6-27B@{SPEC.base.revision}"


def test_trainer_gets_the_cards_hyper_parameters(tmp_path: Path):
    rows = SPEC.published["stated"]["trajectories"]
    train = settings(SPEC.train)
    created = make_plan(
        [6000] * rows,
        [1.0] * rows,
        [900.0] * rows,
        PlanSettings(
            epochs=train.epochs,
            max_steps=train.max_steps,
            batch_tokens=train.batch_tokens,
            micro_tokens=8192,
            batch_sequences=train.batch_sequences,
            schedule=train.schedule,
            warmup=train.warmup_ratio,
            seed=0,
        ),
    )
    assert created.accumulate == 8 and {len(batch.sequences) for batch in created.batches} == {1}
    assert created.steps == 80, "ceil(2 * 318 / 8): what is left of an epoch fills a step with the next"
    assert created.learning_rates.argmax() == pytest.approx(0.03 * created.steps, abs=1.5)
    assert created.learning_rates[-1] < 0.01
    compute = Compute(gpu=False, dtype="bf16")
    arguments = sft_arguments(
        train, tmp_path, steps=created.steps, accumulate=created.accumulate, seed=0, compute=compute
    )
    assert (arguments.learning_rate, arguments.gradient_accumulation_steps) == (2e-4, 8)
    assert arguments.optim == "adamw_8bit" and arguments.bf16 and arguments.gradient_checkpointing
    adapter = lora_config(train)
    assert (adapter.r, adapter.lora_alpha, adapter.lora_dropout) == (128, 256, 0.05)
    assert adapter.target_modules == "all-linear"
    assert SPEC.dataset.max_length == 8192


def test_missing_gpu_is_reported_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("etpi_assets.resources.ACCELERATORS", ())
    with pytest.raises(HardwareMissing, match=f"'{NAME}' .*GPU"):
        require_hardware(SPEC, NAME)
    assert isinstance(sft_checkpoint, AssetDefinition)
    with pytest.raises(HardwareMissing):
        sft_checkpoint.execute(NAME, Resources(lake=Lake(tmp_path)), lambda line: None)
