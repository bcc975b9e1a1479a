"""Configurations of published models, and random checkpoints of two layers in their architecture."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from etpi_assets.specs.load import SpecError
from etpi_assets.specs.paths import expand
from etpi_assets.specs.training import BaseSection
from etpi_resources.chat.format import load_chat_format
from etpi_resources.checkpoints import HUB, hub_file
from etpi_resources.lake.lake import folder_hash
from etpi_resources.packages import PACKAGE, package_folder

_SLIDING = {"head_dim": 32, "sliding_window": 256, "layer_types": ["sliding_attention", "full_attention"]}
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {"head_dim": 32},
    "qwen3_5_text": {
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "llama": {},
    "mistral": {"sliding_window": None},
    "gemma3_text": _SLIDING,
    "gemma4_text": {**_SLIDING, "global_head_dim": 32, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8},
    "glm4_moe": {
        "head_dim": 32,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 64,
    },
    "gpt_oss": {
        **_SLIDING,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default"},
    },
}
"""`model_type` -> settings of a small model beside the sizes that all have."""

_LIKE = {"qwen2": "qwen3", "qwen3_5_moe_text": "qwen3_5_text"}
"""`model_type` -> the one that is rehearsed in its place."""

_KNOWN: Mapping[str, tuple[str, int, int, int, int, int, int]] = {
    "Qwen/Qwen3-4B": ("qwen3", 2560, 36, 32, 8, 9728, 0),
    "Qwen/Qwen3-4B-Instruct-2507": ("qwen3", 2560, 36, 32, 8, 9728, 0),
    "Qwen/Qwen3-8B": ("qwen3", 4096, 36, 32, 8, 12288, 0),
    "Qwen/Qwen3-14B": ("qwen3", 5120, 40, 40, 8, 17408, 0),
    "Qwen/Qwen3.5-0.8B": ("qwen3_5_text", 1024, 24, 8, 2, 3584, 16),
    "Qwen/Qwen3.5-2B": ("qwen3_5_text", 2048, 24, 8, 2, 6144, 16),
    "Qwen/Qwen3.5-9B": ("qwen3_5_text", 4096, 32, 16, 4, 12288, 32),
    "Qwen/Qwen3.5-27B": ("qwen3_5_text", 5120, 64, 24, 4, 17408, 48),
    "Qwen/Qwen3.6-27B": ("qwen3_5_text", 5120, 64, 24, 4, 17408, 48),
}
"""Published sizes, for machines that cannot reach the hub: hidden size, layers, heads, key heads, width of the MLP,
heads of linear attention."""


def _known(repo: str) -> Mapping[str, Any] | None:
    if repo not in _KNOWN:
        return None
    kind, hidden, layers, heads, keys, inner, linear = _KNOWN[repo]
    qwen3 = kind == "qwen3"
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "intermediate_size": inner,
        "vocab_size": 151_936 if qwen3 else 248_320,
        "head_dim": 128 if qwen3 else 256,
        "tie_word_embeddings": hidden < 4096,
        **({} if qwen3 else {"linear_num_value_heads": linear}),
    }


def model_name(base: BaseSection) -> str:
    """Return the base as models are named elsewhere: hub:REPO@COMMIT, package:NAME==VERSION@SHA256, or a folder."""
    if base.kind == "hub":
        return base.name_in_hub
    return base.name_in_package if base.kind == "package" else str(base.path)


def configuration(model: str) -> Mapping[str, Any] | None:
    """Return the configuration of a model, its text part; None if it cannot be read here.

    Args:
        model: hub:REPO@COMMIT, package:NAME==VERSION@SHA256, or a folder.
    """
    if model.startswith(HUB):
        repo, _, commit = model.removeprefix(HUB).partition("@")
        if known := _known(repo):
            return known
        file = hub_path(repo, commit, "config.json")
    else:
        file = _folder(model) / "config.json"
    if file is None or not file.is_file():
        return None
    config = json.loads(file.read_text(encoding="utf-8"))
    quantised = {key: config[key] for key in ("quantization_config",) if key in config}
    return {**config.get("text_config", config), **quantised}


def is_hybrid(base: BaseSection) -> bool:
    """Return whether a base has linear attention (Qwen3.5 and 3.6)."""
    config = None if base.kind in ("tiny", "none") else configuration(model_name(base))
    return config is not None and str(config.get("model_type", "")).startswith("qwen3_5")


def is_wrapped(base: BaseSection) -> bool:
    """Return whether a hybrid base is stored below a wrapper with a vision part, as all on the hub are."""
    if not is_hybrid(base):
        return False
    return base.kind == "hub" or "text_config" in json.loads(
        (_folder(model_name(base)) / "config.json").read_text(encoding="utf-8")
    )


def _folder(model: str) -> Path:
    return package_folder(model) if model.startswith(PACKAGE) else expand(model)


@cache
def _hub_reachable() -> bool:
    """Return whether the hub answers: its client retries for half a minute a file."""
    try:
        socket.create_connection(("huggingface.co", 443), timeout=3).close()
    except OSError:
        return False
    return True


def hub_path(repo: str, revision: str, name: str) -> Path | None:
    """Return a file of a hub repository: the cached one, else downloaded where the hub answers; None if neither."""
    from huggingface_hub import constants, try_to_load_from_cache

    if isinstance(cached := try_to_load_from_cache(repo, name, revision=revision), str):
        return Path(cached)
    try:
        return None if constants.HF_HUB_OFFLINE or not _hub_reachable() else hub_file(repo, revision, name)
    except OSError:
        return None


def architecture(model: str) -> str:
    """Return the key of ARCHITECTURES for a model. Raises SpecError: its configuration is not here, or not known."""
    config = configuration(model)
    if config is None:
        raise SpecError(f"{model}: its config.json is not here and the hub cannot be reached; run `etpi fetch` first")
    kind = str(config.get("model_type", ""))
    if (kind := _LIKE.get(kind, kind)) not in ARCHITECTURES:
        raise SpecError(
            f"the architecture of {model} cannot be rehearsed: {kind} is none of {', '.join(ARCHITECTURES)}"
        )
    return kind


def small_config(kind: str, sizes: Mapping[str, Any]) -> Any:
    """Return the configuration of a small model. Args: kind: a key of ARCHITECTURES. sizes: those that all share."""
    from transformers import AutoConfig

    inputs = {"vocab_size_per_layer_input": sizes["vocab_size"]} if kind == "gemma4_text" else {}
    return AutoConfig.for_model(kind, **sizes, **ARCHITECTURES[kind], **inputs)


def make_student(folder: Path, kind: str, tokenizer: str, template: str | None) -> str:
    """Save a random model with a vocabulary and template, once; return the hash of its folder.

    Args:
        kind: a key of ARCHITECTURES.
        tokenizer, template: as `load_chat_format` takes them; a template of None is the one of the tokenizer.
    """
    if (folder / "config.json").is_file():
        return folder_hash(folder)
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    chat = load_chat_format(tokenizer, template)
    sizes = {
        "vocab_size": chat.vocab_size, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 65536,
        "tie_word_embeddings": True, "eos_token_id": chat.end_id, "bos_token_id": None, "pad_token_id": chat.pad_id,
    }  # fmt: skip
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(small_config(kind, sizes))
    partial = folder.with_name(f"{folder.name}.new")
    model.to(torch.float32).save_pretrained(partial)
    chat.save(partial)
    partial.rename(folder)
    return folder_hash(folder)
