"""Trained checkpoints in the lake: the reports of trainings that are kept there, and their rows of `checkpoints`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from etpi_assets.checks import outcome
from etpi_assets.specs.paths import expand
from etpi_assets.specs.training import BaseSection
from etpi_resources.checkpoints import COMMIT
from etpi_resources.lake import stored_trainings
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.lake import Lake, LakeError, folder_hash
from etpi_resources.lake.older_names import adopt_training
from etpi_resources.trainers.contracts import (
    GrpoFigures,
    GrpoWorkerResult,
    SftFigures,
    SftWorkerResult,
    Tracker,
    WorkerModel,
)
from etpi_resources.trainers.precision import Dtype

_OF_A_RUN = {"link", "resume", "tracking", "publish", "device", "micro_tokens", "state_seconds", "resume_every"}
"""Fields of a worker's configuration that differ between two runs of one training."""


@dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """One training; its key, which `kept` stores its report under, is the hash of all inputs of its result.

    Attributes:
        experiment, report_to: no part of the key.
        base_id, base_folder: the checkpoint that training starts from, and the folder of its files.
        seed: of the order of the data or tasks, of an adapter's initial values and of sampling.
        gpu: whether a GPU is required; otherwise one is used where there is one.
        dtype: of the passes on this machine, where the section may say "auto".
        code: name of the versions of code whose result is stored.
        older_codes: names that etpi 0.2 gave them, no part of the key; None if its results are not to be reused.
    """

    experiment: str
    base_id: str
    base_folder: Path
    seed: int
    gpu: bool
    dtype: Dtype
    code: str
    older_codes: tuple[str, ...] | None = None
    report_to: tuple[Tracker, ...] = ()

    @property
    def key(self) -> str:
        """Return the hash of all inputs of the result."""
        raise NotImplementedError

    def adopt_older(
        self, lake: Lake, scratch: str, config: WorkerModel, same: Callable[[Path], bool] = lambda rounds: True
    ) -> None:
        """Take over under this key what etpi 0.2 stored, or began; `stored_trainings.train_once` calls it.

        Args:
            scratch, same: as in `older_names.adopt_training`.
            config: of the worker.
        """
        if self.older_codes is None:
            return
        keys = [replace(self, code=code).key for code in self.older_codes]
        adopt_training(lake, self.key, scratch, keys, config.model_dump(mode="json", exclude=_OF_A_RUN), same)


class LakeCheckpoint(WorkerModel):
    """One saved step in the lake, named by its content; `adapter_hash` is of LoRA checkpoints alone."""

    checkpoint_id: str
    adapter_hash: str | None
    step: int
    final: bool
    train_loss: float | None
    token_accuracy: float | None = None
    val_loss: float | None


class SftReport(SftFigures):
    """A fine-tuning run whose checkpoints are in the lake; `reused`: it was trained before."""

    checkpoints: tuple[LakeCheckpoint, ...]
    reused: bool


class GrpoReport(GrpoFigures):
    """A GRPO run whose checkpoints are in the lake; `rounds` is the folder of its rollouts, relative to the lake."""

    checkpoints: tuple[LakeCheckpoint, ...]
    rounds: str
    reused: bool


def adopt_checkpoints(lake: Lake, folder: Path, result: SftWorkerResult | GrpoWorkerResult) -> dict[str, Any]:
    """Move a worker's checkpoints from `folder` into the lake; return its result as JSON, with LakeCheckpoints."""
    adopted = [
        stored_trainings.move_checkpoint(lake, folder, checkpoint.model_dump()) for checkpoint in result.checkpoints
    ]
    return result.model_dump(mode="json") | {"checkpoints": adopted}


def checkpoint_rows(
    report: SftReport | GrpoReport, shared: Mapping[str, Any], section: BaseModel, settings: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Rows of the table `checkpoints`, in order of steps.

    Args:
        shared: columns that have the same value in all rows.
        section, settings: the spec's section and the other settings of the training; together `hyperparameters`.
    """
    hyperparameters = {
        **section.model_dump(mode="json"),
        **settings,
        "device": report.device,
        "libraries": report.libraries,
    }
    same = {**shared, "dtype": report.dtype, "hyperparameters": json.dumps(hyperparameters, sort_keys=True)}
    rows = []
    for checkpoint in report.checkpoints:
        path = f"checkpoints/{checkpoint.checkpoint_id}"
        adapter = f"{path}/adapter" if checkpoint.adapter_hash else None
        rows.append({**same, **checkpoint.model_dump(), "path": path, "adapter_path": adapter})
    return rows


PINNED = "base_is_pinned"


def pointer(base: BaseSection) -> tuple[dict[str, str], CheckOutcome]:
    """Return the checkpoint_id and path of a base that etpi did not train, and whether it is pinned.

    Nothing is fetched here: a package's model is pinned by its name, one of the hub if that names a commit.
    """
    if base.kind == "path":
        return path_pointer(base)
    row = {"checkpoint_id": hashlib.sha256(base.model.encode()).hexdigest()[:16], "path": base.model}
    if base.kind == "package":
        return row, outcome(PINNED, True, case="package", base=base)
    pinned = bool(COMMIT.fullmatch(base.revision or ""))
    figures = {} if pinned else {"revision": base.revision}
    return row, outcome(PINNED, pinned, figures, case="commit" if pinned else "branch", base=base)


def path_pointer(base: BaseSection) -> tuple[dict[str, str], CheckOutcome]:
    """Return the checkpoint_id and path of a local base, and whether its files hash to `base.sha256`.

    The hash is `lake.folder_hash`, which is also the name of a checkpoint's folder in a lake.

    Raises:
        LakeError: the folder does not exist or holds no model.
        PathError: the path names a variable that is not set.
    """
    assert base.path and base.sha256  # BaseSection requires both of a path base
    folder = expand(base.path).resolve()
    if not (folder / "config.json").is_file():
        raise LakeError(f"base.path = {base.path!r} ({folder}) holds no config.json; name a folder with a saved model")
    actual = folder_hash(folder)
    row = {"checkpoint_id": actual, "path": str(folder)}
    pinned = actual == base.sha256
    figures = {} if pinned else {"found": actual, "wanted": base.sha256}
    return row, outcome(PINNED, pinned, figures, folder=folder, actual=actual)
