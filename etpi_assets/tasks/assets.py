"""The `tasks` asset: load a suite's tasks, validate them in sandboxes, quarantine the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from etpi_assets.asset import AssetRun, Produced, asset
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import TRUSTS, WHY_UNPROVEN, RejectedInput, Task, weakest
from etpi_assets.tasks.proofs import Prover, kept_unproven
from etpi_assets.tasks.table import rejected_table, task_table
from etpi_assets.tasks.task_checks import check_tasks


@asset(
    set="suite",
    group="sources",
    tables=("tasks", "quarantined"),
    sections=("family", "seed", "params", "proof"),
    reads_path=True,
    expensive=lambda spec: load_family(spec.family).keeps_proofs,
    kept=("tasks", "{proofs}", "family.{family}", "sandbox.{sandbox}", "{world}"),
    summary="The suite's tasks; proved, unless they are ahead of their use: their reference passes, no change fails.",
)
def tasks(run: AssetRun) -> Produced:
    family = load_family(run.spec.family)
    items = list(family.load(run.key, run.spec.seed, run.spec.params))
    loaded = [item for item in items if isinstance(item, Task)]
    rejected = [item for item in items if isinstance(item, RejectedInput)]
    valid: list[Task] = []
    prover = Prover.of(run, run.key) if run.spec.proof == "all" else None
    if prover is not None:
        with run.progress("validated", len(loaded)) as progress:
            for task, outcome in zip(loaded, prover.outcomes(loaded, len(loaded), run), strict=True):
                kept = kept_unproven(outcome, task, run.spec.params)
                valid.append(kept) if isinstance(kept, Task) else rejected.append(kept)
                progress.advance()
    else:
        valid = loaded
    levels = Counter(trust for task in valid for trust in family.trusts(task))
    weakest_of = Counter(weakest(family.trusts(task) or ["unknown"]) for task in valid)
    run.log(f"{run.label}: {_levels(weakest_of)} tasks; of the tests that have to turn {_levels(levels)}")
    checks = check_tasks(len(items), valid, rejected, family)
    if prover is not None and any(check.blocking and not check.passed for check in checks):
        prover.forget_rejections(loaded)
    return Produced(
        tables={"tasks": task_table(valid), "quarantined": rejected_table(rejected)},
        checks=checks,
        metadata={
            "splits": dict(Counter(task.split for task in valid)),
            "repositories": dict(Counter(task.repo for task in valid)),
            "runnable": family.sandbox(run.spec.params) is not None,
            "trust": dict(levels),
            "unproven": sum(WHY_UNPROVEN in task.payload for task in valid),
        },
        seeds=(run.spec.seed,),
    )


def _levels(counts: Mapping[str, int]) -> str:
    """Return "12 blind, 1 reversed"; the strongest trust first."""
    named = {level: counts[level] for level in (*reversed(TRUSTS), "unknown") if counts.get(level)}
    return ", ".join(f"{number} {level}" for level, number in named.items()) or "none known"
