"""Pretraining of the tiny base model on a corpus of conversations, from nothing.

Belongs here: one pretraining run, from configuration to a saved checkpoint. Does not belong here: the corpus (the
recipe), where copying heads come from (`induction`), fine-tuning (`sft_worker`).

Matrices are trained by Muon (`muon`), everything else by AdamW; the rate is held, then falls linearly to a
twentieth over the second half.

Configuration (`config.json`): `files` (parquet files of sequences), `tokenizer` (folder), `vocabulary`, `seed`,
`epochs`, `batch_tokens`, `hidden`, `intermediate`, `layers`, `heads`, `head_dim`, `positions`, `matrix_rate`, `rate`.
Result: see `run`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etpi_resources.labels import IGNORE_INDEX
from etpi_resources.trainers.workers.precision import training_dtype
from etpi_resources.trainers.workers.reporting import Worker, open_worker

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

GRADIENT_NORM = 1.0
WARMUP_STEPS = 20
LAST_RATE = 0.05
LOG_LINES = 50


def run(worker: Worker) -> dict[str, Any]:
    """Train and save.

    Returns:
        `folder`: the checkpoint, relative to the worker's folder. `log`: [{step, loss, tokens, seconds}], the loss a
        weighted mean over a step's tokens in nats. `parameters`, `seconds`, `dtype` (of the passes: "fp32"), `device`,
        `libraries` (name -> version).

    Raises:
        BadSequences, ValueError: the corpus cannot be trained on, or the model has no room for copying heads.
        RuntimeError: the loss is not finite.
    """
    began = time.monotonic()
    config = worker.config
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from etpi_resources.trainers.workers.checkpointing import save_model
    from etpi_resources.trainers.workers.collate import collate, read_sequences
    from etpi_resources.trainers.workers.device import device_name, libraries
    from etpi_resources.trainers.workers.induction import put_copying_heads
    from etpi_resources.trainers.workers.muon import Muon
    from etpi_resources.trainers.workers.plan import make_plan
    from etpi_resources.trainers.workers.twins import PARTS, Twins

    used_device = device_name(gpu=False)  # before the replicas share its threads out
    torch.manual_seed(config["seed"])
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=config["vocabulary"],
            hidden_size=config["hidden"],
            intermediate_size=config["intermediate"],
            num_hidden_layers=config["layers"],
            num_attention_heads=config["heads"],
            num_key_value_heads=config["heads"],
            head_dim=config["head_dim"],
            max_position_embeddings=config["positions"],
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )
    )
    put_copying_heads(model, config["seed"])
    sequences = read_sequences(config["files"], "train", vocabulary=config["vocabulary"], longest=config["positions"])
    plan = make_plan(
        sequences.lengths().tolist(),
        sequences.rows.tolist(),
        sequences.totals(sequences.weights).tolist(),
        epochs=config["epochs"],
        max_steps=None,
        batch_tokens=config["batch_tokens"],
        micro_tokens=-(-config["batch_tokens"] // PARTS),
        schedule="constant",
        warmup=0.0,
        seed=config["seed"],
    )
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = (
        Muon(matrices, lr=config["matrix_rate"], momentum=0.95),
        torch.optim.AdamW(others, lr=config["rate"], betas=(0.9, 0.99), weight_decay=0.0, fused=True),
    )
    peaks = (config["matrix_rate"], config["rate"])
    log, tokens = [], 0
    every = max(1, plan.steps // LOG_LINES)
    stage = worker.stage("step", plan.steps)
    twins = Twins(model)
    for step in range(plan.steps):
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * _rate(step, plan.steps)
        first = step * plan.accumulate
        inputs = [collate(batch, sequences, pad_id=0) for batch in plan.batches[first : first + plan.accumulate]]
        whole = float(sum(part["weights"].sum() for part in inputs))
        value = sum(twins.backward(inputs, partial(_backward, whole=whole)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        tokens += sum(int(part["tokens"]) for part in inputs)
        if not math.isfinite(value):
            raise RuntimeError(f"the loss is {value} at step {step}; lower base.tiny.matrix_rate or base.tiny.rate")
        if step % every == 0 or step == plan.steps - 1:
            log.append({"step": step, "loss": value, "tokens": tokens, "seconds": time.monotonic() - began})
        stage.advance(note=f"loss {value:.3f}")
    save_model(model, worker.folder / "model", torch.float32, Path(config["tokenizer"]), None)
    (worker.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    return {
        "folder": "model",
        "log": log,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": time.monotonic() - began,
        "dtype": training_dtype("auto", None),
        "device": used_device,
        "libraries": libraries(),
    }


def _backward(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor], whole: float) -> float:
    """This part's share of the loss, after its gradients; `whole` is the weight of all parts."""
    import torch

    hidden = model.model(input_ids=inputs["input_ids"]).last_hidden_state
    logits = model.lm_head(hidden[:, inputs["positions"]])
    nll = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), inputs["labels"].flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    loss = (nll * inputs["weights"].flatten()).sum() / whole
    loss.backward()
    return loss.item()


def _rate(step: int, steps: int) -> float:
    """The share of the peak rate at a step."""
    falling = max(0.0, step / steps - 0.5) / 0.5
    return min(1.0, (step + 1) / WARMUP_STEPS) * (1 - (1 - LAST_RATE) * falling)


if __name__ == "__main__":
    with open_worker() as worker:
        worker.finish(run(worker))
