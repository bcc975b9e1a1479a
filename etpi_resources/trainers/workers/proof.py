"""Saving what was trained, and the figures that prove it: against the base, and against what is read back from disk.

Belongs here: what every trainer does with its model at a step that is kept and at the end. Does not belong here: the
files themselves (`checkpointing`), or judging the figures, which whoever asked does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from etpi_resources.trainers.workers import checkpointing as cp


def save_step(config: Mapping[str, Any], trainer: Any, lora: bool, folder: Path) -> None:
    """Save what training has reached. An adapter is saved alone; `finish` merges it with a base that is read afresh,
    because merging in place and back would change the weights that are still being trained.

    Args:
        config: of the worker: `base`, `base_name`, `chat_template`.
    """
    # Training goes on with what wraps its forward pass (autocast, the label head), which saving does not touch.
    model = trainer.accelerator.unwrap_model(trainer.model)
    if lora:
        cp.save_adapter(model, folder / "adapter", config["base_name"])
    else:
        cp.save_model(model, folder, cp.stored_dtype(config["base"]), Path(config["base"]), config["chat_template"])


def finish(
    config: Mapping[str, Any], trainer: Any, lora: bool, folders: Mapping[int, Path], ids: torch.Tensor
) -> dict[str, Any]:
    """Merge the adapters of every kept step, and compare what was trained with the base and with what is read back.

    Args:
        folders: step -> folder, in order; the last is final.
        ids: tokens (1, L) to compare logits on.
    Returns:
        `saved` of a worker's result: see `sft_worker.run`.
    """
    last = max(folders)
    dtype = cp.stored_dtype(config["base"])
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    trained = cp.logits_of(model, ids)
    before = cp.logits_of(cp.load_model(config["base"], torch.float32), ids)
    found: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
    found["base_difference"] = cp.largest_difference(trained, before)
    if not lora:
        found["unchanged"], found["trained"] = cp.unchanged(model, config["base"])
        found["differing"] = cp.same_weights(model, folders[last], dtype)
        reloaded = cp.logits_of(cp.load_model(folders[last], dtype), ids)
        found["reload_difference"] = cp.largest_difference(reloaded, trained)
        return found
    found["zero_adapters"], found["adapters"] = cp.zero_adapters(folders[last] / "adapter")
    for step, folder in folders.items():
        attached = cp.attach_adapter(config["base"], folder / "adapter")
        reloaded = cp.logits_of(attached, ids)
        merged = attached.merge_and_unload()
        cp.save_model(merged, folder, dtype, Path(config["base"]), config["chat_template"])
        if step == last:
            found["reload_difference"] = cp.largest_difference(reloaded, trained)
            found["merge_difference"] = cp.largest_difference(cp.logits_of(merged, ids), reloaded)
            found["differing"] = cp.same_weights(merged, folder, dtype)
    return found
