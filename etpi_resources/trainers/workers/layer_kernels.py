"""A model's norms, rotary positions and gated layers by Liger's fused kernels, which read and write memory once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel
from transformers.activations import ACT2FN

_LOSSES_OFF = {"cross_entropy": False, "fused_linear_cross_entropy": False}


@contextmanager
def fused_layers(model: PreTrainedModel, *, required: bool) -> Iterator[bool]:
    """Compute the model's layers by Liger's kernels for its kind, on a GPU; yield whether they do.

    Liger replaces classes, functions and activations of transformers' modules, and methods and submodules of the
    model. All are put back at the end: its kernels do not run on a CPU, where checkpoints may be read back, and round
    otherwise in 16 bits.

    Raises:
        ValueError: they are `required`, and Liger has no kernels for such a model.
    """
    from liger_kernel.transformers.monkey_patch import (  # pyright: ignore[reportMissingImports]
        MODEL_TYPE_TO_APPLY_LIGER_FN,
    )
    from transformers.integrations.liger import apply_liger_kernel

    kind, act = model.config.model_type, getattr(model.config, "hidden_act", None)
    # Liger computes the kind's usual activation, whatever the model's is (ReluLLaMA).
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN or act != getattr(type(model.config)(), "hidden_act", None):
        if not required:
            yield False
            return
        raise ValueError(f"Liger has no kernels for the layers of {kind} with {act}; remove train.layer_kernels")
    # By name: sharding gives the model a class of another module.
    spaces: list[Any] = [vars(m) for name, m in sys.modules.items() if name.startswith("transformers.models.")]
    spaces += [ACT2FN, *(space for module in model.modules() for space in (vars(module), module._modules))]
    unfused = [dict(space.items()) for space in spaces]
    fused: list[set[str]] = []
    try:
        try:
            apply_liger_kernel(model, _LOSSES_OFF)
        finally:  # and not later: training changes the model's methods too
            pairs = zip(spaces, unfused, strict=True)
            fused = [{n for n, part in space.items() if n not in old or old[n] is not part} for space, old in pairs]
        yield True
    finally:
        for space, old, names in zip(spaces, unfused, fused, strict=True):
            for name in names:
                del space[name]
            space.update((name, old[name]) for name in names & old.keys())
