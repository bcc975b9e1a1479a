"""The device that a worker trains on, and the libraries that it trains with."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from transformers import PreTrainedModel

from etpi_resources.cuda import repeat_to_the_digit
from etpi_resources.trainers.precision import Dtype, SpecDtype, find_gpu, overruled, training_dtype
from etpi_resources.trainers.workers.reporting import Worker

_LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate")


@dataclass(frozen=True)
class Compute:
    """Device of a training, and the dtype of its passes."""

    gpu: bool
    dtype: Dtype


def choose_compute(worker: Worker[Any], device: str, requested: SpecDtype) -> Compute:
    """Return the device and dtype of a training; logs where the dtype is not the one that the spec names.

    Args:
        device: "cuda" requires a GPU, "auto" uses one where there is one.

    Raises:
        RuntimeError: a GPU is required, and this interpreter's torch sees none.
    """
    gpu = torch.cuda.is_available()
    if device == "cuda" and not gpu:
        raise RuntimeError(
            "the experiment requires a CUDA GPU, and the torch of this interpreter sees none "
            f"(torch {torch.__version__}); name an interpreter whose torch does in ETPI_TRAINER_PYTHON"
        )
    used = training_dtype(requested, find_gpu() if gpu else None)
    if warning := overruled(requested, used):
        worker.log(f"{worker.config.label}: {warning}")
    return Compute(gpu, used)


def compute_alike(compute: Compute) -> None:
    """Make this process compute the same digits every time it gets the same inputs.

    On a CPU the number of threads decides the order of some sums, and it depends on what else runs: one thread. On a
    GPU PyTorch takes deterministic operations, and an operation that has no such form ends the run.
    """
    torch.set_num_threads(1)
    if compute.gpu:
        repeat_to_the_digit()


def device_name(gpu: bool) -> str:
    """Return the device as reports name it."""
    return torch.cuda.get_device_name() if gpu else f"cpu, {torch.get_num_threads()} threads"


def libraries(*more: str) -> dict[str, str]:
    """Package -> version of the libraries that this interpreter trains with."""
    return {name: version(name) for name in (*_LIBRARIES, *more)}


def narrow_hidden_states(model: PreTrainedModel) -> None:
    """Under bfloat16 autocast, let a model with weights in float32 pass its hidden states on in bfloat16.

    Autocast leaves embeddings in float32, and then every layer adds and normalises in float32. Engines, and trainers
    whose weights are in bfloat16, do not.
    """

    def narrow(embeddings: torch.nn.Module, ids: Any, states: torch.Tensor) -> torch.Tensor:
        kind = states.device.type
        bf16 = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16
        return states.to(torch.bfloat16) if bf16 else states

    model.get_input_embeddings().register_forward_hook(narrow)
