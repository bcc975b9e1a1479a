"""Checks of the `tasks` asset. A task's own validity is decided by `Family.validate`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from etpi_assets.tasks.family import EXCLUDED, Family, RejectedInput, Task
from etpi_resources.lake.check_outcome import CheckOutcome, listed, percent

NAMES = ("tasks_accounted", "tasks_valid", "split_by_repo", "heldout_names_unseen")

MAX_REJECTED = 0.1
"""Largest share of rejected inputs, those left out by the params excepted, from two rejected inputs on. Above it the
suite or its sandbox is broken, or its list of names is stale."""

MIN_UNSEEN = 0.95
"""Smallest share of held-out paths and names that must occur in no training task."""


def check_tasks(
    loaded: int, tasks: Sequence[Task], rejected: Sequence[RejectedInput], family: Family
) -> list[CheckOutcome]:
    """Return the outcomes of NAMES. `loaded` is the number of items that the family yielded, rejected ones included."""
    return [
        _accounted(loaded, tasks, rejected),
        _valid(tasks, rejected),
        _split_by_repo(tasks),
        _heldout_names_unseen(tasks, family),
    ]


def _accounted(loaded: int, tasks: Sequence[Task], rejected: Sequence[RejectedInput]) -> CheckOutcome:
    figures = {"found": loaded, "tasks": len(tasks), "quarantined": len(rejected)}
    repeated = [task_id for task_id, n in Counter(task.task_id for task in tasks).items() if n > 1]
    passed = loaded == len(tasks) + len(rejected) and not repeated and bool(tasks)
    message = f"{loaded} found = {len(tasks)} tasks + {len(rejected)} quarantined."
    if not tasks:
        message = f"{message} Nothing can be rolled out: look at the quarantined table and the spec's params."
    elif not passed:
        message = f"{message} They do not add up, or ids repeat ({repeated[:5]}): the family is wrong."
    return CheckOutcome("tasks_accounted", passed, message, figures=figures)


def _valid(tasks: Sequence[Task], rejected: Sequence[RejectedInput]) -> CheckOutcome:
    faulty = [item for item in rejected if item.reason != EXCLUDED]
    share = len(faulty) / max(1, len(tasks) + len(faulty))
    reasons = dict(Counter(item.reason for item in rejected))
    message = f"{len(rejected)} of {len(tasks) + len(rejected)} quarantined"
    message += f": {listed(reasons)}." if reasons else "."
    passed = len(faulty) < 2 or share <= MAX_REJECTED
    if not passed:
        message += (
            f" More than {percent(MAX_REJECTED)}: the suite is broken, its sandbox, or its list of names is stale."
        )
        message += "".join(f"\n{item.source}: {item.detail[:500]}" for item in faulty[:5])
    figures = {"share": share, "bound": MAX_REJECTED, **reasons}
    return CheckOutcome("tasks_valid", passed, message, figures=figures)


def _split_by_repo(tasks: Sequence[Task]) -> CheckOutcome:
    by_repo: dict[str, list[Task]] = {}
    for task in tasks:
        by_repo.setdefault(task.repo, []).append(task)
    shared = [repo for repo, of_repo in by_repo.items() if len({task.split for task in of_repo}) > 1]
    torn = sorted(repo for repo in shared if not _split_by_time(by_repo[repo]))
    by_time = len(shared) - len(torn)
    message = f"{len(by_repo)} repositories, each in one split"
    message += f" except {by_time}, whose held-out tasks are later than all others." if by_time else "."
    if torn:
        message = (
            f"In more than one split: {', '.join(torn)}. Give every task of a repository the same split, or hold out "
            "its latest tasks (`created_at`)."
        )
    figures = {"repositories": len(by_repo), "by_time": by_time, "torn": len(torn)}
    return CheckOutcome("split_by_repo", not torn, message, figures=figures)


def _split_by_time(tasks: Sequence[Task]) -> bool:
    """Return whether every held-out task of a repository is later than every other one (`created_at`, ISO 8601)."""
    times: dict[bool, list[datetime]] = {True: [], False: []}
    for task in tasks:
        if not (created := task.payload.get("created_at")):
            return False
        moment = datetime.fromisoformat(str(created))
        times[task.split == "heldout"].append(moment if moment.tzinfo else moment.replace(tzinfo=UTC))
    return max(times[False]) <= min(times[True])


def _heldout_names_unseen(tasks: Sequence[Task], family: Family) -> CheckOutcome:
    """Block only where the family invents its names: real repositories share conventional names, which is no leak."""
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for task in tasks:
        names[task.split == "heldout"] |= set(family.entities(task))
    unseen = names[True] - names[False]
    share = len(unseen) / len(names[True]) if names[True] else 1.0
    message = f"{len(unseen)} of {len(names[True])} held-out paths and names occur in no training task."
    if share < MIN_UNSEEN:
        seen = sorted(names[True] - unseen)
        how_many = f"{len(seen)} of {len(names[True])}" if unseen else "All"
        message = (
            f"{how_many} held-out paths and names also occur in training tasks ({', '.join(seen[:5])}), so held-out "
            f"results partly measure memory: at least {percent(MIN_UNSEEN)} should be new."
        )
    figures = {"share": share, "floor": MIN_UNSEEN, "heldout": len(names[True]), "train": len(names[False])}
    return CheckOutcome(
        "heldout_names_unseen", share >= MIN_UNSEEN, message, blocking=family.invents_names, figures=figures
    )
