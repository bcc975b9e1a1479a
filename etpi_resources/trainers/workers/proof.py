"""Saves what was trained, and measures it against the base and against what is read back from disk.

The starter of the worker judges the figures (`etpi_assets.training.sft_checks`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from etpi_resources.trainers.contracts import SavedFigures, TunedModel
from etpi_resources.trainers.workers import checkpointing as cp


def save_step(config: TunedModel, trainer: Any, lora: bool, folder: Path) -> None:
    """Save the current weights. An adapter is saved alone; `finish` merges it with a base that it reads from disk,
    because merging in place and back would change the weights that are still being trained."""
    # The wrappers of the forward pass (autocast, the label head) stay on: saving does not touch them, and training
    # continues with them.
    model = trainer.accelerator.unwrap_model(trainer.model)
    if lora:
        cp.save_adapter(model, folder / "adapter", config.base_name)
    else:
        cp.save_model(model, folder, cp.stored_dtype(config.base), Path(config.base), config.chat_template)


def finish(
    config: TunedModel, trainer: Any, lora: bool, folders: Mapping[int, Path], ids: torch.Tensor
) -> SavedFigures:
    """Merge the adapters of every saved step, and compare the trained model with the base and with the saved files.

    Args:
        folders: step -> folder, in order; the last is final.
        ids: tokens (1, L) to compare logits on.
    """
    last = folders[max(folders)]
    dtype = cp.stored_dtype(config.base)
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    trained = cp.logits_of(model, ids)
    base = cp.logits_of(cp.load_model(config.base, torch.float32), ids)
    figures: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "base_difference": cp.largest_difference(trained, base),
    }
    if not lora:
        figures["unchanged"], figures["trained"] = cp.unchanged(model, config.base)
        figures["differing"] = cp.same_weights(model, last, dtype)
        reloaded = cp.logits_of(cp.load_model(last, dtype), ids)
        return SavedFigures(**figures, reload_difference=cp.largest_difference(reloaded, trained))
    figures["zero_adapters"], figures["adapters"] = cp.zero_adapters(last / "adapter")
    for folder in folders.values():
        attached = cp.attach_adapter(config.base, folder / "adapter")
        reloaded = cp.logits_of(attached, ids)
        merged = attached.merge_and_unload()
        cp.save_model(merged, folder, dtype, Path(config.base), config.chat_template)
        if folder == last:
            figures["reload_difference"] = cp.largest_difference(reloaded, trained)
            figures["merge_difference"] = cp.largest_difference(cp.logits_of(merged, ids), reloaded)
            figures["differing"] = cp.same_weights(merged, folder, dtype)
    return SavedFigures(**figures)
