"""Small random Qwen3 models, and adapters of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etpi_resources.chat.format import ChatFormat

RANK = 8


def qwen3(vocabulary: int, seed: int = 0, hybrid: bool = False, **changes: Any) -> Any:
    """Return a model of two layers and 512 positions; `hybrid`: a Qwen3.5, whose first layer keeps a recurrent state.

    `changes` are of its configuration.
    """
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    shape = {
        "vocab_size": vocabulary, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }  # fmt: skip
    if not hybrid:
        return Qwen3ForCausalLM(Qwen3Config(**shape | changes))
    linear = {f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads")}
    linear |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    kinds = ["linear_attention", "full_attention"]
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**shape, "layer_types": kinds, **linear, **changes}))


def make_base(folder: Path, chat: ChatFormat, positions: int = 4096) -> Path:
    """Save a model for servers, with its tokenizer and template."""
    special = {"eos_token_id": chat.end_id, "pad_token_id": chat.pad_id, "bos_token_id": None}
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128, "max_position_embeddings": positions}
    qwen3(chat.vocab_size, **sizes, **special).save_pretrained(folder)
    chat.save(folder)
    return folder


def make_adapter(base: Path, folder: Path, *, zeros: bool = False, seed: int = 1) -> Path:
    """An adapter that changes what the base says; with `zeros` one that changes nothing."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear"))
    if not zeros:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=1.0)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)  # no part of a checkpoint
    return folder
