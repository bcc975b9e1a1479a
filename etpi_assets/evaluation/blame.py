"""Blame: held-out rollouts as the objective of the influence of training rows, and the checks of that influence."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.checks import outcome
from etpi_assets.curation.merge import merge
from etpi_assets.evaluation.rollouts import BUDGET, STEERED
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.schemas import from_rows

WORKER = "etpi_resources.trainers.workers.blame_worker"
EXTREMES = 10
"""Rollouts at either end whose influence is divided by held-out task."""
MINIMUM_TASKS = 8
"""Fewest held-out tasks that blame reads; docs/blame.md has the measurement."""
LARGEST_ERROR = 0.05
"""Bound of the difference between influences and those by gradients, over the largest; rounding gives about 1e-3."""


def seen_tasks(tasks: Iterable[str], share: float) -> set[str]:
    """Return the share of held-out tasks that blame reads, the same whatever their order; the others judge a
    retraining."""
    ordered = sorted(set(tasks), key=lambda task: hashlib.sha256(task.encode()).digest())
    return set(ordered[: round(share * len(ordered))])


def advantages(rollouts: pa.Table, scores: pa.Table, metric: str, seed: int, tasks: set[str]) -> dict[str, float]:
    """Return (value - mean) / n of the fine-tuned checkpoint's rollouts on `tasks`, by rollout; those at the mean and
    those without a value are left out.

    Args:
        rollouts, scores: tables of an evaluation.
        metric: a column of `scores`, or "solved".
    """
    evaluated = rollouts.filter((pc.field("checkpoint_role") == "sft") & (pc.field("seed") == seed)).to_pylist()
    chosen = {row["rollout_id"] for row in evaluated if not {BUDGET, STEERED[0]} & set(row["decoding"] or "")}
    values = {}
    for row in scores.to_pylist():
        value = row["reward" if metric == "solved" else metric]
        counts = row["rollout_id"] in chosen and row["task_id"] in tasks and not row["infrastructure_error"]
        if counts and value is not None:
            values[row["rollout_id"]] = float(value == 1.0 if metric == "solved" else value)
    mean = sum(values.values()) / max(1, len(values))
    return {name: (value - mean) / len(values) for name, value in values.items() if value != mean}


def heldout_sequences(
    turns: pa.Table, task_of: Mapping[str, str], advantage: Mapping[str, float], max_tokens: int
) -> pa.Table:
    """Return the turns of held-out rollouts as `sequences` named by task: of split "raised" where the advantage is
    above 0, "lowered" below; the weight of a token is the size of its rollout's advantage."""
    turns = turns.filter(pc.field("rollout_id").isin(pa.array(advantage, pa.string())))
    rows, length = [], pc.list_value_length  # pyright: ignore[reportAttributeAccessIssue]
    for turn in (
        turns.filter(pc.field("suffix_ids").is_valid() & (length(pc.field("output_ids")) > 0))
        .select(["rollout_id", "agent_id", "turn"])
        .to_pylist()
    ):
        value, name = advantage[turn["rollout_id"]], "/".join(map(str, turn.values()))
        split = "raised" if value > 0 else "lowered"
        task = {"task_id": task_of[turn["rollout_id"]], "split": split, "weight": abs(value), "copies": 1}
        rows.append({**turn, **task, "pair_id": name, "dataset_row_id": name})
    _, sequences = merge(from_rows("dataset_rows", rows), turns, max_tokens)
    names = [task_of[name] for name in sequences["rollout_id"].to_pylist()]
    return sequences.set_column(0, sequences.schema.field(0), pa.array(names, pa.string()))


def outcomes_vary(splits: Mapping[int, Sequence[str]], metric: str) -> CheckOutcome:
    """Check that the held-out rollouts of each seed have both a higher and a lower value than their mean.

    Args:
        splits: seed -> the split of each held-out sequence.
    """
    figures = {
        f"seed {seed}": {side: list(s).count(side) for side in ("raised", "lowered")} for seed, s in splits.items()
    }
    bad = [seed for seed, s in splits.items() if {"raised", "lowered"} - set(s)]
    hint = "equal" if all(not splits[seed] for seed in bad) else ""
    return outcome("outcomes_vary", not bad, figures, hint=hint, sides=figures, metric=metric, bad=bad)


def enough_tasks(seen: int, unseen: int) -> CheckOutcome:
    """Check that blame reads MINIMUM_TASKS held-out tasks, and that others are left to judge a retraining."""
    passed = seen >= MINIMUM_TASKS and unseen > 0
    return outcome("enough_tasks", passed, {"seen": seen, "unseen": unseen}, least=MINIMUM_TASKS)


def matches_gradients(exact: Sequence[float], measured: Sequence[float]) -> CheckOutcome:
    """Check that influences by two forward passes are those by the gradients of some sequences."""
    largest = max(map(abs, exact), default=0.0)
    error = float(np.abs(np.subtract(exact, measured)).max(initial=0.0)) / (largest or 1.0)
    passed = bool(np.isfinite(error)) and error <= LARGEST_ERROR
    return outcome("matches_gradients", passed, {"error": error}, sequences=len(exact), bound=LARGEST_ERROR)


def every_row_blamed(table: pa.Table, rows: int, checkpoints: int) -> CheckOutcome:
    """Check that each training row has one finite influence by each checkpoint."""
    keys = set(zip(*(table[name].to_pylist() for name in ("seed", "step", "dataset_row_id")), strict=True))
    finite = bool(np.isfinite(table["influence"].to_numpy()).all())
    passed = len(keys) == table.num_rows == rows * checkpoints and finite
    figures = {"rows": rows, "checkpoints": checkpoints}
    return outcome("every_row_blamed", passed, figures, influences=table.num_rows)
