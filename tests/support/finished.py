"""Finished rollouts of a few tasks, for tests of journals."""

from __future__ import annotations

from etpi_assets.agent.loop import rollout_id
from etpi_assets.tasks.family import Task
from etpi_assets.trajectories.records import AgentRecord, RolloutRecord, Turn

TASKS = [Task(f"t{i}", "suite", "repo", "train", "do it", {}, f"hash{i}") for i in range(4)]


def made(task: Task, sample: int, spec_key: str = "spec", error: str | None = None) -> RolloutRecord:
    turn = Turn(0, f"{task.task_id}/{sample}", [1, 2, sample], [3], capture="native")
    return RolloutRecord(
        rollout_id(task, sample, spec_key), "set", task.suite, task.task_id, task.repo,
        [AgentRecord("agent1", "f1", "solo", "Submitted", [turn])],
        task_hash=task.content_hash, sample=sample, error=error,
    )  # fmt: skip
