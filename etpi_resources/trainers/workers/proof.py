"""Saves what was trained, and measures it against the base and against what is read back from disk.

The starter of the worker judges the figures (`etpi_assets.training.sft_checks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from etpi_resources.trainers.contracts import SavedCheckpoint, SavedFigures, TunedModel
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
        _save(config, model, folder)


def _save(config: TunedModel, model: Any, folder: Path) -> None:
    base = Path(config.base)
    cp.save_model(model, folder, cp.stored_dtype(base), base, config.chat_template, config.end_ids)


def finish(
    config: TunedModel, trainer: Any, lora: bool, folders: Mapping[int, Path], used: int, ids: torch.Tensor
) -> SavedFigures:
    """Merge the adapters of every saved step, and compare the trained model with the base and with the saved files.

    Tensors are compared exactly. Logits are compared between models on one device in one dtype, else not at all. No
    copy of the base is larger than its files. The trainer cannot train on afterwards.

    Args:
        folders: step -> folder, in order; the last has the trained model.
        used: the step whose checkpoint is used. What an adapter's files show is measured on it: the trained model of
            that step is in memory only if it is the last, and a full one is rounded in its files.
        ids: tokens (1, L) to compare logits on.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    if lora:
        return _finish_adapter(config, model, folders, folders[used], ids)
    return _finish_full(config, model, folders[max(folders)], ids)


def _finish_full(config: TunedModel, model: Any, folder: Path, ids: torch.Tensor) -> SavedFigures:
    stored = cp.stored_dtype(config.base)
    unchanged, trained, changed = cp.changes_from_base(model, cp.load_model(config.base, stored), stored)
    read = cp.load_model(folder, stored, cp.device_with_room(folder, model.device))
    differing = cp.differing_tensors(model, read, stored)
    difference = None
    if read.device == model.device:
        cp.cast_alike(model, read, stored)
        difference = cp.largest_difference(cp.logits_of(read, ids), cp.logits_of(model, ids))
    return SavedFigures(
        dtype=_name(stored),
        compared_in=_name(stored),
        changed_share=changed,
        unchanged=tuple(unchanged),
        trained=trained,
        differing=tuple(differing),
        reload_difference=difference,
    )


def _finish_adapter(
    config: TunedModel, model: Any, folders: Mapping[int, Path], used: Path, ids: torch.Tensor
) -> SavedFigures:
    stored, last = cp.stored_dtype(config.base), folders[max(folders)]
    computed = next(p.dtype for p in model.parameters() if not p.requires_grad)
    trained = cp.logits_of(model, ids)
    with model.disable_adapter():
        base = cp.logits_of(model, ids)
    zero, adapters = cp.zero_adapters(used / "adapter")
    figures: dict[str, Any] = {"base_difference": cp.largest_difference(trained, base)}
    differing: list[str] = []
    for folder in folders.values():
        place = cp.device_with_room(config.base, model.device)
        attached = cp.attach_adapter(config.base, folder / "adapter", computed, place)
        compared = folder == last and place == model.device
        if folder == last:
            differing += cp.differing_tensors(model, attached, computed)
        if compared:
            figures["reload_difference"] = cp.largest_difference(cp.logits_of(attached, ids), trained)
        merged = attached.merge_and_unload()
        _save(config, merged, folder)
        if compared:
            figures["merge_difference"] = cp.largest_difference(cp.logits_of(merged, ids), trained)
        if folder == used:
            figures["changed_share"] = cp.merged_share(model, merged, stored)
        if folder in (used, last):
            differing += cp.differing_tensors(merged, cp.load_model(folder, stored), stored)
    figures |= {"differing": tuple(differing), "zero_adapters": tuple(zero), "adapters": adapters}
    return SavedFigures(dtype=_name(stored), compared_in=_name(computed), **figures)


def entries(folders: Iterable[int], used: int, lora: bool, lines: Sequence[Any]) -> tuple[SavedCheckpoint, ...]:
    """Return the result's entries of the saved steps, with the last figures of the log until each.

    Args:
        used: the step whose checkpoint is used.
        lines: of the log, SftLogLine or GrpoLogLine.
    """

    def last(step: int, name: str) -> float | None:
        values = (getattr(line, name, None) for line in reversed(lines) if line.step <= step)
        return next((value for value in values if value is not None), None)

    return tuple(
        SavedCheckpoint(
            step=step,
            final=step == used,
            folder=f"step-{step}",
            adapter=f"step-{step}/adapter" if lora else None,
            train_loss=last(step, "loss"),
            token_accuracy=last(step, "token_accuracy"),
            val_loss=last(step, "val_loss"),
        )
        for step in folders
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
