"""The dtype that a training computes in, from its spec's `dtype` and the device.

Workers and the process that starts them both use it, because the dtype is part of a training's key. Only `find_gpu`
imports torch. Run as a program (`python -m ...precision`) it prints the GPU of its interpreter as JSON, or null.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

MODULE = "etpi_resources.trainers.precision"

SpecDtype = Literal["auto", "bf16", "fp32"]
Dtype = Literal["bf16", "fp32"]

BF16_CAPABILITY = (8, 0)
"""Compute capability from which a GPU multiplies matrices in bfloat16; older GPUs emulate it, slower than float32."""


@dataclass(frozen=True)
class Gpu:
    """The GPU that a worker trains on; `bf16`: whether it has bfloat16 matrix instructions."""

    bf16: bool


def training_dtype(requested: SpecDtype, gpu: Gpu | None) -> Dtype:
    """Return the dtype of forward and backward passes; trained weights are in float32 either way.

    Args:
        requested: the spec's. "auto" is bf16 on a GPU that has it, else fp32.
        gpu: None on a CPU, where every training computes in float32: few CPUs have bfloat16 instructions, the others
            run a scalar loop (measured: 1.1 GFLOP/s where float32 gives 41; pytorch#118499, #146508), and one spec
            must give one model.
    """
    if gpu is None:
        return "fp32"
    if requested == "auto":
        return "bf16" if gpu.bf16 else "fp32"
    return requested


def overruled(requested: SpecDtype, used: Dtype) -> str | None:
    """Return a warning for the log if a training does not compute in the dtype that its spec names; else None."""
    if requested in ("auto", used):
        return None
    return (
        f'warning: dtype = "{requested}" is not used on a CPU, this training computes in {used}: most CPUs emulate '
        "bfloat16, many times slower than float32, and the same spec must give the same model on all of them"
    )


def find_gpu() -> Gpu | None:
    """Return the GPU that this interpreter's torch sees, if any."""
    import torch

    if not torch.cuda.is_available():
        return None
    return Gpu(bf16=torch.cuda.get_device_capability() >= BF16_CAPABILITY)


if __name__ == "__main__":
    gpu = find_gpu()
    print(json.dumps(gpu and asdict(gpu)))
