"""Configurations of published models, and random checkpoints of two layers in their architecture."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from etpi.models import ARCHITECTURES, published_config, rehearsed_as, small_settings
from etpi_assets.specs.load import SpecError
from etpi_assets.specs.paths import expand
from etpi_assets.specs.training import BaseSection
from etpi_resources.chat.format import load_chat_format
from etpi_resources.checkpoints import HUB, cached_file, hub_file, text_settings
from etpi_resources.lake.lake import folder_hash
from etpi_resources.outside import read_object
from etpi_resources.packages import PACKAGE, package_folder


def configuration(model: str) -> Mapping[str, Any] | None:
    """Return the configuration of a model, its text part; None if it cannot be read here.

    Args:
        model: hub:REPO@COMMIT, package:NAME==VERSION@SHA256, or a folder.
    """
    if model.startswith(HUB):
        repo, _, commit = model.removeprefix(HUB).partition("@")
        if known := published_config(repo):
            return known
        file = hub_path(repo, commit, "config.json")
    else:
        file = (package_folder(model) if model.startswith(PACKAGE) else expand(model)) / "config.json"
    if file is None or not file.is_file():
        return None
    config = read_object(file)
    quantised = {key: config[key] for key in ("quantization_config",) if key in config}
    return {**text_settings(config), **quantised}


def is_hybrid(base: BaseSection) -> bool:
    """Return whether a base has linear attention (Qwen3.5 and 3.6)."""
    config = None if base.kind in ("tiny", "none") else configuration(base.model)
    return config is not None and str(config.get("model_type", "")).startswith("qwen3_5")


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
    from huggingface_hub import constants

    if cached := cached_file(repo, revision, name):
        return cached
    try:
        return None if constants.HF_HUB_OFFLINE or not _hub_reachable() else hub_file(repo, revision, name)
    except OSError:
        return None


def architecture(model: str) -> str:
    """Return a model's value of ARCHITECTURES. Raises SpecError: its configuration is not here, or not known."""
    config = configuration(model)
    if config is None:
        raise SpecError(f"{model}: its config.json is not here and the hub cannot be reached; run `etpi fetch` first")
    kind = str(config.get("model_type", ""))
    if (kind := rehearsed_as(kind)) not in ARCHITECTURES:
        raise SpecError(
            f"the architecture of {model} cannot be rehearsed: {kind} is none of {', '.join(ARCHITECTURES)}"
        )
    return kind


def small_config(kind: str, sizes: Mapping[str, Any]) -> Any:
    """Return the configuration of a small model. Args: kind: one of ARCHITECTURES. sizes: those that all share."""
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **sizes, **small_settings(kind, sizes["vocab_size"]))


def make_student(folder: Path, kind: str, tokenizer: str, template: str | None) -> str:
    """Save a random model with a vocabulary and template, once; return the hash of its folder.

    Args:
        kind: one of ARCHITECTURES.
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
