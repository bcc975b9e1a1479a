"""Fields of TRL's arguments that change what is optimised: set by a spec, pinned, or known to have no effect."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap

import pytest

from etpi_assets.specs.load import load_shipped
from etpi_resources.trainers.workers import grpo_worker

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


def passed() -> set[str]:
    """Return the names that `trainer_arguments` passes."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(grpo_worker.trainer_arguments)))
    (call,) = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "GRPOConfig"]
    return {keyword.arg for keyword in call.keywords if keyword.arg}


def unexplained(names: set[str]) -> set[str]:
    """Return the names that are neither passed, nor pinned, nor known to have no effect."""
    known = passed() | grpo_worker.PINNED.keys() | SAMPLED_BY_ETPI | COMPUTED_BY_ETPI | WITHOUT_EFFECT
    return {name for name in names - known if not name.startswith("vllm_") and name != "use_vllm"}


def moved(defaults: dict[str, object]) -> dict[str, tuple[object, object]]:
    """Return the pinned fields whose default is another, with both values."""
    return {n: (v, defaults[n]) for n, v in grpo_worker.PINNED.items() if n in defaults and defaults[n] != v}


def test_every_field_of_trl_is_set_pinned_or_without_effect():
    from transformers import TrainingArguments
    from trl.trainer.grpo_config import GRPOConfig

    general = {field.name for field in dataclasses.fields(TrainingArguments)}
    own = {field.name for field in dataclasses.fields(GRPOConfig)} - general
    assert unexplained(own) == set(), "a new field of TRL: pass it, pin it, or name it here"
    assert unexplained(own | {"use_new_kl"}) == {"use_new_kl"}
    assert grpo_worker.PINNED.keys() <= own | general, "a field that TRL has no more"


def test_library_still_has_the_pinned_defaults():
    from trl.trainer.grpo_config import GRPOConfig

    defaults = {f.name: f.default for f in dataclasses.fields(GRPOConfig) if f.default is not dataclasses.MISSING}
    assert moved(defaults) == {}, "say in docs/rl.md what the newer library computes otherwise, then pin it"
    assert moved({**defaults, "sync_ref_model": True}) == {"sync_ref_model": (False, True)}


def test_recipe_that_claims_an_older_library_has_its_kl_term():
    claimed = [s.rl for s in load_shipped().experiments.values() if s.rl.method != "none" and s.preset == "terminal_rl"]
    assert claimed and not any(rl.use_bias_correction_kl for rl in claimed if rl.beta)
