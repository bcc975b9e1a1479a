"""Supervised fine-tuning as a recipe: what is asked of the trainer, what its answer proves, and what becomes of its
files.

Belongs here: from a base, a dataset and a train section to checkpoints in the lake, their rows and their checks. Does
not belong here: the training itself (`etpi_resources.trainers.workers`), Dagster, or the base (`base`).

The same base, sequences, train section, seed, template and trainer code give the same checkpoints, whichever experiment
asks: they are found again (`kept`) and not trained twice.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etpi_assets.specs.models import TrainSection
from etpi_assets.training import kept
from etpi_resources.checks import CheckOutcome
from etpi_resources.lake import Lake, LakeError, folder_hash
from etpi_resources.trainers.pipes import run_worker

WORKER = "etpi_resources.trainers.workers.sft_worker"
CHECKS = (
    "label_tokens_match", "no_sequence_cut", "loss_finite_and_falls", "weights_differ_from_base", "adapter_not_zero",
    "reload_equals_saved",
)  # fmt: skip

MICRO_TOKENS_VARIABLE = "ETPI_MICRO_TOKENS"
MICRO_TOKENS = 8192
SAME_IN_FLOAT32 = 1e-4
SAME_IN_HALF = 5e-2
"""Largest relative difference of logits that rounding explains, where the weights are kept in float32 or in 16 bits."""


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
            "train": self.train.model_dump(mode="json"),
            "seed": self.seed,
            "chat_template": self.chat_template,
            "code": self.code,
        }
        return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Expected:
    """What the training split of a dataset holds, read from its table and not from the trainer."""

    sequences: int
    labels: int
    tokens: int


def expected_of(lake: Lake, files: Sequence[Path]) -> Expected:
    """Count the training split of sequence files.

    Raises:
        LakeError: it is empty.
    """
    sql = """
        SELECT count(*) AS sequences, sum(len(input_ids)) AS tokens,
               sum(list_sum(span_ends) - list_sum(span_starts)) AS labels
        FROM sequences WHERE split = 'train'
    """
    row = lake.query(sql, sequences=files).to_pylist()[0]
    if not row["sequences"]:
        raise LakeError(
            "upweighted_dataset holds no training sequence; see its table `dropped` for where the rollouts went"
        )
    return Expected(int(row["sequences"]), int(row["labels"]), int(row["tokens"]))


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
    if report := kept.find(lake, request.key):
        echo(f"{request.label}: trained before, nothing to do")
        return report | {"reused": True}
    staging = lake.scratch(f"train/{request.key}")
    shutil.rmtree(staging)
    report = run_worker(WORKER, worker_config(request), staging, context=context, echo=echo)
    report["checkpoints"] = [_adopt(lake, staging, checkpoint) for checkpoint in report["checkpoints"]]
    if all(check.passed for check in checks({request.seed: report}, expected)):
        kept.keep(lake, request.key, report)
    shutil.rmtree(staging)
    return report | {"reused": False}


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


def _adopt(lake: Lake, staging: Path, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    adapter = folder_hash(staging / checkpoint["adapter"]) if checkpoint["adapter"] else None
    checkpoint_id, _ = lake.adopt_checkpoint(staging / checkpoint["folder"])
    row = {key: checkpoint[key] for key in ("step", "final", "train_loss", "val_loss")}
    return row | {"checkpoint_id": checkpoint_id, "adapter_hash": adapter}


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
                "path": path,
                "adapter_path": f"{path}/adapter" if checkpoint["adapter_hash"] else None,
                "adapter_hash": checkpoint["adapter_hash"],
                "parent_id": request.base_id,
                "dataset_version": dataset_version,
                "label_tokens": report["counted"]["labels"],
                "train_loss": checkpoint["train_loss"],
                "val_loss": checkpoint["val_loss"],
                "wall_seconds": sum(report["seconds"].values()),
                "hyperparameters": json.dumps(settings, sort_keys=True),
            }
        )
    return rows


def log_rows(request: Request, report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the table `training_log`."""
    return [{"experiment": request.experiment, "role": "sft", "seed": request.seed, **line} for line in report["log"]]


# --- checks --------------------------------------------------------------------------------------------------------


