"""A model's norms, rotary positions and gated layers by Liger's fused kernels, which read and write memory once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

_KERNELS = {"rms_norm": True, "rope": True, "swiglu": True, "cross_entropy": False, "fused_linear_cross_entropy": False}


@contextmanager
def fused_layers(model: PreTrainedModel) -> Iterator[None]:
    """Compute the model's layers by Liger's kernels, on a GPU.

    Liger replaces classes and functions of the model's module too. They are put back at the end: they do not run on a
    CPU, where checkpoints are read back for comparison. The model keeps its fused norms and gated layers.

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
    module = vars(sys.modules[type(model).__module__])
    unfused = dict(module)
    apply_liger_kernel(model, _KERNELS)
    try:
        yield
    finally:
        module.update(unfused)
