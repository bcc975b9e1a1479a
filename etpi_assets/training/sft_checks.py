"""Checks of a trainer's report against the dataset: all labels entered the loss, no sequence was cut, the loss falls,
and the saved checkpoint is the trained one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from etpi_assets.training.checkpoints import SftReport
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.lake import Lake, LakeError
from etpi_resources.trainers.contracts import TrainingFigures

PROOFS = ("weights_differ_from_base", "adapter_not_zero", "reload_equals_saved")
"""The checks of a checkpoint that SFT and GRPO have in common."""

CHECKS = ("label_tokens_match", "no_sequence_cut", "loss_finite_and_falls", *PROOFS)

Judgement = tuple[bool, str, dict[str, Any]]
"""(whether the check passes, the message, the figures)."""
Report = TypeVar("Report", bound=TrainingFigures)

SAME_IN_FLOAT32 = 1e-4
SAME_IN_HALF = 1e-2
"""Largest relative difference of logits between equal weights on one device, computed in float32 and in 16 bits."""


@dataclass(frozen=True)
class TrainingSplit:
    """Counts of a dataset's training split, read from its table and not from the trainer; `weights` of the labels."""

    sequences: int
    labels: int
    tokens: int
    weights: float


def training_split(lake: Lake, files: Sequence[Path]) -> TrainingSplit:
    """Count the training split of sequence files.

    Raises:
        LakeError: it is empty.
    """
    sql = """
        SELECT count(*) AS sequences, sum(len(input_ids)) AS tokens,
               sum(list_sum(span_ends) - list_sum(span_starts)) AS labels,
               sum(list_sum(list_transform(span_weights, lambda w, i: w * (span_ends[i] - span_starts[i])))) AS weights
        FROM sequences WHERE split = 'train'
    """
    row = lake.query(sql, sequences=files).to_pylist()[0]
    if not row["sequences"]:
        raise LakeError(
            "upweighted_dataset has no training sequence; its table `dropped` has the reason for each rollout"
        )
    return TrainingSplit(int(row["sequences"]), int(row["labels"]), int(row["tokens"]), float(row["weights"]))


def checks(reports: Mapping[int, SftReport], split: TrainingSplit) -> list[CheckOutcome]:
    """Run every check of `CHECKS` on the reports of all seeds; all are blocking."""
    judges: dict[str, Callable[[SftReport], Judgement]] = {
        "label_tokens_match": lambda r: _labels(r, split),
        "no_sequence_cut": lambda r: _counts(r, "tokens", split.tokens, split.sequences),
        "loss_finite_and_falls": _loss,
    }
    return [*outcomes_of_seeds(judges, reports), *proofs(reports)]


def proofs(reports: Mapping[int, TrainingFigures]) -> list[CheckOutcome]:
    """Run every check of `PROOFS` on the reports of all seeds; all are blocking."""
    return outcomes_of_seeds(JUDGES, reports)


def outcomes_of_seeds(
    judges: Mapping[str, Callable[[Report], Judgement]], reports: Mapping[int, Report]
) -> list[CheckOutcome]:
    """Return one outcome per check; its message has the seeds that failed, or all seeds if none did."""
    outcomes = []
    for name, judge in judges.items():
        judgements = {seed: judge(report) for seed, report in reports.items()}
        failed = {seed: message for seed, (passed, message, _) in judgements.items() if not passed}
        messages = failed or {seed: message for seed, (_, message, _) in judgements.items()}
        message = "; ".join(f"seed {seed}: {text}" for seed, text in messages.items())
        figures = {str(seed): figures for seed, (_, _, figures) in judgements.items()}
        outcomes.append(CheckOutcome(name, not failed, message, figures=figures))
    return outcomes


def _labels(report: SftReport, split: TrainingSplit) -> Judgement:
    """Compare the labels of the first pass with the dataset's table, and then their weights."""
    judgement = _counts(report, "labels", split.labels, split.sequences)
    if judgement[0] and report.counted.weights is not None:
        weights = _counts(report, "weights", split.weights, split.sequences)
        return judgement if weights[0] else weights
    return judgement


