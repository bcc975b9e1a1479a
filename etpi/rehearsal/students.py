"""Random checkpoints of two layers with a family's architecture, real vocabulary and chat template."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from etpi_assets.specs.load import SpecError
from etpi_resources.chat.format import load_chat_format
from etpi_resources.checkpoints import hub_file
from etpi_resources.lake.lake import folder_hash

HUB = "hub:"
_SLIDING = ["sliding_attention", "full_attention"]


def _qwen3(sizes: dict[str, Any]) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**sizes, head_dim=32)


def _qwen3_5(sizes: dict[str, Any]) -> Any:
    from transformers import Qwen3_5TextConfig

    linear: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32}
    layers = ["linear_attention", "full_attention"]
    return Qwen3_5TextConfig(**sizes, head_dim=32, linear_value_head_dim=32, layer_types=layers, **linear)


def _llama(sizes: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**sizes)


def _mistral(sizes: dict[str, Any]) -> Any:
    from transformers import MistralConfig

    return MistralConfig(**sizes, sliding_window=None)


def _gemma3(sizes: dict[str, Any]) -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(**sizes, head_dim=32, sliding_window=256, layer_types=_SLIDING)


def _gemma4(sizes: dict[str, Any]) -> Any:
    from transformers import Gemma4TextConfig

    inputs: dict[str, Any] = {"vocab_size_per_layer_input": sizes["vocab_size"], "hidden_size_per_layer_input": 8}
    heads: dict[str, Any] = {"head_dim": 32, "global_head_dim": 32, "num_kv_shared_layers": 0}
    return Gemma4TextConfig(**sizes, **heads, **inputs, sliding_window=256, layer_types=_SLIDING)


def _gpt_oss(sizes: dict[str, Any]) -> Any:
    from transformers import GptOssConfig

    experts: dict[str, Any] = {
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default"},
    }
    return GptOssConfig(**sizes, head_dim=32, sliding_window=256, layer_types=_SLIDING, **experts)


ARCHITECTURES: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "qwen3": _qwen3,
    "qwen3_5": _qwen3_5,
    "llama": _llama,
    "mistral": _mistral,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gpt_oss": _gpt_oss,
}
"""Architecture -> (sizes that all share) -> configuration of a small model."""

_BY_NAME = {
    "qwen3.5": "qwen3_5", "qwen3.6": "qwen3_5", "qwen3": "qwen3", "llama": "llama", "mistral": "mistral",
    "gemma-3": "gemma3", "gemma-4": "gemma4", "gpt-oss": "gpt_oss",
}  # fmt: skip
"""Part of a repository's name -> architecture, where its configuration cannot be read; the first that occurs."""

_BY_TYPE = {
    "qwen3_5_text": "qwen3_5", "qwen3_5_moe": "qwen3_5", "gemma3_text": "gemma3", "gemma4_text": "gemma4",
    "qwen2": "qwen3",
}  # fmt: skip
"""`model_type` of a configuration -> architecture, where the two names differ."""

_TEMPLATES = {"qwen3": "qwen3", "qwen3_5": "qwen3_6"}
"""Architecture -> the template that stands in for that of a repository which cannot be reached."""


@cache
def hub_reachable() -> bool:
    """Return whether the hub answers, so that repositories which are not cached can be read."""
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return False
    try:
        socket.create_connection(("huggingface.co", 443), timeout=3).close()
    except OSError:
        return False
    return True


def tokenizer_here(name: str) -> bool:
    """Return whether a chat format's files are here, or can be downloaded."""
    if not name.startswith(HUB):
        return True
    repo, _, commit = name.removeprefix(HUB).partition("@")
    return _hub_path(repo, commit, "tokenizer.json") is not None


def published_config(repo: str, revision: str) -> Mapping[str, Any] | None:
    """Return the configuration of a repository, its text part; None if it cannot be read here."""
    file = _hub_path(repo, revision, "config.json")
    if file is None:
        return None
    config = json.loads(file.read_text(encoding="utf-8"))
    return config.get("text_config", config)


def _hub_path(repo: str, revision: str, name: str) -> Path | None:
    """Return a file of a hub repository: the cached one, else downloaded where the hub answers; None if neither."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(repo, name, revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    try:
        return hub_file(repo, revision, name) if hub_reachable() else None
    except OSError:
        return None


def architecture(model: str, config: Mapping[str, Any] | None) -> str:
    """Return the key of ARCHITECTURES for a model: by its configuration, else by its name.

    Raises:
        SpecError: neither tells a known architecture.
    """
    if config is not None:
        named = str(config.get("model_type", ""))
        kind = _BY_TYPE.get(named, named)
    else:
        kind = next((kind for part, kind in _BY_NAME.items() if part in model.lower()), "")
    if kind not in ARCHITECTURES:
        raise SpecError(
            f"the architecture of {model} cannot be rehearsed: only {', '.join(ARCHITECTURES)} are known here"
        )
    return kind


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
    model: Any = AutoModelForCausalLM.from_config(ARCHITECTURES[kind](sizes))
    partial = folder.with_name(f"{folder.name}.new")
    model.to(torch.float32).save_pretrained(partial)
    chat.save(partial)
    partial.rename(folder)
    return folder_hash(folder)


def stand_in_template(kind: str) -> str:
    """Return the template that stands in for a repository's own."""
    return _TEMPLATES.get(kind, "qwen3")