def checks(reports: Mapping[int, Mapping[str, Any]], expected: Expected) -> list[CheckOutcome]:
    """Every check of `CHECKS` over the reports of all seeds, blocking."""
    found = {
        "label_tokens_match": lambda r: _counts(r, "labels", expected.labels, expected.sequences),
        "no_sequence_cut": lambda r: _counts(r, "tokens", expected.tokens, expected.sequences),
        "loss_finite_and_falls": _loss,
        "weights_differ_from_base": _differs,
        "adapter_not_zero": _adapter,
        "reload_equals_saved": _reload,
    }
    outcomes = []
    for name, judge in found.items():
        verdicts = {seed: judge(report) for seed, report in reports.items()}
        failed = {seed: words for seed, (passed, words, _) in verdicts.items() if not passed}
        words = failed or {seed: said for seed, (_, said, _) in verdicts.items()}
        message = "; ".join(f"seed {seed}: {said}" for seed, said in words.items())
        figures = {str(seed): figure for seed, (_, _, figure) in verdicts.items()}
        outcomes.append(CheckOutcome(name, not failed, message, figures=figures))
    return outcomes


Verdict = tuple[bool, str, dict[str, Any]]


def _counts(report: Mapping[str, Any], what: str, in_dataset: int, sequences: int) -> Verdict:
    """What entered the loss in the first pass against the dataset's own table; against the trainer's plan where the
    run ended before its first pass did."""
    counted = report["counted"]
    seen, complete = counted[what], counted["complete"]
    wanted = in_dataset if complete else counted[f"{what}_planned"]
    read = report["plan"]["sequences"]
    figures = {"seen": seen, "expected": wanted, "whole_pass": complete, "sequences": read}
    where = "one pass" if complete else "the part of a pass that was trained"
    if seen == wanted and read == sequences:
        return True, f"{seen} {what} entered the loss in {where}", figures
    return (
        False,
        f"{seen} {what} entered the loss in {where}, and the dataset has {wanted} ({read} of {sequences} sequences "
        "were read); the trainer ignores or cuts what it is given: look at collate and compute_loss",
        figures,
    )


def _loss(report: Mapping[str, Any]) -> Verdict:
    """Validation loss at the end below that before the first step; without a validation split, training loss at the
    end below that of the first step."""
    log = report["log"]
    kind = "validation" if log[0]["val_loss"] is not None else "training"
    values = [line["val_loss" if kind == "validation" else "loss"] for line in log]
    values = [value for value in values if value is not None]
    first, last = values[0], values[-1]
    figures = {"kind": kind, "first": first, "last": last}
    said = f"{kind} loss {first:.3f} -> {last:.3f}"
    if not all(math.isfinite(value) for value in values):
        return False, f"{said}: not finite; lower train.learning_rate", figures
    if len(values) == 1:
        return True, f"{said}: one step and no validation split, nothing to compare", figures
    if last < first:
        return True, said, figures
    return False, f"{said}: it does not fall; look at train.learning_rate, the labels and the base", figures


def _differs(report: Mapping[str, Any]) -> Verdict:
    saved = report["saved"]
    same, difference = saved.get("unchanged", []), saved["base_difference"]
    figures = {"logits_differ_by": difference, "unchanged": same[:10], "trained": saved.get("trained")}
    if difference > 0 and not same:
        return True, f"logits differ from the base's by {difference:.2g} of their largest", figures
    what = (
        f"{len(same)} of {saved['trained']} trained tensors equal the base's ({same[0]} ...)" if same else "its logits"
    )
    return False, f"{what}: training did nothing there; is train.learning_rate zero or a part frozen?", figures


def _adapter(report: Mapping[str, Any]) -> Verdict:
    saved = report["saved"]
    if "adapters" not in saved:
        return True, "full fine-tuning: there is no adapter", {}
    zero, count = saved["zero_adapters"], saved["adapters"]
    figures = {"adapters": count, "zero": zero[:10]}
    if count and not zero:
        return True, f"none of {count} lora_B is zero", figures
    first = f" ({zero[0]} ...)" if zero else ""
    return (
        False,
        f"{len(zero)} of {count} lora_B are zero{first}: the adapter equals the base there; is train.learning_rate "
        "zero, or does train.target_modules name modules that are not used?",
        figures,
    )


def _reload(report: Mapping[str, Any]) -> Verdict:
    saved = report["saved"]
    bound = SAME_IN_FLOAT32 if saved["dtype"] == "float32" else SAME_IN_HALF
    apart = {key: saved[key] for key in ("reload_difference", "merge_difference") if key in saved}
    figures = {**apart, "bound": bound, "differing": saved["differing"][:10]}
    worst = max(apart.values())
    if not saved["differing"] and worst <= bound:
        return True, f"what is read back equals what was trained (logits within {worst:.1g})", figures
    what = f"tensors that read back otherwise: {saved['differing'][:3]}" if saved["differing"] else str(apart)
    return False, f"the saved checkpoint is not what was trained: {what}, bound {bound}; do not serve it", figures
