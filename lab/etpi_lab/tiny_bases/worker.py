"""Pretraining of a tiny base model on a corpus of conversations, from random weights with copying heads (`induction`).

Muon (`muon`) trains the matrices, AdamW all other parameters. The learning rate warms up, stays at its peak for half of
the run, then falls linearly to a twentieth.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from etpi_resources.labels import IGNORE_INDEX
from etpi_resources.trainers.contracts import WorkerModel
from etpi_resources.trainers.precision import Dtype, training_dtype
from etpi_resources.trainers.workers.reporting import Worker, open_worker

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, Qwen3ForCausalLM

    from etpi_resources.trainers.workers.collate import Sequences
    from etpi_resources.trainers.workers.plan import Plan

GRADIENT_NORM = 1.0
WARMUP_STEPS = 20
LAST_LEARNING_RATE = 0.05
"""The learning rate at the end, as a share of its peak."""
LOG_LINES = 50


class BaseWorkerConfig(WorkerModel):
    """Pretraining of a Qwen3 model from random weights.

    Attributes:
        files: parquet files of sequences. tokenizer: the folder of the tokenizer. vocabulary: its size.
        batch_tokens: tokens of one optimiser step, padding included.
        matrix_learning_rate, learning_rate: peaks of Muon (matrices) and of AdamW (all other parameters).
    """

    files: tuple[str, ...]
    tokenizer: str
    vocabulary: int
    seed: int
    epochs: float
    batch_tokens: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    head_dim: int
    positions: int
    matrix_learning_rate: float
    learning_rate: float


class BaseLogLine(WorkerModel):
    """One logged step: `loss` is the weighted mean over the step's tokens (nats), `tokens` and `seconds` so far."""

    step: int
    loss: float
    tokens: int
    seconds: float


class BaseWorkerResult(WorkerModel):
    """A pretrained base; `folder` is relative to the worker's, `libraries` maps name -> version."""

    folder: str
    log: tuple[BaseLogLine, ...]
    parameters: int
    seconds: float
    dtype: Dtype
    device: str
    libraries: dict[str, str]


def run(worker: Worker[BaseWorkerConfig]) -> BaseWorkerResult:
    """Train and save.

    Raises:
        BadSequences, ValueError: the corpus cannot be trained on, or the model has no room for copying heads.
        RuntimeError: the loss is not finite.
    """
    began = time.monotonic()
    from etpi_resources.trainers.workers.collate import read_sequences
    from etpi_resources.trainers.workers.device import device_name, libraries

    config = worker.config
    used_device = device_name(gpu=False)  # before the replicas divide its threads
    model = create_model(config)
    sequences = read_sequences(config.files, "train", vocabulary=config.vocabulary, longest=config.positions)
    plan = plan_batches(config, sequences)
    log = train(worker, model, plan, sequences, began)
    save(worker, model, log)
    return BaseWorkerResult(
        folder="model",
        log=tuple(log),
        parameters=sum(p.numel() for p in model.parameters()),
        seconds=time.monotonic() - began,
        dtype=training_dtype("auto", None),
        device=used_device,
        libraries=libraries(),
    )


