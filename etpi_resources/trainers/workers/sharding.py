"""A model whose weights, gradients and optimiser states are divided over several processes (FSDP2).

Belongs here: loading a share of it, which micro-batches a process takes, and making the model whole again. Does not
belong here: starting the processes (`ranks`), the loss (`weighted_trainer`), files (`checkpointing`).

transformers shards a model while it loads it, each process reading its own part of every tensor, and its Trainer takes
such a model as it is. Gradients are summed over the processes, not averaged as is usual: each process divides its loss
by the weight of the whole step, so the sum is the step's gradient however unevenly micro-batches fall.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from etpi_resources.labels import IGNORE_INDEX
from etpi_resources.trainers.workers.checkpointing import load_model
from etpi_resources.trainers.workers.plan import MicroBatch


def load_sharded(folder: str | Path, shards: int, *, gpu: bool, bf16: bool) -> PreTrainedModel:
    """This process's share of a causal language model, kept in float32; on its own GPU, or on the CPU.

    Args:
        bf16: layers are gathered, and compute, in bfloat16; gradients are summed in float32 all the same.

    Raises:
        RuntimeError: not so many processes were started, or there are fewer GPUs.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != shards:
        raise RuntimeError(
            f"train.shards = {shards} wants as many processes, and {started} started: start the worker through "
            "`run_worker(..., processes=train.shards)`"
        )
    if gpu and torch.cuda.device_count() < shards:
        raise RuntimeError(
            f"train.shards = {shards} wants a GPU each, and the torch of this interpreter sees "
            f"{torch.cuda.device_count()}; lower train.shards"
        )
    # Of what the label head returns, which nothing writes into.
    warnings.filterwarnings("ignore", message=".*returned a view tensor", category=UserWarning)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", use_safetensors=True, local_files_only=True,
        distributed_config=DistributedConfig(fsdp_size=shards, fsdp_mixed_precision=bf16),
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo can only add; on NCCL a factor would otherwise be an operation of its own.
            module.set_force_sum_reduction_for_comms(True)
    return model


def shares(batches: Sequence[MicroBatch], accumulate: int, rank: int, ranks: int) -> list[int | None]:
    """Which micro-batches, by position, one of `ranks` processes goes through, step by step; `accumulate` a step.

    All processes go forward and back equally often, because layers are gathered together: one that has none left in a
    step is given None. The longest of a step come first, so that those that run side by side are of like length. A
    single process takes them as they stand.
    """
    if ranks == 1:
        return list(range(len(batches)))
    taken: list[int | None] = []
    for first in range(0, len(batches), accumulate):
        step = range(first, min(first + accumulate, len(batches)))
        longest = sorted(step, key=lambda i: -batches[i].tokens)
        mine = longest[rank::ranks]
        taken += [*mine, *[None] * (-(-len(step) // ranks) - len(mine))]
    return taken


def unlearnt(inputs: dict[str, Any]) -> dict[str, Any]:
    """A micro-batch (see `collate`) of which nothing is learnt or counted, for a process that has none: it goes through
    the model as the others do, and every gradient of it is zero."""
    return inputs | {
        "labels": torch.full_like(inputs["labels"], IGNORE_INDEX),
        "weights": torch.zeros_like(inputs["weights"]),
        "tokens": torch.zeros_like(inputs["tokens"]),
        "repeated": torch.zeros_like(inputs["repeated"]),
    }


def reshard(model: torch.nn.Module) -> None:
    """Put every parameter back in its shares; without effect on a model in one piece.

    A pass without gradients leaves the ends of the model gathered, and an optimiser made then would be given tensors
    that nothing is trained through.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(model: PreTrainedModel, base: str | Path) -> PreTrainedModel | None:
    """The trained model in one piece on the CPU, in float32, in the first process; None in the others. All must ask.

    Args:
        base: the folder that `model` was loaded from.
    """
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() != 0:
        return None
    found = load_model(base, torch.float32)
    found.load_state_dict(weights)
    config: Any = copy.deepcopy(model.config)
    del config.distributed_config
    found.config, found.generation_config = config, model.generation_config
    return found
