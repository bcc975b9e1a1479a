"""Score recorded rollouts of reinforcement with the current reward functions, and compare the values with training's.

Nothing is rolled out or trained again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pyarrow as pa

from etpi_assets.checks import outcome
from etpi_assets.scoring.rewards.functions import score_rollout
from etpi_assets.specs.training import RewardTerm
from etpi_assets.tasks.family import Task
from etpi_assets.trajectories.records import RolloutRecord
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.schemas import from_rows

UNREWARDED = frozenset({"broken", "replaced"})
"""The reasons in `rl_samples.left_out` of rollouts that have no reward, because they broke."""


def rescore_rollouts(
    records: Sequence[RolloutRecord], tasks: Mapping[str, Task], samples: pa.Table, terms: Sequence[RewardTerm]
) -> pa.Table:
    """Return a `rewards` table of every record, with `applied` false.

    Args:
        samples: the table `rl_samples` of the same rollouts; those that broke have no rewards.

    Raises:
        BadReward: an input is missing; the message names the row.
    """
    names = [name for name in ("rollout_id", "seed", "step", "left_out") if name in samples.column_names]
    columns = samples.select(names).to_pylist()
    whole = [row for row in columns if row.get("left_out") not in UNREWARDED]
    keys = {row["rollout_id"]: {name: row[name] for name in ("seed", "step")} for row in whole}
    rows = []
    for record in (record for record in records if record.rollout_id in keys):
        task = tasks[record.task_id or ""]
        key = {"rollout_id": record.rollout_id, "task_id": task.task_id, "applied": False, **keys[record.rollout_id]}
        rows += [key | vars(score) for score in score_rollout(record, task, terms)]
    return from_rows("rewards", rows)


def rewards_as_applied(applied: pa.Table, rescored: pa.Table) -> CheckOutcome:
    """Check that the current terms give the values that training used, with their weights; a difference only warns."""
    columns = ["rollout_id", "function", "weight", "value", "agent_id"]
    before, now = ({tuple(row.values()) for row in rows.select(columns).to_pylist()} for rows in (applied, rescored))
    changed = Counter(function for _, function in sorted({row[:2] for row in before ^ now}))
    counts = ", ".join(f"{name} on {n} rollouts" for name, n in changed.items())
    return outcome("rewards_as_applied", not changed, changed, rewards=rescored.num_rows, counts=counts)
