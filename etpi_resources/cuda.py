"""PyTorch's settings on a GPU, for engines and trainers alike."""

from __future__ import annotations

import os
import warnings
from functools import cache

import torch
from torch.utils._triton import has_triton


def avoid_cudnn_attention() -> None:
    """Make this process compute attention on a GPU by PyTorch's own kernels instead of cuDNN's.

    PyTorch prefers cuDNN's on Hopper GPUs. cuDNN builds a program for every shape, and a cache has another shape after
    each token; and with a mask the same inputs do not always give the same digits (bench/README.md).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def repeat_to_the_digit() -> None:
    """Make a GPU give this process the same digits for the same inputs.

    An operation that cannot do so raises RuntimeError when it is called.
    """
    avoid_cudnn_attention()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


@cache
def triton_runs() -> bool:
    """Return whether Triton runs kernels here, and warn if not: it builds its driver when it is first used, with a C
    compiler and Python's headers."""
    try:
        from triton.runtime import driver  # pyright: ignore[reportMissingImports]

        _ = driver.active
    except Exception as error:  # of a compiler, a file system, CUDA
        warnings.warn(f"Triton does not run here, so Liger's layers are not used: {error!r}", stacklevel=2)
        return False
    return has_triton()


def cumulative_sums(values: torch.Tensor) -> torch.Tensor:
    """Return the cumulative sums of the last dimension.

    A GPU's own do not repeat, so where operations must repeat a CPU computes them.
    """
    if values.is_cuda and torch.are_deterministic_algorithms_enabled():
        return values.cpu().cumsum(-1).to(values.device)
    return values.cumsum(-1)
