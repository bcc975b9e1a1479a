"""A model's norms, rotary positions and gated layers by Liger's fused kernels, which read and write memory once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

_LOSSES_OFF = {"cross_entropy": False, "fused_linear_cross_entropy": False}


@contextmanager
def fused_layers(model: PreTrainedModel) -> Iterator[None]:
    """Compute the model's layers by Liger's kernels for its kind, on a GPU.

    Liger replaces classes and functions of transformers' modules too. They are put back at the end: they do not run on
    a CPU, where checkpoints are read back for comparison. The model keeps its fused norms and gated layers.

    Raises:
        ValueError: Liger has no kernels for such a model.
    """
    from liger_kernel.transformers.monkey_patch import (  # pyright: ignore[reportMissingImports]
        MODEL_TYPE_TO_APPLY_LIGER_FN,
    )
    from transformers.integrations.liger import apply_liger_kernel

    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(f"Liger has no kernels for the layers of {kind}; remove train.layer_kernels")
    # By name: sharding gives the model a class of another module.
    unfused = {
        name: dict(vars(module)) for name, module in sys.modules.items() if name.startswith("transformers.models.")
    }
    try:
        apply_liger_kernel(model, _LOSSES_OFF)
        yield
    finally:
        for name, content in unfused.items():
            vars(sys.modules[name]).update(content)
