"""Which device a worker trains on, and with what.

Belongs here: finding the GPU that is asked for, and naming what is used. Does not belong here: placing a model.
"""

from __future__ import annotations

from importlib.metadata import version

import torch

from etpi_resources.trainers.workers.precision import Dtype, SpecDtype, find_gpu, overruled, training_dtype
from etpi_resources.trainers.workers.reporting import Worker

_LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate")


def use_gpu(wanted: str) -> bool:
    """Whether to train on a GPU: `wanted` is "cuda" where one is required, "auto" where one is used if it is there.

    Raises:
        RuntimeError: one is required, and this interpreter's torch sees none.
    """
    gpu = torch.cuda.is_available()
    if wanted == "cuda" and not gpu:
        raise RuntimeError(
            "a CUDA GPU is asked for, and the torch of this interpreter sees none "
            f"(torch {torch.__version__}); name one whose torch does in ETPI_TRAINER_PYTHON"
        )
    return gpu


def use_dtype(worker: Worker, requested: SpecDtype, gpu: bool) -> Dtype:
    """The dtype to compute in; where it is not the one that the spec names, the worker says why."""
    used = training_dtype(requested, find_gpu() if gpu else None)
    if warning := overruled(requested, used):
        worker.say(f"{worker.config['label']}: {warning}")
    return used


def device_name(gpu: bool) -> str:
    """What stands in reports."""
    return torch.cuda.get_device_name() if gpu else f"cpu, {torch.get_num_threads()} threads"


def libraries() -> dict[str, str]:
    """Package -> version of what this interpreter trains with."""
    return {name: version(name) for name in _LIBRARIES}
