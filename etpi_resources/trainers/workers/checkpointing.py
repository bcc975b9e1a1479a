"""Load and save checkpoints, and compare models with their base and with saved files.

A checkpoint folder is a Hugging Face model (safetensors, config, tokenizer, chat template); a LoRA checkpoint is the
merged model, with the adapter in `adapter/`. A checkpoint's content hash is its identity, so the same training writes
the same bytes: no time, path or machine name enters a file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from etpi_resources.chat.tokenizer_files import copy_tokenizer
from etpi_resources.trainers.contracts import LoraSettings


def load_model(folder: str | Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> PreTrainedModel:
    """Return a causal language model from a folder of safetensors, in `dtype`, on `device`.

    Its attention is `sdpa`, or `eager` for a model without (gpt-oss). On a GPU each tensor goes there from the file, so
    the host holds no copy.
    """
    placed = {} if torch.device(device).type == "cpu" else {"device_map": {"": device}}
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, use_safetensors=True, local_files_only=True, **placed
    )


def device_with_room(folder: str | Path, device: torch.device) -> torch.device:
    """Return `device` if it has the memory for the weights in a folder besides what it holds; else the CPU."""
    if device.type == "cpu":
        return device
    torch.cuda.empty_cache()
    size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    return device if torch.cuda.mem_get_info(device)[0] > 1.1 * size else torch.device("cpu")


def stored_dtype(folder: str | Path) -> torch.dtype:
    """Return the dtype in a model folder's config; checkpoints trained from it are saved in the same dtype."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    dtype = config.get_text_config().dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def save_model(
    model: PreTrainedModel,
    folder: Path,
    dtype: torch.dtype,
    tokenizer: Path,
    chat_template: str | None,
    end_ids: Sequence[int] = (),
) -> None:
    """Save weights in `dtype`, the config, and copies of the tokenizer's files in the folder `tokenizer`.

    Args:
        chat_template: the template that the dataset was rendered with; None keeps the tokenizer's own.
        end_ids: ids that generation stops at, besides those of the model's own configuration.
    """
    generation: Any = model.generation_config
    known = [generation.eos_token_id] if isinstance(generation.eos_token_id, int) else generation.eos_token_id or []
    if missing := [i for i in end_ids if i not in known]:
        generation.eos_token_id = [*missing, *known]
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
    copy_tokenizer(tokenizer, folder)
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)


def lora_config(settings: LoraSettings) -> Any:
    """Return PEFT's config of the adapter of a causal language model that a training section asks for."""
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=settings.target_modules,
    )


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


def attach_adapter(
    base: str | Path, adapter: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Any:
    """Return a PEFT model: the base in `dtype` with a float32 adapter read from disk."""
    from peft import PeftModel

    return PeftModel.from_pretrained(load_model(base, dtype, device), adapter).eval()


def zero_adapters(folder: Path) -> tuple[list[str], int]:
    """Return the names of the adapter's B matrices that are all zero (without effect), and the number of B matrices."""
    tensors = load_file(folder / "adapter_model.safetensors")
    up = [name for name in tensors if "lora_B" in name or "lora_embedding_B" in name]
    return [name for name in up if not tensors[name].any()], len(up)


def changes_from_base(
    model: torch.nn.Module, base: torch.nn.Module, dtype: torch.dtype
) -> tuple[list[str], int, float]:
    """Compare trained tensors with the base's, which are stored in `dtype`.

    Returns:
        The names of trained tensors that equal the base's in float32; how many are trained; and the share of their
        entries that differ in that dtype, which is what a checkpoint keeps.
    """
    before = base.state_dict()
    trained = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    same, entries, changed = [], 0, 0
    for name, tensor in trained.items():
        old, new = before[name], tensor.detach().cpu()
        if torch.equal(new.float(), old.float()):
            same.append(name)
        entries, changed = entries + old.numel(), changed + int((new.to(dtype) != old.to(dtype)).sum())
    return same, len(trained), changed / max(1, entries)


def merged_share(model: Any, merged: torch.nn.Module, dtype: torch.dtype) -> float:
    """Return the share of entries that merging changed in the weights below an adapter, in the stored dtype.

    Args:
        model: the PEFT model. merged: another copy of it, merged.
    """
    after, entries, changed = dict(merged.named_parameters()), 0, 0
    for name, weight in model.get_base_model().named_parameters():
        if ".base_layer." in name:
            old, new = (w.detach().cpu().to(dtype) for w in (weight, after[name.replace(".base_layer.", ".")]))
            entries, changed = entries + old.numel(), changed + int((new != old).sum())
    return changed / max(1, entries)


@torch.no_grad()
def logits_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return logits (B, L, vocabulary) in float32 on the CPU, for ids (B, L), computed in the dtype of the weights.

    The forward pass is that of the model's class: a trainer's wrappers (autocast, a fused head) are passed by, so that
    a trained model and one read from disk compute alike.
    """
    bare: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore
    device = next(bare.parameters()).device
    was_training = model.training
    model.eval()
    with torch.autocast(device.type, enabled=False):
        logits = type(bare).forward(bare, input_ids=ids.to(device), use_cache=False).logits.float().cpu()
    model.train(was_training)
    return logits


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return max |a - b| over max |b|."""
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))


def differing_tensors(model: torch.nn.Module, read: torch.nn.Module, dtype: torch.dtype) -> list[str]:
    """Return the names of the model's tensors that another model, read from files in `dtype`, has otherwise."""
    saved = read.state_dict()
    return [
        name
        for name, tensor in model.state_dict().items()
        if name not in saved or not torch.equal(tensor.cpu().to(dtype).to(saved[name].dtype), saved[name].cpu())
    ]


def cast_alike(model: torch.nn.Module, read: torch.nn.Module, dtype: torch.dtype) -> None:
    """Round the model's tensors to `dtype`, in place, each kept in the dtype that the read model has for it.

    Tensors that are in no checkpoint (rotary frequencies) stay.
    """
    saved = read.state_dict()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in saved:
            tensor.data = tensor.data.to(dtype).to(saved[name].dtype)