def _counts(report: SftReport, what: str, in_dataset: float, sequences: int) -> Judgement:
    """Compare the labels, their weights (which are added in another order) or the tokens of the first pass with the
    dataset's table.

    If the run ended within its first pass, compare them with the trainer's plan.
    """
    counted = report.counted
    seen, complete = getattr(counted, what), counted.complete
    expected = in_dataset if complete else getattr(counted, f"{what}_planned")
    read = report.plan.sequences
    figures = {"seen": seen, "expected": expected, "whole_pass": complete, "sequences": read}
    where = "one pass" if complete else "the part of a pass that was trained"
    if math.isclose(seen, expected, rel_tol=1e-5 if what == "weights" else 0) and read == sequences:
        return True, f"{seen} {what} entered the loss in {where}", figures
    return (
        False,
        f"{seen} {what} entered the loss in {where}, and the dataset has {expected} ({read} of {sequences} sequences "
        "were read); the trainer ignores or cuts data: look at collate and compute_loss",
        figures,
    )


def _loss(report: SftReport) -> Judgement:
    """Check that the last validation loss until the checkpoint that is used, or else the first after it, is below the
    one before the first step.

    Without a validation split, check that the last training loss until that checkpoint is below the first.
    """
    used = next((checkpoint.step for checkpoint in report.checkpoints if checkpoint.final), report.log[-1].step)
    validation = [(line.step, line.val_loss) for line in report.log if line.val_loss is not None]
    kind = "validation" if validation else "training"
    values = [loss for number, (step, loss) in enumerate(validation) if step <= used or number < 2] or [
        line.loss for line in report.log if line.loss is not None and line.step <= used
    ]
    first, last = values[0], values[-1]
    figures = {"kind": kind, "first": first, "last": last}
    change = f"{kind} loss {first:.3f} -> {last:.3f}"
    if not all(math.isfinite(value) for value in values):
        return False, f"{change}: not finite; lower train.learning_rate", figures
    if len(values) == 1:
        return True, f"{change}: one step and no validation split, nothing to compare", figures
    if last < first:
        return True, change, figures
    return False, f"{change}: it does not fall; look at train.learning_rate, the labels and the base", figures


def _differs(report: TrainingFigures) -> Judgement:
    saved = report.saved
    unchanged, share = saved.unchanged or (), saved.changed_share
    figures = {
        "changed_share": share,
        "logits_differ_by": saved.base_difference,
        "unchanged": list(unchanged[:10]),
        "trained": saved.trained,
    }
    if share > 0 and not unchanged:
        return True, f"{share:.2%} of the entries of trained weights differ from the base's as saved", figures
    if unchanged:
        reason = f"{len(unchanged)} of {saved.trained} trained tensors equal the base's ({unchanged[0]} ...)"
    else:
        reason = f"rounded to {saved.dtype}, the trained weights equal the base's"
    return False, f"{reason}: training changed nothing; is train.learning_rate zero or a part frozen?", figures


def _adapter(report: TrainingFigures) -> Judgement:
    saved = report.saved
    if saved.adapters is None:
        return True, "full fine-tuning: there is no adapter", {}
    zero, count = saved.zero_adapters or (), saved.adapters
    figures = {"adapters": count, "zero": list(zero[:10])}
    if count and not zero:
        return True, f"none of {count} lora_B is zero", figures
    first = f" ({zero[0]} ...)" if zero else ""
    return (
        False,
        f"{len(zero)} of {count} lora_B are zero{first}: the adapter adds nothing there; is train.learning_rate zero, "
        "or does train.target_modules name modules that are not used?",
        figures,
    )


def _reload(report: TrainingFigures) -> Judgement:
    """Judge tensors exactly, and logits of equal weights; of a merge in 16 bits, whose rounding is part of the result,
    the logits are only reported."""
    saved = report.saved
    exact = saved.compared_in == "float32"
    bound = SAME_IN_FLOAT32 if exact else SAME_IN_HALF
    measured = {"reload_difference": saved.reload_difference, "merge_difference": saved.merge_difference}
    differences = {name: value for name, value in measured.items() if value is not None}
    figures = {**differences, "bound": bound, "compared_in": saved.compared_in, "differing": list(saved.differing[:10])}
    judged = {name: value for name, value in differences.items() if exact or name != "merge_difference"}
    compared = f"logits within {max(judged.values()):.1g}" if judged else "logits were not compared"
    if not saved.differing and all(value <= bound for value in judged.values()):
        return True, f"the files read back equal the trained weights ({compared})", figures
    reason = f"tensors that read back otherwise: {list(saved.differing[:3])}" if saved.differing else str(judged)
    return False, f"the saved checkpoint is not the trained one: {reason}, bound {bound}; do not serve it", figures


JUDGES: Mapping[str, Callable[[TrainingFigures], Judgement]] = dict(
    zip(PROOFS, (_differs, _adapter, _reload), strict=True)
)
"""`PROOFS` with their functions, which read `saved` alone."""
