"""The `tasks` asset: load a suite's tasks, validate them in sandboxes, quarantine the rest."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from etpi_assets.asset import AssetRun, Produced, asset
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import UNPROVEN_REASONS, WHY_UNPROVEN, RejectedInput, Task
from etpi_assets.tasks.table import rejected_table, task_table
from etpi_assets.tasks.task_checks import NAMES, check_tasks
from etpi_resources.hashes import json_hash


@asset(
    set="suite",
    group="sources",
    tables=("tasks", "quarantined"),
    sections=("family", "seed", "params"),
    reads_path=True,
    checks=NAMES,
    expensive=lambda spec: load_family(spec.family).keeps_proofs,
    kept=("tasks", "judge", "judge.{family}", "family.{family}", "sandbox.{sandbox}", "{world}"),
    summary="The suite's tasks, each validated: the reference solution passes three times and the null solution fails.",
)
def tasks(run: AssetRun) -> Produced:
    family = load_family(run.spec.family)
    items = list(family.load(run.key, run.spec.seed, run.spec.params))
    loaded = [item for item in items if isinstance(item, Task)]
    rejected = [item for item in items if isinstance(item, RejectedInput)]
    valid: list[Task] = []
    kind = family.sandbox(run.spec.params)
    if kind is not None:
        with run.progress("validated", len(loaded)) as progress:
            for task, outcome in zip(loaded, family.validate(loaded, run.resources.sandboxes(kind)), strict=True):
                if isinstance(outcome, Task):
                    valid.append(outcome)
                elif run.spec.params.get("keep_unproven") and outcome.reason in UNPROVEN_REASONS:
                    valid.append(_unproven(task, outcome))
                else:
                    rejected.append(outcome)
                progress.advance()
    else:
        valid = loaded
    return Produced(
        tables={"tasks": task_table(valid), "quarantined": rejected_table(rejected)},
        checks=check_tasks(len(items), valid, rejected, family),
        metadata={
            "splits": dict(Counter(task.split for task in valid)),
            "repositories": dict(Counter(task.repo for task in valid)),
            "runnable": kind is not None,
            "unproven": sum(WHY_UNPROVEN in task.payload for task in valid),
        },
        seeds=(run.spec.seed,),
    )


def _unproven(task: Task, rejection: RejectedInput) -> Task:
    """Return the task marked as one that is run without a verdict."""
    reason = f"{rejection.reason}: {rejection.detail}"
    digest = json_hash([task.content_hash, WHY_UNPROVEN])
    return replace(task, payload={**task.payload, WHY_UNPROVEN: reason}, content_hash=digest)
