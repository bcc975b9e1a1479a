"""Fine-tuning: from a base, a dataset and a train section to checkpoints in the lake and their rows.

The same base, sequences, train section, seed, template and trainer code give the same checkpoints for every experiment,
so `kept` stores them by these and no experiment trains them again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etpi_assets.specs.training import TrainSection
from etpi_assets.training import checkpoints
from etpi_assets.training.checkpoints import SftReport, TrainingRequest, adopt_checkpoints
from etpi_assets.training.device import confirm_dtype
from etpi_assets.training.sft_checks import TrainingSplit, checks
from etpi_resources.hashes import json_hash
from etpi_resources.lake import stored_trainings
from etpi_resources.lake.lake import Lake
from etpi_resources.trainers.contracts import SftSettings, SftWorkerConfig, SftWorkerResult
from etpi_resources.trainers.pipes import run_worker
from etpi_resources.trainers.trackers import tracking_of
from etpi_resources.trainers.workers.states import last_complete_step

WORKER = "etpi_resources.trainers.workers.sft_worker"
MICRO_TOKENS_VARIABLE = "ETPI_MICRO_TOKENS"
MICRO_TOKENS = 8192
STATE_SECONDS_VARIABLE = "ETPI_STATE_SECONDS"
STATE_SECONDS = 600.0
"""Least time between two states that a killed training continues from."""


@dataclass(frozen=True, kw_only=True)
class SftRequest(TrainingRequest):
    """One fine-tuning run.

    Attributes:
        files: sequence files (parquet) -> sha256 of each.
        train: the spec's section.
        chat_template: the template that the dataset was rendered with; the checkpoint gets it too.
        end_ids: the ids that end a turn under it.
    """

    files: Mapping[Path, str]
    train: TrainSection
    chat_template: str
    end_ids: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """Return the prefix of the trainer's log lines."""
        return f"sft of {self.experiment}, seed {self.seed}"

    @property
    def key(self) -> str:
        """Return the hash of all inputs of the result."""
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
    request: SftRequest,
    *,
    split: TrainingSplit,
    context: Any = None,
    echo: Callable[[str], None] = print,
) -> SftReport:
    """Train, continue a run that was killed, or return the report of the same training done before.

    Args:
        split: the data set's rows by split; only a report whose checks pass against it is kept for reuse.

    Raises:
        WorkerFailed: the trainer failed; the message holds its last lines.
    """

    def train(folder: Path) -> dict[str, Any]:
        step = last_complete_step(folder)
        if step is None:
            shutil.rmtree(folder)
        else:
            echo(f"{request.label}: an earlier run ended before its result; continuing from step {step}")
        tracking = tracking_of(lake, request.report_to, f"{request.experiment}-seed{request.seed}-sft")
        result = run_worker(
            WORKER,
            worker_config(request).model_copy(update={"tracking": tracking}),
            folder,
            SftWorkerResult,
            processes=request.train.shards,
            context=context,
            echo=echo,
        )
        confirm_dtype(result, request.dtype, request.label)
        return adopt_checkpoints(lake, folder, result)

    def passes(report: Mapping[str, Any]) -> bool:
        return all(check.passed for check in checks({request.seed: SftReport(**report, reused=False)}, split))

    def adopt() -> None:
        request.adopt_older(lake, "train", worker_config(request))

    report = stored_trainings.train_once(
        lake, request.key, "train", train, passes=passes, label=request.label, log=echo, adopt=adopt
    )
    return SftReport.model_validate(report)


def worker_config(request: SftRequest) -> SftWorkerConfig:
    return SftWorkerConfig(
        label=request.label,
        base=str(request.base_folder),
        base_name=request.base_id,
        files=tuple(str(path) for path in request.files),
        seed=request.seed,
        chat_template=request.chat_template,
        end_ids=request.end_ids,
        device="cuda" if request.gpu else "auto",
        micro_tokens=micro_tokens(request.train),
        state_seconds=float(os.environ.get(STATE_SECONDS_VARIABLE) or STATE_SECONDS),
        train=settings(request.train),
    )


def micro_tokens(train: TrainSection) -> int:
    """Return the tokens of one forward pass on this machine, at most those of a step of the training."""
    return min(int(os.environ.get(MICRO_TOKENS_VARIABLE) or MICRO_TOKENS), train.batch_tokens)


def settings(section: TrainSection) -> SftSettings:
    return SftSettings.model_validate({name: getattr(section, name) for name in SftSettings.model_fields})


def checkpoint_rows(request: SftRequest, report: SftReport, dataset_version: str) -> list[dict[str, Any]]:
    """Rows of the table `checkpoints`, in order of steps."""
    plan = report.plan
    shared = {
        "experiment": request.experiment,
        "role": "sft",
        "seed": request.seed,
        "method": request.train.method,
        "parent_id": request.base_id,
        "dataset_version": dataset_version,
        "label_tokens": report.counted.labels,
        "wall_seconds": sum(seconds for _, seconds in report.seconds),
    }
    planned = {name: getattr(plan, name) for name in ("steps", "step_weight", "sequences", "weighted_rows")}
    return checkpoints.checkpoint_rows(report, shared, request.train, planned)


def log_rows(request: SftRequest, report: SftReport) -> list[dict[str, Any]]:
    """Rows of the table `training_log`."""
    key = {"experiment": request.experiment, "role": "sft", "seed": request.seed}
    return [key | line.model_dump() for line in report.log]
