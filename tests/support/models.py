"""Small random Qwen3 models and adapters for tests against servers, with the tiny vocabulary and a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etpi_resources.chat.format import ChatFormat

RANK = 8


def make_base(folder: Path, chat: ChatFormat, positions: int = 4096) -> Path:
    """Two layers of random weights, the tokenizer and template beside them."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=chat.vocab_size, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, intermediate_size=128, max_position_embeddings=positions,
        tie_word_embeddings=True, eos_token_id=chat.end_id, pad_token_id=chat.pad_id, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
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
