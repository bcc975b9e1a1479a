"""What must hold of a suite's tasks before anything is rolled out.

Belongs here: the checks of the `tasks` asset. Does not belong here: the validity of one task, which its family proves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from etpi_assets.tasks.family import Family, RejectedInput, Task
from etpi_resources.lake.checks import CheckOutcome

NAMES = ("tasks_accounted", "tasks_valid", "split_by_repo", "heldout_names_unseen")

MAX_REFUSED = 0.1
"""A suite that loses more than this share is broken itself, or its sandbox is, or the names it asks for are gone."""

MIN_UNSEEN = 0.95
"""The share of held-out paths and names that no training task has."""


def check_tasks(
    found: int, tasks: Sequence[Task], refusals: Sequence[RejectedInput], family: Family
) -> list[CheckOutcome]:
    """The outcomes of NAMES; `found` is how many tasks and refusals the family yielded."""
    return [
        _accounted(found, tasks, refusals),
        _valid(tasks, refusals),
        _split_by_repo(tasks),
        _heldout_names_unseen(tasks, family),
    ]


def _accounted(found: int, tasks: Sequence[Task], refusals: Sequence[RejectedInput]) -> CheckOutcome:
    figures = {"found": found, "tasks": len(tasks), "quarantined": len(refusals)}
    repeated = [task_id for task_id, n in Counter(task.task_id for task in tasks).items() if n > 1]
    passed = found == len(tasks) + len(refusals) and not repeated and bool(tasks)
    message = f"{found} found = {len(tasks)} tasks + {len(refusals)} quarantined."
    if not tasks:
        message = f"{message} Nothing can be rolled out: look at the quarantined table and the spec's params."
    elif not passed:
        message = f"{message} They do not add up, or ids repeat ({repeated[:5]}): the family is wrong."
    return CheckOutcome("tasks_accounted", passed, message, figures=figures)


def _valid(tasks: Sequence[Task], refusals: Sequence[RejectedInput]) -> CheckOutcome:
    share = len(refusals) / max(1, len(tasks) + len(refusals))
    reasons = dict(Counter(refusal.reason for refusal in refusals))
    message = f"{len(refusals)} of {len(tasks) + len(refusals)} quarantined {reasons or ''}".rstrip() + "."
    if share > MAX_REFUSED:
        message += f" More than {MAX_REFUSED:.0%}: the suite is broken, its sandbox, or its list of names is stale."
        message += f" First: {refusals[0].source}: {refusals[0].detail}"
    figures = {"share": share, "bound": MAX_REFUSED, **reasons}
    return CheckOutcome("tasks_valid", share <= MAX_REFUSED, message, figures=figures)


def _split_by_repo(tasks: Sequence[Task]) -> CheckOutcome:
    splits: dict[str, set[str]] = {}
    for task in tasks:
        splits.setdefault(task.repo, set()).add(task.split)
    torn = sorted(repo for repo, names in splits.items() if len(names) > 1)
    message = f"{len(splits)} repositories, each in one split."
    if torn:
        message = f"In more than one split: {', '.join(torn)}. Give every task of a repository the same split."
    return CheckOutcome("split_by_repo", not torn, message, figures={"repositories": len(splits), "torn": len(torn)})


def _heldout_names_unseen(tasks: Sequence[Task], family: Family) -> CheckOutcome:
    """Blocks a suite whose names are invented; real repositories share conventional ones, and it only warns."""
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for task in tasks:
        names[task.split == "heldout"] |= set(family.entities(task))
    unseen = names[True] - names[False]
    share = len(unseen) / len(names[True]) if names[True] else 1.0
    message = f"{len(unseen)} of {len(names[True])} held-out paths and names occur in no training task."
    if share < MIN_UNSEEN:
        message += f" Below {MIN_UNSEEN:.0%} held-out results measure memory. Seen: {sorted(names[True] - unseen)[:5]}"
    figures = {"share": share, "floor": MIN_UNSEEN, "heldout": len(names[True]), "train": len(names[False])}
    return CheckOutcome(
        "heldout_names_unseen", share >= MIN_UNSEEN, message, blocking=family.invents_names, figures=figures
    )
