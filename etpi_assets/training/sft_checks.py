"""Checks of a trainer's report against the dataset: all labels entered the loss, no sequence was cut, the loss falls,
and the saved checkpoint is the trained one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from etpi_assets.checks import outcome
from etpi_assets.training.checkpoints import SftReport
from etpi_resources.lake.catalog import sql_folder
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.lake import Lake, LakeError
from etpi_resources.trainers.contracts import TrainingFigures

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
    """Count the training split of sequence files (`sql/figures/training_split.sql`).

    Raises:
        LakeError: it is empty.
    """
    sql = (sql_folder() / "figures" / "training_split.sql").read_text("utf-8")
    split = TrainingSplit(**lake.query(sql, sequences=files).to_pylist()[0])
    if not split.sequences:
        raise LakeError(
            "upweighted_dataset has no training sequence; its table `dropped` has the reason for each rollout"
        )
    return split


def checks(reports: Mapping[int, SftReport], split: TrainingSplit) -> list[CheckOutcome]:
    """Return the outcomes of `sft_checkpoint` for the reports of all seeds; all are blocking."""
    return outcomes_of_seeds((partial(_labels, split=split), partial(_tokens, split=split), _loss, *JUDGES), reports)


def proofs(reports: Mapping[int, TrainingFigures]) -> list[CheckOutcome]:
    """Run the checks of a checkpoint, which SFT and GRPO have in common, on the reports of all seeds."""
    return outcomes_of_seeds(JUDGES, reports)


def outcomes_of_seeds(
    judges: Iterable[Callable[[Report], CheckOutcome]], reports: Mapping[int, Report]
) -> list[CheckOutcome]:
    """Return one outcome per check; its message has the seeds that failed, or all seeds if none did."""
    outcomes = []
    for judge in judges:
        of_seeds = {seed: judge(report) for seed, report in reports.items()}
        failed = {seed: o for seed, o in of_seeds.items() if not o.passed}
        message = "; ".join(f"seed {seed}: {o.message}" for seed, o in (failed or of_seeds).items())
        figures = {str(seed): o.figures for seed, o in of_seeds.items()}
        outcomes.append(CheckOutcome(next(iter(of_seeds.values())).name, not failed, message, figures=figures))
    return outcomes


def _labels(report: SftReport, split: TrainingSplit) -> CheckOutcome:
    """Compare the labels of the first pass with the dataset's table, and then their weights."""
    labels = _counts("label_tokens_match", report, split, "labels")
    if not labels.passed or report.counted.weights is None:
        return labels
    weights = _counts("label_tokens_match", report, split, "weights")
    return labels if weights.passed else weights


def _tokens(report: SftReport, split: TrainingSplit) -> CheckOutcome:
    return _counts("no_sequence_cut", report, split, "tokens")


def _counts(name: str, report: SftReport, split: TrainingSplit, what: str) -> CheckOutcome:
    """Compare the labels, their weights (which are added in another order) or the tokens of the first pass with the
    dataset's table.

    If the run ended within its first pass, compare them with the trainer's plan.
    """
    counted, read = report.counted, report.plan.sequences
    seen, whole = getattr(counted, what), counted.complete
    expected = getattr(split, what) if whole else getattr(counted, f"{what}_planned")
    equal = math.isclose(seen, expected, rel_tol=1e-5 if what == "weights" else 0)
    figures = {"seen": seen, "expected": expected, "whole_pass": whole, "sequences": read}
    where = "one pass" if whole else "the part of a pass that was trained"
    return outcome(name, equal and read == split.sequences, figures, what=what, where=where, wanted=split.sequences)


def _loss(report: SftReport) -> CheckOutcome:
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
    finite = all(math.isfinite(value) for value in values)
    case = "infinite" if not finite else "alone" if len(values) == 1 else ""
    return outcome("loss_finite_and_falls", finite and (bool(case) or last < first), figures, case=case)


def _differs(report: TrainingFigures) -> CheckOutcome:
    saved = report.saved
    unchanged = saved.unchanged or ()
    figures = {
        "changed_share": saved.changed_share,
        "logits_differ_by": saved.base_difference,
        "unchanged": list(unchanged[:10]),
        "trained": saved.trained,
    }
    case = "equal" if unchanged else "" if saved.changed_share > 0 else "rounded"
    words = {"equal": len(unchanged), "first": next(iter(unchanged), ""), "dtype": saved.dtype}
    return outcome("weights_differ_from_base", not case, figures, case=case, **words)


def _adapter(report: TrainingFigures) -> CheckOutcome:
    adapters, zero = report.saved.adapters, report.saved.zero_adapters or ()
    if adapters is None:
        return outcome("adapter_not_zero", True, case="full")
    figures, first = {"adapters": adapters, "zero": list(zero[:10])}, f" ({zero[0]} ...)" if zero else ""
    return outcome("adapter_not_zero", bool(adapters) and not zero, figures, zeros=len(zero), first=first)


def _reload(report: TrainingFigures) -> CheckOutcome:
    """Judge tensors exactly, and logits of equal weights; of a merge in 16 bits, whose rounding is part of the result,
    the logits are only reported."""
    saved = report.saved
    exact = saved.compared_in == "float32"
    bound = SAME_IN_FLOAT32 if exact else SAME_IN_HALF
    measured = {"reload_difference": saved.reload_difference, "merge_difference": saved.merge_difference}
    differences = {name: value for name, value in measured.items() if value is not None}
    judged = {name: value for name, value in differences.items() if exact or name != "merge_difference"}
    return outcome(
        "reload_equals_saved",
        not saved.differing and all(value <= bound for value in judged.values()),
        {**differences, "bound": bound, "compared_in": saved.compared_in, "differing": list(saved.differing[:10])},
        compared=f"logits within {max(judged.values()):.1g}" if judged else "logits were not compared",
        reason=f"tensors that read back otherwise: {list(saved.differing[:3])}" if saved.differing else judged,
    )


JUDGES = (_differs, _adapter, _reload)
"""Checks of a checkpoint, which read `saved` alone."""
