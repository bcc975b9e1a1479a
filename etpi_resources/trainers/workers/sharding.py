"""A model whose weights, gradients and optimiser states are divided over several processes (FSDP2).

transformers shards a model while it loads it: each process reads its own part of every tensor, and Trainer accepts such
a model. Gradients are summed over the processes, not averaged as usual: each process divides its loss by the weight of
the whole step, so the sum is the step's gradient however unevenly the micro-batches are distributed.

Of a model with a LoRA adapter only the frozen base is divided. The adapter is small: every process holds all of it.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel, set_seed
from transformers.distributed.configuration_utils import DistributedConfig

from etpi_resources.labels import IGNORE_INDEX
from etpi_resources.trainers.contracts import LoraSettings
from etpi_resources.trainers.workers import checkpointing as cp
from etpi_resources.trainers.workers.plan import MicroBatch

if TYPE_CHECKING:
    from etpi_resources.trainers.workers.device import Compute


def load_start(folder: str | Path, shards: int, compute: Compute, *, lora: bool) -> PreTrainedModel:
    """Return the causal language model that training starts from; of several shards this process's, on its own GPU, or
    on the CPU.

    Trained weights are in float32; the frozen base of an adapter on a GPU keeps its stored dtype. In bf16 the layers of
    shards are gathered and compute in bfloat16, and gradients are summed in float32.

    Raises:
        RuntimeError: the number of processes is not `shards`, or there are fewer GPUs.
    """
    dtype = cp.stored_dtype(folder) if lora and compute.gpu else torch.float32
    if shards == 1:
        return cp.load_model(folder, dtype)
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != shards:
        raise RuntimeError(
            f"train.shards = {shards} needs as many processes, and {started} started; start the worker through "
            "`run_worker(..., processes=train.shards)`"
        )
    here = int(os.environ.get("LOCAL_WORLD_SIZE", str(shards)))
    if compute.gpu and torch.cuda.device_count() < here:
        raise RuntimeError(
            f"train.shards = {shards} runs {here} ranks here, and the torch of this interpreter sees "
            f"{torch.cuda.device_count()} GPUs; lower train.shards"
        )
    # The label head returns views, and nothing writes into them.
    warnings.filterwarnings("ignore", message=".*returned a view tensor", category=UserWarning)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, use_safetensors=True, local_files_only=True,
        distributed_config=DistributedConfig(fsdp_size=shards, fsdp_mixed_precision=compute.dtype == "bf16"),
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo can only sum; on NCCL a factor would be a separate operation.
            module.set_force_sum_reduction_for_comms(True)
    return model


def mean_gradients(model: torch.nn.Module) -> None:
    """Have a sharded model's gradients averaged over the processes, as DDP does, instead of summed; without effect on
    others."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(float(dist.get_world_size()))


def add_replicated_adapter(model: PreTrainedModel, settings: LoraSettings, seed: int) -> None:
    """Freeze a sharded model and put a new adapter, the same on every rank, into its layers.

    The layers are changed in place: a PEFT model around it would call its `forward` past the hooks that gather weights.
    """
    from peft import inject_adapter_in_model

    set_seed(seed)  # as TRL does before it creates an adapter
    inject_adapter_in_model(cp.lora_config(settings), model)
    for tensor in trained_tensors(model):
        dist.broadcast(tensor.data, src=0)


def trained_tensors(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters that training changes, in order."""
    return [tensor for tensor in model.parameters() if tensor.requires_grad]


def sum_replicated_gradients(model: torch.nn.Module) -> None:
    """Sum the gradients of trained parameters that every rank holds whole over the ranks; FSDP sums those of shards.

    Every rank has to call it, once a step.
    """
    whole = [tensor for tensor in trained_tensors(model) if not isinstance(tensor, DTensor)]
    if not whole:
        return
    gradients = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in whole]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for tensor, part in zip(whole, flat.split([tensor.numel() for tensor in whole]), strict=True):
        tensor.grad = part.view_as(tensor)


def batches_of_rank(batches: Sequence[MicroBatch], accumulate: int, rank: int, ranks: int) -> list[int | None]:
    """Positions of the micro-batches that one of `ranks` processes trains on, step by step; `accumulate` of a step.

    Every rank runs equally many passes, because gathering a layer is a collective: a rank with no micro-batch left in a
    step gets None. The longest of a step come first, so that the passes that run side by side have similar lengths. A
    single process keeps the order.
    """
    if ranks == 1:
        return list(range(len(batches)))
    positions: list[int | None] = []
    for first in range(0, len(batches), accumulate):
        step = range(first, min(first + accumulate, len(batches)))
        longest_first = sorted(step, key=lambda i: -batches[i].tokens)
        of_rank = longest_first[rank::ranks]
        positions += [*of_rank, *[None] * (-(-len(step) // ranks) - len(of_rank))]
    return positions


def without_labels(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the micro-batch without labels, weights and counts, for a rank that has no micro-batch left.

    Its pass has zero gradients; it is needed because every rank has to take part in the collectives.
    """
    return inputs | {
        "labels": torch.full_like(inputs["labels"], IGNORE_INDEX),
        "weights": torch.zeros_like(inputs["weights"]),
        "tokens": torch.zeros_like(inputs["tokens"]),
        "repeated": torch.zeros_like(inputs["repeated"]),
    }


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether a model is divided over processes."""
    return isinstance(model, FSDPModule)


def reshard(model: torch.nn.Module) -> None:
    """Free gathered parameters; without effect on a model that is not sharded.

    A pass without gradients leaves the last layers gathered, and an optimiser created then would get tensors that
    training does not update.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gathered(trainer: Any, base: str | Path, adapter: LoraSettings | None = None) -> Any:
    """Return the trainer with the whole model, for `proof`; None on ranks other than 0. Every rank has to call it.

    Args:
        base: the folder that its model was loaded from. adapter: settings of the adapter of a sharded base.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not is_sharded(model):
        return trainer if trainer.accelerator.is_main_process else None
    whole = gather_adapter(model, base, adapter) if adapter else gather(model, base)
    return None if whole is None else SimpleNamespace(model=whole, accelerator=trainer.accelerator)


def gather_adapter(model: PreTrainedModel, base: str | Path, settings: LoraSettings) -> Any:
    """Return a PEFT model on the CPU of rank 0: the base in the dtype that it was trained on, and the trained adapter;
    None on other ranks."""
    from peft import get_peft_model

    if dist.get_rank() != 0:
        return None
    frozen = next(tensor.dtype for tensor in model.parameters() if not tensor.requires_grad)
    whole: Any = get_peft_model(cp.load_model(base, frozen), cp.lora_config(settings))
    trained = {name: tensor.detach().cpu() for name, tensor in model.named_parameters() if tensor.requires_grad}
    if unknown := whole.base_model.model.load_state_dict(trained, strict=False).unexpected_keys:
        raise RuntimeError(f"the sharded adapter has tensors that PEFT's has not: {', '.join(unknown[:5])}")
    return whole


def gather(model: PreTrainedModel, base: str | Path) -> PreTrainedModel | None:
    """Return the whole trained model in float32 on the CPU of rank 0; None on other ranks. Every rank has to call it.

    Args:
        base: the folder that `model` was loaded from.
    """
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() != 0:
        return None
    whole = cp.load_model(base, cp.stored_dtype(base))
    whole.load_state_dict(weights, assign=True)  # the base's tensors go; these are in float32
    whole.tie_weights()
    config: Any = copy.deepcopy(model.config)
    del config.distributed_config
    whole.config, whole.generation_config = config, model.generation_config
    return whole
