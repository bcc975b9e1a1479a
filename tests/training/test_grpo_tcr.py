"""GRPO-TCR: its specs say what the reference states, and their trainers take them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from etpi_assets.resources import Resources
from etpi_assets.rollouts.assets import raw_rollouts
from etpi_assets.scoring.assets import scored_rollouts
from etpi_assets.scoring.rewards.attempt import Attempt
from etpi_assets.scoring.rewards.functions import check_terms, score_attempt
from etpi_assets.specs.load import SHIPPED, load_specs
from etpi_assets.specs.training import RLSection, TrainSection
from etpi_assets.tasks.assets import tasks
from etpi_assets.tasks.families import load_family
from etpi_assets.training.grpo import settings
from etpi_resources.chat.format import load_chat_format
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.trainers.workers import grpo_worker
from etpi_resources.trainers.workers.device import Compute
from etpi_resources.trainers.workers.plan import Plan
from tests.support.graph import write_spec

SPECS = load_specs()
FULL = SPECS.experiments["grpo_tcr_4b"]


def test_full_size_spec_has_the_references_settings(tmp_path):
    train, rl = FULL.train, FULL.rl
    assert (train.method, train.epochs, train.use_epoch, train.dtype) == ("full", 10, 3, "bf16")
    assert train.shards == 2 and train.gradient_checkpointing
    assert FULL.dataset.max_length == 32768 and FULL.requires != "cpu"
    assert (rl.group_size, rl.processes * rl.device_batch * rl.accumulate // rl.group_size) == (8, 4)
    assert rl.learning_rate == 1e-6
    assert (rl.clip_low, rl.clip_high, rl.beta, rl.loss) == (0.2, 0.28, 0.0, "dapo")
    assert (rl.max_prompt_tokens, rl.max_response_tokens, rl.agent.max_steps) == (2560, 10480, 16)
    suite = SPECS.suites[rl.suite]
    rows = suite.params["per_source"] * len(suite.params["sources"])
    assert (rows, rl.steps * 4) == (2000, 3 * rows)
    assert set(suite.params["licenses"]) == set(suite.params["sources"])

    arguments = grpo_worker.trainer_arguments(settings(rl), tmp_path, 0, Compute(gpu=False, dtype="bf16"))
    assert (arguments.num_generations, arguments.max_steps, arguments.learning_rate) == (8, 1500, 1e-6)
    assert rl.processes * arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps == 32
    assert (arguments.epsilon, arguments.epsilon_high, arguments.beta, arguments.loss_type) == (0.2, 0.28, 0.0, "dapo")
    assert arguments.max_completion_length == 10480


def test_full_size_spec_names_its_hardware_and_marks_library_defaults():
    assert "two GPUs of 80 GB" in FULL.notes and "FSDP" in FULL.notes

    text = (SHIPPED / "presets/tool_rl.toml").read_text()
    pinned = [line.split("=")[0].strip() for line in text.splitlines() if "library default, not stated" in line]
    assert {"learning_rate", "optimizer", "advantage_eps", "temperature", "mask_truncated"} <= set(pinned)


def test_prompt_offers_the_tool_and_fits_its_limit():
    suite = SPECS.suites["arithmetic_tiny"]
    task = next(iter(load_family(suite.family).load("s", 0, {"train": 1, "heldout": 0})))
    from etpi_assets.training.rounds import RLEnvironment, first_prompt

    chat = load_chat_format(FULL.base.tokenizer, FULL.base.chat_template)
    environment = RLEnvironment([task], load_family("answers"), None, chat)  # type: ignore[list-item,arg-type]
    text = chat.decode(first_prompt(FULL.rl, environment, task))  # type: ignore[arg-type]
    assert '"name": "code_interpreter"' in text and "<tool_call>" in text and text.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("turns", "tool_turns", "tokens", "right", "total"),
    [
        (1, 0, 100, False, -1.0), (2, 1, 100, False, -0.9), (16, 16, 7480, False, -0.6), (2, 1, 100, True, 1.0),
        (2, 1, 10480, False, -1.9), (3, 2, 8980, True, 0.5),
    ],
)  # fmt: skip
def test_both_rewards_add_up_before_the_group_is_normalised(turns, tool_turns, tokens, right, total):
    attempt = Attempt(
        "r", "t", "q", "x", turns=turns, tool_turns=tool_turns, response_tokens=tokens, outcome=float(right)
    )
    assert sum(score.weighted for score in score_attempt(attempt, FULL.rl.rewards)) == pytest.approx(total)


def test_tiny_experiment_has_the_references_settings():
    check_terms(SPECS.experiments["grpo_tcr_tiny"].rl.rewards)
    rl = SPECS.experiments["grpo_tcr_tiny"].rl
    assert (rl.clip_low, rl.clip_high, rl.beta, rl.loss, rl.group_size) == (0.2, 0.28, 0.0, "dapo", 8)
    assert rl.agent.max_steps <= 4 and 30 <= rl.steps <= 60


def test_teacher_calls_are_counted_from_recorded_turns(tmp_path):
    write_spec(tmp_path, "suites", "few", 'extends = "arithmetic_tiny"\n[params]\ntrain = 6\nheldout = 0\n')
    teacher = 'extends = "arithmetic_tiny_teacher"\nsuite = "few"\ntasks = 6\nk = 2\nengine.skill = { calls = 0.5 }\n'
    write_spec(tmp_path, "rollout_sets", "few", teacher)
    resources = Resources(lake=Lake(tmp_path / "lake"), specs_folder=tmp_path)
    for definition in (tasks, raw_rollouts, scored_rollouts):
        assert not definition.execute("few", resources).manifest.blocked
    turns = resources.lake.read(Ref("raw_rollouts", "rollout_set", "few"), "turns").to_pylist()
    calls = Counter(t["rollout_id"] for t in turns if t["actions"] != "[]" and t["observation"] is not None)
    scored = resources.lake.read(Ref("scored_rollouts", "rollout_set", "few"), "agent_scores").to_pylist()
    assert {row["rollout_id"]: row["tool_turns"] for row in scored} == {
        r["rollout_id"]: calls[r["rollout_id"]] for r in turns
    }
    assert 0 < len(calls) < len(scored) == 12


def test_use_step_selects_a_checkpoint_and_is_within_the_training():
    plan = Plan((), 1, 0, 1.0, np.ones(6), np.ones(6))
    assert plan.final_step(2, None) == 2 and plan.final_step(None, None) == plan.steps
    with pytest.raises(ValueError, match=rf"train\.use_step = 99.* {plan.steps} "):
        plan.final_step(99, None)
    with pytest.raises(ValueError, match=r"train\.use_step .*train\.use_epoch "):
        TrainSection(use_step=1, use_epoch=1)
    with pytest.raises(ValueError, match=r"use_step = 3.*train\.max_steps = 2"):
        TrainSection(use_step=3, max_steps=2)
    with pytest.raises(ValueError, match=r"rl\.use_step = 3.*rl\.steps = 2"):
        RLSection(use_step=3, steps=2)
    assert "use_step" not in TrainSection().model_dump() and "use_step" not in RLSection().model_dump()


def test_use_epoch_selects_an_earlier_checkpoint():
    consumed = np.array([0.5, 1.0, 1.5, 2.0, 2.5, 3.0])
    plan = Plan((), 1, 0, 1.0, consumed, np.ones(6))
    assert (plan.step_after(1), plan.step_after(1.2), plan.step_after(3)) == (2, 3, 6)
    with pytest.raises(ValueError, match=r"train\.use_epoch = 4.* 3 "):
        plan.step_after(4)
    with pytest.raises(ValueError, match=r"use_epoch = 3.*train\.epochs = 2"):
        TrainSection(epochs=2, use_epoch=3)
    assert "use_epoch" not in TrainSection().model_dump()
