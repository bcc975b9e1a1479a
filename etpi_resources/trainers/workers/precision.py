"""The dtype that a training computes in: one decision for every worker, and for whoever names a training by it.

Belongs here: what a spec's `dtype` means on the device at hand. Does not belong here: what weights are stored in
(`checkpointing.stored_dtype`). Only `find_gpu` imports torch, so that the process that starts workers can use the rest.

Run as a program (`python -m ...precision`) it prints the GPU of its interpreter as JSON, or null.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

MODULE = "etpi_resources.trainers.workers.precision"

SpecDtype = Literal["auto", "bf16", "fp32"]
Dtype = Literal["bf16", "fp32"]

BF16_CAPABILITY = (8, 0)
"""Compute capability from which a GPU multiplies matrices in bfloat16; older ones emulate it, slower than float32."""


@dataclass(frozen=True)
class Gpu:
    """The GPU that a worker would train on; `bf16`: whether it has bfloat16 matrix instructions."""

    bf16: bool


def training_dtype(requested: SpecDtype, gpu: Gpu | None) -> Dtype:
    """The dtype of forward and backward passes; weights that are trained are stored in float32 anyway.

    Args:
        requested: the spec's. "auto" is bf16 on a GPU that has it, else fp32.
        gpu: None on a CPU, where every training computes in float32: few CPUs have bfloat16 instructions, the others
            run a scalar loop (measured: 1.1 GFLOP/s where float32 gives 41; pytorch#118499, #146508), and one spec is
            to give one model.
    """
    if gpu is None:
        return "fp32"
    if requested == "auto":
        return "bf16" if gpu.bf16 else "fp32"
    return requested


def overruled(requested: SpecDtype, used: Dtype) -> str | None:
    """One sentence for the log where a training does not compute in the dtype that its spec names; else None."""
    if requested in ("auto", used):
        return None
    return (
        f'warning: dtype = "{requested}" is not used on a CPU, this training computes in {used}: most CPUs emulate '
        "bfloat16, many times slower than float32, and the same spec must give the same model on all of them"
    )


def find_gpu() -> Gpu | None:
    """The GPU that this interpreter's torch sees, if any."""
    import torch

    if not torch.cuda.is_available():
        return None
    return Gpu(bf16=torch.cuda.get_device_capability() >= BF16_CAPABILITY)


if __name__ == "__main__":
    found = find_gpu()
    print(json.dumps(found and asdict(found)))
