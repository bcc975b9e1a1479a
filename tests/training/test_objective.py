"""Fields of TRL's arguments that change what is optimised: set by a spec, pinned, or known to have no effect."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from typing import Any

import pytest

from etpi_assets.specs.load import load_shipped
from etpi_resources.trainers.workers import grpo_worker, sft_worker

pytestmark = pytest.mark.slow
SAMPLED_BY_ETPI = {
    "num_generations_eval", "generation_batch_size", "top_k", "min_p", "generation_kwargs", "chat_template_kwargs",
    "repetition_penalty", "cache_implementation", "max_tool_calling_iterations", "ds3_gather_for_generation",
    "use_transformers_continuous_batching", "transformers_continuous_batching_config", "use_transformers_paged",
}  # fmt: skip
"""etpi's engines sample, so TRL's own sampling never runs."""
COMPUTED_BY_ETPI = {
    "reward_weights", "multi_objective_aggregation", "scale_rewards", "mask_truncated_completions",
    "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min", "vllm_importance_sampling_cap",
}  # fmt: skip
"""Rewards, advantages, truncation and corrections come from etpi's rounds, whose settings are keys of [rl]."""
WITHOUT_EFFECT = {
    "model_init_kwargs", "trust_remote_code", "log_completions", "log_multimodal", "num_completions_to_print",
    "log_unique_prompts", "log_completions_hub_repo", "ref_model_mixup_alpha", "ref_model_sync_steps",
    "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target",
}  # fmt: skip
"""Loading, logs, and settings of what `PINNED` turns off."""
PLANNED_BY_ETPI = {
    "model_init_kwargs", "trust_remote_code", "router_aux_loss_coef", "chat_template_path", "dataset_text_field",
    "dataset_num_proc", "eos_token", "pad_token", "truncation_mode", "shuffle_dataset", "packing_strategy",
    "padding_free", "pad_to_multiple_of", "eval_packing", "assistant_only_loss", "loss_type", "activation_offloading",
}  # fmt: skip
"""Fine-tuning's rows, labels, batches and loss are those of etpi's plan."""


def _config(name: str) -> Any:
    from trl.trainer import grpo_config, sft_config

    return grpo_config.GRPOConfig if name == "GRPOConfig" else sft_config.SFTConfig


WORKERS = {
    "GRPOConfig": (grpo_worker, grpo_worker.trainer_arguments, SAMPLED_BY_ETPI | COMPUTED_BY_ETPI | WITHOUT_EFFECT),
    "SFTConfig": (sft_worker, sft_worker.sft_arguments, PLANNED_BY_ETPI),
}
"""Class of arguments -> the worker that pins its fields, the function that fills it, its fields without effect."""


def unexplained(config: str, names: set[str]) -> set[str]:
    """Return the names that are neither passed, nor pinned, nor known to have no effect."""
    worker, function, without_effect = WORKERS[config]
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    (call,) = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == config]
    passed = {keyword.arg for keyword in call.keywords if keyword.arg} | {*getattr(worker, "TRL_NAMES", {}).values()}
    left = names - passed - worker.PINNED.keys() - without_effect
    return {name for name in left if not name.startswith("vllm_") and name != "use_vllm"}


def moved(config: str, defaults: dict[str, object]) -> dict[str, tuple[object, object]]:
    """Return the pinned fields whose default is another, with both values."""
    pinned = WORKERS[config][0].PINNED
    return {n: (v, defaults[n]) for n, v in pinned.items() if n in defaults and defaults[n] != v}


@pytest.mark.parametrize("config", WORKERS)
def test_every_field_of_trl_is_set_pinned_or_without_effect(config):
    from transformers import TrainingArguments

    general = {field.name for field in dataclasses.fields(TrainingArguments)}
    of_trl = {field.name for field in dataclasses.fields(_config(config))} - general
    assert unexplained(config, of_trl) == set(), "a new field of TRL: pass it, pin it, or name it here"
    assert unexplained(config, of_trl | {"use_new_kl"}) == {"use_new_kl"}
    assert WORKERS[config][0].PINNED.keys() <= of_trl | general, "a field that TRL has no more"


@pytest.mark.parametrize("config", WORKERS)
def test_library_still_has_the_pinned_defaults(config):
    fields = dataclasses.fields(_config(config))
    defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    assert moved(config, defaults) == {}, "say in docs/rl.md what the newer library computes otherwise, then pin it"
    assert moved(config, {**defaults, "adam_beta2": 0.95}) == {"adam_beta2": (0.999, 0.95)}


def test_recipe_that_claims_an_older_library_has_its_kl_term():
    claimed = [s.rl for s in load_shipped().experiments.values() if s.rl.method != "none" and s.preset == "terminal_rl"]
    assert claimed and not any(rl.use_bias_correction_kl for rl in claimed if rl.beta)
