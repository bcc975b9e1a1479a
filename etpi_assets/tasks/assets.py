"""The tasks stage as an asset."""

from __future__ import annotations

from collections import Counter

from etpi_assets.materialize import AssetRun, Produced, etpi_asset
from etpi_assets.tasks.checks import NAMES, check_tasks
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import RejectedInput, Task
from etpi_assets.tasks.table import rejected_table, task_table


@etpi_asset("tasks", checks=NAMES)
def tasks(run: AssetRun) -> Produced:
    family = load_family(run.spec.family)
    found = list(family.load(run.key, run.spec.seed, run.spec.params))
    loaded = [item for item in found if isinstance(item, Task)]
    refusals = [item for item in found if isinstance(item, RejectedInput)]
    taken: list[Task] = []
    kind = family.sandbox(run.spec.params)
    if kind is not None:
        with run.progress("validated", len(loaded)) as progress:
            for outcome in family.validate(loaded, run.resources.sandboxes(kind)):
                if isinstance(outcome, Task):
                    taken.append(outcome)
                else:
                    refusals.append(outcome)
                progress.advance()
    else:
        taken = loaded
    return Produced(
        tables={"tasks": task_table(taken), "quarantined": rejected_table(refusals)},
        checks=check_tasks(len(found), taken, refusals, family),
        metadata={
            "splits": dict(Counter(task.split for task in taken)),
            "repositories": dict(Counter(task.repo for task in taken)),
            "runnable": kind is not None,
        },
        seeds=(run.spec.seed,),
    )


ASSETS = [tasks]
