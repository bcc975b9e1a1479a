"""Recorded rollouts of reinforcement, scored by the reward functions as they are now.

Belongs here: the new values beside those that training used. Does not belong here: running anything again, or what
follows for a checkpoint that was trained on other values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from etpi_assets.scoring.rewards.attempt import attempt_of
from etpi_assets.scoring.rewards.functions import score_attempt
from etpi_assets.specs.training import RewardTerm
from etpi_assets.tasks.family import Task
from etpi_assets.trajectories.records import RolloutRecord
from etpi_resources.lake.checks import CheckOutcome
from etpi_resources.lake.schemas import from_rows


def score_again(
    records: Sequence[RolloutRecord], tasks: Mapping[str, Task], samples: pa.Table, terms: Sequence[RewardTerm]
) -> pa.Table:
    """A `rewards` table of every record, `applied` false. `samples`: the table `rl_samples` of the same rollouts.

    Raises:
        BadReward: an input never arrived; names the row.
    """
    keys = {row["rollout_id"]: {name: row[name] for name in ("seed", "step")} for row in samples.to_pylist()}
    rows = []
    for record in records:
        task = tasks[record.task_id or ""]
        key = {"rollout_id": record.rollout_id, "task_id": task.task_id, "applied": False, **keys[record.rollout_id]}
        rows += [key | vars(score) for score in score_attempt(attempt_of(record, task), terms)]
    return from_rows("rewards", rows)


def as_applied(applied: pa.Table, again: pa.Table) -> CheckOutcome:
    """Whether the functions still say what training was told; a difference only warns."""
    before = {(r["rollout_id"], r["function"]): r for r in applied.to_pylist()}
    moved: dict[str, int] = {}
    for row in again.to_pylist():
        old = before.get((row["rollout_id"], row["function"]))
        if old is None or old["value"] != row["value"]:
            moved[row["function"]] = moved.get(row["function"], 0) + 1
    words = ", ".join(f"{name} on {n} rollouts" for name, n in moved.items())
    message = f"{again.num_rows} rewards are what training was told"
    if moved:
        message = f"rewards changed since training: {words}; materialize rl_checkpoint again to train on them"
    return CheckOutcome("rewards_as_applied", not moved, message, blocking=False, figures=moved)
