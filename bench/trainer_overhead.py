"""Measure the trainer's overhead: tokens/s of the fine-tuning worker's trainer against a bare loop.

    python bench/trainer_overhead.py [--steps 10] [--rounds 4]

Both run the same batch plan over the same random model of the tiny bases' size (hidden 128, 3 layers, vocabulary 1024,
sequences of 600 to 900 tokens, float32). Runs alternate and the fastest of each counts, in wall time and in CPU time,
which other processes affect less.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from machine import machine
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen3Config, Qwen3ForCausalLM

from etpi_assets.specs.training import TrainSection
from etpi_assets.training.sft import settings
from etpi_resources.lake import schemas
from etpi_resources.prefix_tree import CHAIN
from etpi_resources.trainers.contracts import SftWorkerConfig
from etpi_resources.trainers.workers.checkpointing import load_model
from etpi_resources.trainers.workers.collate import Sequences, collate, read_sequences
from etpi_resources.trainers.workers.device import Compute
from etpi_resources.trainers.workers.label_head import add_label_head
from etpi_resources.trainers.workers.plan import Plan, PlanSettings, make_plan
from etpi_resources.trainers.workers.reporting import CONFIG_FILE, Worker
from etpi_resources.trainers.workers.sft_worker import GRADIENT_NORM, build_trainer
from etpi_resources.trainers.workers.weighted_trainer import nll_at_labels

VOCABULARY = 1024


def make_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w1", eos_token="w2").save_pretrained(folder)


def make_sequences(file: Path, n: int = 400) -> Sequences:
    """Return random tokens, a third of them trained, in spans of 40."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(n):
        length = int(rng.integers(600, 900))
        starts = list(range(length // 3, length - 60, 80))
        rows.append(
            {
                "sequence_id": str(i),
                "split": "train",
                "input_ids": rng.integers(3, VOCABULARY, length).tolist(),
                **CHAIN,
                "span_starts": starts,
                "span_ends": [s + 40 for s in starts],
                "span_weights": [1.0] * len(starts),
            }
        )
    pq.write_table(schemas.from_rows("sequences", rows), file)
    return read_sequences([file], "train", vocabulary=VOCABULARY, longest=2048)


def bare_loop(base: Path, plan: Plan, sequences: Sequences) -> tuple[float, float]:
    """Return the (wall, CPU) seconds of the plan in a hand-written loop."""
    model = load_model(base, torch.float32).train()
    add_label_head(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    wall, cpu = time.perf_counter(), time.process_time()
    for batch in plan.batches:
        inputs = collate(batch, sequences, 0)
        nll, _ = nll_at_labels(model, inputs)
        ((nll * inputs["weights"]).sum() / plan.step_weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - wall, time.process_time() - cpu


def trainer_loop(base: Path, folder: Path, plan: Plan, sequences: Sequences) -> tuple[float, float]:
    """Return the (wall, CPU) seconds of the plan in the worker's trainer."""
    config = SftWorkerConfig(
        label="overhead",
        base=str(base),
        base_name="base",
        files=(),
        seed=0,
        chat_template=None,
        device="auto",
        micro_tokens=0,
        train=settings(TrainSection()),
    )
    (folder / CONFIG_FILE).write_text(config.model_dump_json())
    model, compute = load_model(base, torch.float32), Compute(gpu=False, dtype="fp32")
    trainer = build_trainer(Worker(folder, SftWorkerConfig), model, plan, sequences, compute=compute, replicated=False)
    trainer.remove_callback(PrinterCallback)
    wall, cpu = time.perf_counter(), time.process_time()
    trainer.train()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens a second of the trainer beside a bare loop.")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "base")
        sequences = make_sequences(folder / "sequences.parquet")
        plan = make_plan(
            sequences.lengths().tolist(),
            sequences.rows.tolist(),
            sequences.totals(sequences.weights).tolist(),
            PlanSettings(
                epochs=1.0,
                max_steps=options.steps,
                batch_tokens=options.batch_tokens,
                micro_tokens=options.batch_tokens,
                schedule="cosine",
                warmup=0.03,
                seed=0,
            ),
        )
        bare_loop(folder / "base", plan, sequences)
        bare, trainer = [], []
        for _ in range(options.rounds):
            bare.append(bare_loop(folder / "base", plan, sequences))
            trainer.append(trainer_loop(folder / "base", folder, plan, sequences))
    for i, kind in enumerate(("wall", "CPU")):
        a, b = min(run[i] for run in bare), min(run[i] for run in trainer)
        tokens = plan.padded_tokens
        print(f"{kind}: bare {tokens / a:.0f} tokens/s, trainer {tokens / b:.0f} tokens/s, {b / a:.3f} times the time")


if __name__ == "__main__":
    print(machine(), flush=True)
    main()
