"""A small base model and sequences for the tests that train: built on the spot, a few thousand parameters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from etpi_resources.lake import schemas
from etpi_resources.prefix_tree import CHAIN
from tests.support.models import qwen3

VOCABULARY = 64
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def make_base(folder: Path, seed: int = 0, dtype: str = "float32") -> Path:
    """A random Qwen3 model of two layers and 512 positions, stored in `dtype`, with a tokenizer beside it."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    qwen3(VOCABULARY, seed).to(getattr(torch, dtype)).save_pretrained(folder)
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
    from etpi_resources.chat.format import load_chat_format

    chat = load_chat_format("tiny")
    qwen3(chat.vocab_size, seed, hybrid).save_pretrained(folder)
    chat.save(folder)
    return folder
