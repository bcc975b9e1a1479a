"""A small base model and sequences for the tests that train: built on the spot, a few thousand parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from etpi_resources.lake import schemas
from etpi_resources.prefix_tree import CHAIN

VOCABULARY = 64
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def make_base(folder: Path, seed: int = 0, dtype: str = "float32") -> Path:
    """A random Qwen3 model of two layers and 512 positions, stored in `dtype`, with a tokenizer beside it."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, intermediate_size=64, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w1", eos_token="w2", chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder)
    return folder


def sequence(name: str, ids: list[int], spans: list[tuple[int, int, float]], split: str = "train") -> dict:
    starts, ends, weights = zip(*spans, strict=True)
    return {
        "sequence_id": name, "split": split, "rollout_id": name, "agent_id": "agent1", "input_ids": ids, **CHAIN,
        "span_starts": list(starts), "span_ends": list(ends), "span_weights": list(weights), "rows": len(spans),
    }  # fmt: skip


def learnable(n: int, seed: int = 0, validation: int = 0) -> list[dict]:
    """Sequences of 40 to 120 tokens whose learnt spans follow a fixed rule (each token is the last one plus 3), two
    spans each, the first of weight 4."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n + validation):
        length = int(rng.integers(40, 120))
        ids = (3 + (int(rng.integers(0, 60)) + 3 * np.arange(length)) % 60).tolist()
        spans = [(length // 4, length // 2, 4.0), (length // 2 + 3, length - 2, 1.0)]
        rows.append(sequence(f"s{i}", ids, spans, "train" if i < n else "val"))
    return rows


def write(rows: list[dict], path: Path) -> Path:
    pq.write_table(schemas.from_rows("sequences", rows), path)
    return path


def naive_sums(model, rows: list[dict]):
    """(sum of w * nll, sum of w) over rows: one full forward pass a row, no padding, a loop over the tokens."""
    import torch

    nll = torch.zeros((), dtype=torch.float64)
    weight = 0.0
    for row in rows:
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0].double()
        logp = logits.log_softmax(-1)
        for start, end, w in zip(row["span_starts"], row["span_ends"], row["span_weights"], strict=True):
            for position in range(start, end):
                nll = nll - w * logp[position - 1, row["input_ids"][position]]
                weight += w
    return nll, weight


def make_speaking_base(folder: Path, seed: int = 0, hybrid: bool = False) -> Path:
    """A random Qwen3 model of two layers with the tiny vocabulary: it says nothing of sense, in real ids. Hybrid: a
    Qwen3.5, whose first layer keeps a recurrent state."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

    from etpi_resources.chat.format import load_chat_format

    chat = load_chat_format("tiny")
    torch.manual_seed(seed)
    shape: Any = {
        "vocab_size": chat.vocab_size, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64, "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }  # fmt: skip
    if hybrid:
        linear = {f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads")}
        linear |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
        kinds = ["linear_attention", "full_attention"]
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**shape, layer_types=kinds, **linear))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    model.save_pretrained(folder)
    chat.save(folder)
    return folder