def create_model(config: BaseWorkerConfig) -> Qwen3ForCausalLM:
    """Return a Qwen3 model in float32, random but for its copying heads."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from etpi_lab.tiny_bases.induction import put_copying_heads

    torch.manual_seed(config.seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=config.vocabulary,
            hidden_size=config.hidden,
            intermediate_size=config.intermediate,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.positions,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )
    )
    put_copying_heads(model, config.seed)
    return model


def plan_batches(config: BaseWorkerConfig, sequences: Sequences) -> Plan:
    """Return the batches of the run, each step divided among the replicas."""
    from etpi_resources.trainers.workers.plan import PlanSettings, make_plan
    from etpi_resources.trainers.workers.replicas import REPLICAS

    settings = PlanSettings(
        epochs=config.epochs,
        batch_tokens=config.batch_tokens,
        micro_tokens=-(-config.batch_tokens // REPLICAS),
        schedule="constant",
        warmup=0.0,
        seed=config.seed,
    )
    weights = sequences.totals(sequences.weights).tolist()
    return make_plan(sequences.lengths().tolist(), sequences.rows.tolist(), weights, settings)


def train(
    worker: Worker[BaseWorkerConfig], model: Qwen3ForCausalLM, plan: Plan, sequences: Sequences, began: float
) -> list[BaseLogLine]:
    """Train the model; return the logged steps, their seconds counted from `began`."""
    import torch

    from etpi_resources.trainers.workers.collate import collate
    from etpi_resources.trainers.workers.replicas import ThreadReplicas

    optimizers = create_optimizers(worker.config, model)
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    log: list[BaseLogLine] = []
    tokens = 0
    every = max(1, plan.steps // LOG_LINES)
    stage = worker.stage("step", plan.steps)
    replicas = ThreadReplicas(model)
    for step in range(plan.steps):
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * learning_rate_at(step, plan.steps)
        first = step * plan.accumulate
        batches = [collate(batch, sequences, pad_id=0) for batch in plan.batches[first : first + plan.accumulate]]
        weight = float(sum(batch["weights"].sum() for batch in batches))
        loss = sum(replicas.backward(batches, partial(backward, step_weight=weight)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        tokens += sum(int(batch["tokens"]) for batch in batches)
        if not math.isfinite(loss):
            raise RuntimeError(f"the loss is {loss} at step {step}; lower base.tiny.muon_lr or base.tiny.adamw_lr")
        if step % every == 0 or step == plan.steps - 1:
            log.append(BaseLogLine(step=step, loss=loss, tokens=tokens, seconds=time.monotonic() - began))
        stage.advance(note=f"loss {loss:.3f}")
    return log


def create_optimizers(
    config: BaseWorkerConfig, model: Qwen3ForCausalLM
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Return (Muon for the matrices, AdamW for embeddings and norms), both at their peak learning rates."""
    import torch

    from etpi_lab.tiny_bases.muon import Muon

    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    other_parameters = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return (
        Muon(matrices, lr=config.matrix_learning_rate, momentum=0.95),
        torch.optim.AdamW(other_parameters, lr=config.learning_rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True),
    )


def backward(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor], step_weight: float) -> float:
    """Compute the gradients of one micro-batch and return its share of the step's loss.

    Args:
        inputs: as `collate` returns them. step_weight: the sum of the weights of all micro-batches of the step.
    """
    import torch

    hidden = model.model(input_ids=inputs["input_ids"]).last_hidden_state
    logits = model.lm_head(hidden[:, inputs["positions"]])
    nll = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), inputs["labels"].flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    loss = (nll * inputs["weights"].flatten()).sum() / step_weight
    loss.backward()
    return loss.item()


def learning_rate_at(step: int, steps: int) -> float:
    """Return the learning rate of a step, as a share of its peak."""
    falling = max(0.0, step / steps - 0.5) / 0.5
    return min(1.0, (step + 1) / WARMUP_STEPS) * (1 - (1 - LAST_LEARNING_RATE) * falling)


def save(worker: Worker[BaseWorkerConfig], model: Qwen3ForCausalLM, log: list[BaseLogLine]) -> None:
    """Save the model with its tokenizer in `model`, and the log as `metrics.jsonl`."""
    import torch

    from etpi_resources.trainers.workers.checkpointing import save_model

    save_model(model, worker.folder / "model", torch.float32, Path(worker.config.tokenizer), None)
    (worker.folder / "metrics.jsonl").write_text("".join(json.dumps(line.model_dump()) + "\n" for line in log))


if __name__ == "__main__":
    with open_worker(BaseWorkerConfig) as worker:
        worker.finish(run(worker))
