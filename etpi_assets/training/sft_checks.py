"""What a fine-tuning report proves: that the labels were learnt, nothing cut, and what was saved is what was trained.

Belongs here: judging a trainer's report against the dataset's own table. Does not belong here: training (`sft`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etpi_resources.lake.checks import CheckOutcome
from etpi_resources.lake.lake import Lake, LakeError

PROOFS = ("weights_differ_from_base", "adapter_not_zero", "reload_equals_saved")
"""What every trainer's report proves of its checkpoint."""

CHECKS = ("label_tokens_match", "no_sequence_cut", "loss_finite_and_falls", *PROOFS)

Verdict = tuple[bool, str, dict[str, Any]]
"""Whether it holds, in words, and the figures."""

SAME_IN_FLOAT32 = 1e-4
SAME_IN_HALF = 5e-2
"""Largest relative difference of logits that rounding explains, where the weights are kept in float32 or in 16 bits."""


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


def checks(reports: Mapping[int, Mapping[str, Any]], expected: Expected) -> list[CheckOutcome]:
    """Every check of `CHECKS` over the reports of all seeds, blocking."""
    found = {
        "label_tokens_match": lambda r: _counts(r, "labels", expected.labels, expected.sequences),
        "no_sequence_cut": lambda r: _counts(r, "tokens", expected.tokens, expected.sequences),
        "loss_finite_and_falls": _loss,
    }
    return [*_outcomes(found, reports), *proofs(reports)]


def proofs(reports: Mapping[int, Mapping[str, Any]]) -> list[CheckOutcome]:
    """Every check of `PROOFS` over the reports of all seeds, of whatever trainer; blocking."""
    judges = {"weights_differ_from_base": _differs, "adapter_not_zero": _adapter, "reload_equals_saved": _reload}
    return _outcomes(judges, reports)


def _outcomes(
    found: Mapping[str, Callable[[Mapping[str, Any]], Verdict]], reports: Mapping[int, Mapping[str, Any]]
) -> list[CheckOutcome]:
    outcomes = []
    for name, judge in found.items():
        verdicts = {seed: judge(report) for seed, report in reports.items()}
        failed = {seed: words for seed, (passed, words, _) in verdicts.items() if not passed}
        words = failed or {seed: said for seed, (_, said, _) in verdicts.items()}
        message = "; ".join(f"seed {seed}: {said}" for seed, said in words.items())
        figures = {str(seed): figure for seed, (_, _, figure) in verdicts.items()}
        outcomes.append(CheckOutcome(name, not failed, message, figures=figures))
    return outcomes


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
