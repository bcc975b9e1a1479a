"""A model's norms, rotary positions and gated layers by Liger's fused kernels, which read and write memory once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

_LOSSES_OFF = {"cross_entropy": False, "fused_linear_cross_entropy": False}


@contextmanager
def fused_layers(model: PreTrainedModel, *, required: bool) -> Iterator[bool]:
    """Compute the model's layers by Liger's kernels for its kind, on a GPU; yield whether they do.

    Liger replaces classes and functions of transformers' modules, and methods of the model's own. All are put back at
    the end: its kernels do not run on a CPU, where checkpoints may be read back, and round otherwise in 16 bits.

    Raises:
        ValueError: they are `required`, and Liger has no kernels for such a model.
    """
    from liger_kernel.transformers.monkey_patch import (  # pyright: ignore[reportMissingImports]
        MODEL_TYPE_TO_APPLY_LIGER_FN,
    )
    from transformers.integrations.liger import apply_liger_kernel

    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        if not required:
            yield False
            return
        raise ValueError(f"Liger has no kernels for the layers of {kind}; remove train.layer_kernels")
    # By name: sharding gives the model a class of another module.
    unfused = {
        name: dict(vars(module)) for name, module in sys.modules.items() if name.startswith("transformers.models.")
    }
    before = {module: set(vars(module)) for module in model.modules()}
    bound: dict[torch.nn.Module, set[str]] = {}
    try:
        apply_liger_kernel(model, _LOSSES_OFF)
        bound = {module: set(vars(module)) - names for module, names in before.items()}
        yield True
    finally:
        for module, names in bound.items():
            for name in names:
                del vars(module)[name]
        for name, content in unfused.items():
            vars(sys.modules[name]).update(content)
