"""Checks of the `tasks` asset. A task's own validity is decided by `Family.validate`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from etpi_assets.checks import CHECKS, outcome, within
from etpi_assets.tasks.family import EXCLUDED, Family, RejectedInput, Task
from etpi_resources.lake.check_outcome import CheckOutcome, listed


def check_tasks(
    loaded: int, tasks: Sequence[Task], rejected: Sequence[RejectedInput], family: Family
) -> list[CheckOutcome]:
    """Return the outcomes of all checks.

    Args:
        loaded: the number of items that the family yielded, rejected ones included.
    """
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
    case = "" if tasks else "empty"
    return outcome("tasks_accounted", passed, figures, case=case, repeated=repeated[:5])


def _valid(tasks: Sequence[Task], rejected: Sequence[RejectedInput]) -> CheckOutcome:
    """Bound the share of rejected inputs, those that the params leave out excepted, from two rejected inputs on."""
    invalid = [item for item in rejected if item.reason != EXCLUDED]
    share = len(invalid) / max(1, len(tasks) + len(invalid))
    reasons = dict(Counter(item.reason for item in rejected))
    return outcome(
        "tasks_valid",
        len(invalid) < 2 or within("tasks_valid", share),
        {"share": share, "bound": CHECKS["tasks"]["tasks_valid"].fixed, **reasons},
        rejected=len(rejected),
        found=len(tasks) + len(rejected),
        by_reason=f": {listed(reasons)}." if reasons else ".",
        first="".join(f"\n{item.source}: {item.detail[:500]}" for item in invalid[:5]),
    )


def _split_by_repo(tasks: Sequence[Task]) -> CheckOutcome:
    by_repo: defaultdict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        by_repo[task.repo].append(task)
    shared = [repo for repo, of_repo in by_repo.items() if len({task.split for task in of_repo}) > 1]
    torn = sorted(repo for repo in shared if not _split_by_time(by_repo[repo]))
    figures = {"repositories": len(by_repo), "by_time": len(shared) - len(torn), "torn": len(torn)}
    hint = "by_time" if figures["by_time"] else ""
    return outcome("split_by_repo", not torn, figures, hint=hint, names=", ".join(torn))


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
    name, held_out, trained = "heldout_names_unseen", set[str](), set[str]()
    for task in tasks:
        (held_out if task.split == "heldout" else trained).update(family.entities(task))
    unseen, seen = len(held_out - trained), sorted(held_out & trained)
    share = unseen / len(held_out) if held_out else 1.0
    figures = {
        "share": share, "floor": CHECKS["tasks"][name].fixed, "heldout": len(held_out), "train": len(trained)
    }  # fmt: skip
    words = {"unseen": unseen, "seen": f"{len(seen)} of {len(held_out)}" if unseen else "All"}
    result = outcome(name, within(name, share), figures, **words, first=", ".join(seen[:5]))
    return replace(result, blocking=family.invents_names)
