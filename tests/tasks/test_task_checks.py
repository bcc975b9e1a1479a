"""The checks of `tasks` on a few tasks with one fault each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from etpi_assets.tasks.family import EXCLUDED, RejectedInput, Task
from etpi_assets.tasks.task_checks import check_tasks


def task(name: str, split: str = "train", repo: str = "a", **payload: Any) -> Task:
    return Task(name, "s", repo, split, "", {"names": [name], **payload}, name)


def failed(
    tasks: list[Task], rejected: list[RejectedInput] | None = None, loaded: int | None = None, invents: bool = True
) -> set[str]:
    """Return the names of the failed checks, `warns:` before those that block nothing."""
    family: Any = SimpleNamespace(entities=lambda task: task.payload["names"], invents_names=invents)
    rejected = rejected or []
    outcomes = check_tasks(len(tasks) + len(rejected) if loaded is None else loaded, tasks, rejected, family)
    return {o.name if o.blocking else f"warns:{o.name}" for o in outcomes if not o.passed}


TASKS = [task(f"t{n}") for n in range(18)]


def refusals(count: int, reason: str = "reference_fails") -> list[RejectedInput]:
    return [RejectedInput(f"r{n}", reason, "") for n in range(count)]


def test_sound_suite_passes() -> None:
    assert failed([*TASKS, task("h", "heldout", "b")]) == set()


@pytest.mark.parametrize(
    ("tasks", "loaded"),
    [(TASKS, 19), (TASKS, 17), ([*TASKS, TASKS[0]], 19), ([], 0)],
    ids=["lost", "more", "twice", "none"],
)
def test_tasks_that_do_not_add_up_fail(tasks: list[Task], loaded: int) -> None:
    assert failed(tasks, loaded=loaded) == {"tasks_accounted"}


@pytest.mark.parametrize(
    ("rejected", "passed"),
    [(refusals(2), True), (refusals(3), False), ([*refusals(3), *refusals(18, EXCLUDED)], False),
     ([*refusals(2), *refusals(18, EXCLUDED)], True)],
)  # fmt: skip
def test_a_tenth_of_invalid_tasks_passes_and_more_fails(rejected: list[RejectedInput], passed: bool) -> None:
    assert failed(TASKS, rejected) == (set() if passed else {"tasks_valid"})


@pytest.mark.parametrize(
    ("heldout", "train", "passed"),
    [
        ("2026-02-01", "2026-01-01", True),
        ("2026-01-01T12:00:00Z", "2026-01-01T10:00:00-01:00", True),
        ("2026-01-01T12:00:00Z", "2026-01-01T12:00:00-01:00", False),
        ("2026-01-01", "2026-02-01", False),
        ("2026-02-01", None, False),
        (None, "2026-01-01", False),
    ],
)
def test_repository_in_both_splits_needs_later_held_out_tasks(
    heldout: str | None, train: str | None, passed: bool
) -> None:
    tasks = [
        task("old", created_at="2025-01-01"), task("new", created_at=train), task("h", "heldout", created_at=heldout),
    ]  # fmt: skip
    assert failed(tasks) == (set() if passed else {"split_by_repo"})


@pytest.mark.parametrize(("seen", "passed"), [(1, True), (2, False)])
def test_names_of_held_out_tasks_that_training_has_fail(seen: int, passed: bool) -> None:
    names = [f"n{n}" for n in range(20)]
    tasks = [task("t", names=names[:seen]), task("h", "heldout", "b", names=names)]
    assert failed(tasks) == (set() if passed else {"heldout_names_unseen"})
    assert failed(tasks, invents=False) == (set() if passed else {"warns:heldout_names_unseen"})
