"""Load and save checkpoints, and compare models with their base and with saved files.

A checkpoint folder is a Hugging Face model (safetensors, config, tokenizer, chat template); a LoRA checkpoint is the
merged model, with the adapter in `adapter/`. A checkpoint's content hash is its identity, so the same training writes
the same bytes: no time, path or machine name enters a file.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def load_model(folder: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """Return a causal language model from a folder of safetensors, in `dtype`, on the CPU.

    Its attention is `sdpa`, or `eager` for a model without (gpt-oss).
    """
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True, local_files_only=True)


def stored_dtype(folder: str | Path) -> torch.dtype:
    """Return the dtype in a model folder's config; checkpoints trained from it are saved in the same dtype."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    dtype = config.get_text_config().dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def save_model(
    model: PreTrainedModel, folder: Path, dtype: torch.dtype, tokenizer: Path, chat_template: str | None
) -> None:
    """Save weights in `dtype`, the config, and copies of the tokenizer's files in the folder `tokenizer`.

    Args:
        chat_template: the template that the dataset was rendered with; None keeps the tokenizer's own.
    """
    converted: dict[int, torch.Tensor] = {}
    weights = {}
    for name, tensor in model.state_dict().items():
        # Tied weights must stay one tensor, or they would be stored twice.
        if tensor.data_ptr() not in converted:
            converted[tensor.data_ptr()] = tensor.detach().to("cpu", dtype)
        weights[name] = converted[tensor.data_ptr()]
    model.save_pretrained(folder, state_dict=weights, safe_serialization=True)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for name in TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copyfile(tokenizer / name, folder / name)
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)


def save_adapter(model: Any, folder: Path, base_name: str) -> None:
    """Save a PEFT model's adapter; its config names the base as `base_name`, not as a path of this machine."""
    model.save_pretrained(folder, safe_serialization=True)
    (folder / "README.md").unlink(missing_ok=True)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text()) | {"base_model_name_or_path": base_name}
    if isinstance(config["target_modules"], list):
        # PEFT keeps a set, whose order differs in every process.
        config["target_modules"].sort()
    path.write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")


def attach_adapter(base: str | Path, adapter: Path) -> Any:
    """Return a PEFT model in float32: the base with an adapter read from disk."""
    from peft import PeftModel

    return PeftModel.from_pretrained(load_model(base, torch.float32), adapter).eval()


def zero_adapters(folder: Path) -> tuple[list[str], int]:
    """Return the names of the adapter's B matrices that are all zero (without effect), and the number of B matrices."""
    tensors = load_file(folder / "adapter_model.safetensors")
    up = [name for name in tensors if "lora_B" in name or "lora_embedding_B" in name]
    return [name for name in up if not tensors[name].any()], len(up)


def unchanged(model: PreTrainedModel, base: str | Path) -> tuple[list[str], int]:
    """Return the names of trained tensors that equal the base's in float32, and the number of trained tensors."""
    before = load_model(base, torch.float32).state_dict()
    trained = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    same = [name for name, tensor in trained.items() if torch.equal(tensor.detach().float().cpu(), before[name])]
    return same, len(trained)


@torch.no_grad()
def logits_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return logits (B, L, vocabulary) in float32 on the CPU, for ids (B, L), without dropout or autocast."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    with torch.autocast(device.type, enabled=False):
        logits = model(input_ids=ids.to(device), use_cache=False).logits.float().cpu()
    model.train(was_training)
    return logits


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return max |a - b| over max |b|."""
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))


def same_weights(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> list[str]:
    """Return the names of the model's tensors that differ from a saved folder's, both in `dtype`."""
    saved = load_model(folder, dtype).state_dict()
    weights = model.state_dict()
    return [
        name
        for name, tensor in weights.items()
        if name not in saved or not torch.equal(tensor.cpu().to(dtype), saved[name])
    ]
