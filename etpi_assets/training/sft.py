"""Supervised fine-tuning as a recipe: what is asked of the trainer, what its answer proves, and what becomes of its
files.

Belongs here: from a base, a dataset and a train section to checkpoints in the lake, their rows and their checks. Does
not belong here: the training itself (`etpi_resources.trainers.workers`), Dagster, or the base (`base`).

The same base, sequences, train section, seed, template and trainer code give the same checkpoints, whichever experiment
asks: they are found again (`kept`) and not trained twice.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etpi_assets.specs.training import TrainSection
from etpi_assets.training.device import confirm_dtype
from etpi_assets.training.sft_checks import Expected, checks
from etpi_resources.hashes import json_hash
from etpi_resources.lake import kept
from etpi_resources.lake.lake import Lake
from etpi_resources.trainers.pipes import run_worker
from etpi_resources.trainers.workers.precision import Dtype

WORKER = "etpi_resources.trainers.workers.sft_worker"
MICRO_TOKENS_VARIABLE = "ETPI_MICRO_TOKENS"
MICRO_TOKENS = 8192


@dataclass(frozen=True)
class Request:
    """One training run.

    Attributes:
        experiment: whose it is; heads the trainer's lines, no part of the result.
        base_id, base_folder: the checkpoint trained from, and where its files are.
        files: sequence files (parquet) and the sha256 of each.
        train: the spec's section. seed: order of the data, and the adapter's first values.
        chat_template: the template the dataset was rendered with; the checkpoint carries it.
        gpu: whether a GPU is required; otherwise one is used where there is one.
        dtype: what the passes compute in here, whatever the section leaves open.
        code: version of the code that trains.
    """

    experiment: str
    base_id: str
    base_folder: Path
    files: Mapping[Path, str]
    train: TrainSection
    seed: int
    chat_template: str
    gpu: bool
    dtype: Dtype
    code: str

    @property
    def label(self) -> str:
        """What the trainer's lines are headed."""
        return f"sft of {self.experiment}, seed {self.seed}"

    @property
    def key(self) -> str:
        """What the result depends on, as a hash."""
        depends = {
            "base": self.base_id,
            "files": list(self.files.values()),
            "train": self.train.model_dump(mode="json") | {"dtype": self.dtype},
            "seed": self.seed,
            "chat_template": self.chat_template,
            "code": self.code,
        }
        return json_hash(depends)[:16]


def train_once(
    lake: Lake,
    request: Request,
    *,
    expected: Expected,
    context: Any = None,
    echo: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train, or find what the same request gave before.

    Returns:
        The worker's result (see `sft_worker.run`), its checkpoints with `checkpoint_id` and `adapter_hash` instead of
        folders, and `reused`. Only a result whose checks passed is kept to be found again.

    Raises:
        WorkerFailed: the trainer failed; the message holds its last lines.
    """

    def train(folder: Path) -> dict[str, Any]:
        shutil.rmtree(folder)
        config, processes = worker_config(request), request.train.shards
        report = run_worker(WORKER, config, folder, processes=processes, context=context, echo=echo)
        confirm_dtype(report, request.dtype, request.label)
        report["checkpoints"] = [kept.adopt(lake, folder, checkpoint) for checkpoint in report["checkpoints"]]
        return report

    return kept.once(
        lake,
        request.key,
        "train",
        train,
        good=lambda report: all(check.passed for check in checks({request.seed: report}, expected)),
        what=request.label,
        log=echo,
    )


def worker_config(request: Request) -> dict[str, Any]:
    """The trainer's configuration (see `sft_worker`)."""
    return {
        "label": request.label,
        "base": str(request.base_folder),
        "base_name": request.base_id,
        "files": [str(path) for path in request.files],
        "seed": request.seed,
        "chat_template": request.chat_template,
        "device": "cuda" if request.gpu else "auto",
        "micro_tokens": int(os.environ.get(MICRO_TOKENS_VARIABLE) or MICRO_TOKENS),
        "train": request.train.model_dump(mode="json"),
    }


# --- rows ----------------------------------------------------------------------------------------------------------


def checkpoint_rows(request: Request, report: Mapping[str, Any], dataset_version: str) -> list[dict[str, Any]]:
    """Rows of the table `checkpoints`, in order of steps."""
    settings = {
        **request.train.model_dump(mode="json"),
        "steps": report["plan"]["steps"],
        "step_weight": report["plan"]["step_weight"],
        "sequences": report["plan"]["sequences"],
        "weighted_rows": report["plan"]["weighted_rows"],
        "device": report["device"],
        "libraries": report["libraries"],
    }
    rows = []
    for checkpoint in report["checkpoints"]:
        path = f"checkpoints/{checkpoint['checkpoint_id']}"
        rows.append(
            {
                "checkpoint_id": checkpoint["checkpoint_id"],
                "experiment": request.experiment,
                "role": "sft",
                "seed": request.seed,
                "step": checkpoint["step"],
                "final": checkpoint["final"],
                "method": request.train.method,
                "dtype": report["dtype"],
                "path": path,
                "adapter_path": f"{path}/adapter" if checkpoint["adapter_hash"] else None,
                "adapter_hash": checkpoint["adapter_hash"],
                "parent_id": request.base_id,
                "dataset_version": dataset_version,
                "label_tokens": report["counted"]["labels"],
                "train_loss": checkpoint["train_loss"],
                "token_accuracy": checkpoint["token_accuracy"],
                "val_loss": checkpoint["val_loss"],
                "wall_seconds": sum(report["seconds"].values()),
                "hyperparameters": json.dumps(settings, sort_keys=True),
            }
        )
    return rows


def log_rows(request: Request, report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the table `training_log`."""
    return [{"experiment": request.experiment, "role": "sft", "seed": request.seed, **line} for line in report["log"]]
