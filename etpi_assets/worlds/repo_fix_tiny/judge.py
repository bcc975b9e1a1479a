"""The verdict by R2E-Gym's rules: the summary of the hidden tests equals the expected map, and neither is empty.

Belongs here: outcomes, verdicts, and validating tasks by their reference and null solutions. Does not belong here:
drawing tasks, what counts of an agent's work (`frozen`), how hidden tests run (`calls`).

The changes are frozen before any hidden test is there; edited tests, conftest files and start-up hooks are no part of
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etpi_assets.tasks.calls import FunctionCall, run_calls
from etpi_assets.tasks.family import RejectedInput, Task, Verdict
from etpi_assets.tasks.frozen import Changes, counted_changes
from etpi_assets.worlds.repo_fix_tiny.generate import module_text
from etpi_resources.sandboxes import SandboxFactory

REFERENCE_RUNS = 3
"""A reference solution passes so many times, or the task is refused."""

BATCH = 100
"""Tasks validated in one sandbox."""


def judge(task: Task, left: Mapping[str, str], sandboxes: SandboxFactory) -> Verdict:
    """Verdicts: passed (reward 1), failed_tests, no_patch (no file that counts was changed), both 0. `details`: the
    paths `changed`, how many `tests` reported, and those that went otherwise than expected (`wrong`)."""
    changes = counted_changes(task.payload["files"], left)
    if not changes:
        return Verdict(0.0, "no_patch", {"changed": []})
    results = run_calls({"tree": _changed(task, changes)}, {"job": ("tree", _calls(task))}, sandboxes)
    found = _outcomes(task, results.get("job", {}))
    passed, wrong = compare(found, task.payload["expected"])
    details = {"changed": sorted(changes), "tests": len(found), "wrong": wrong}
    return Verdict(float(passed), "passed" if passed else "failed_tests", details)


def compare(found: Mapping[str, str], expected: Mapping[str, str]) -> tuple[bool, list[str]]:
    """(whether the summary is the expected one and neither is empty, the tests that went otherwise)."""
    wrong = sorted(test for test in found.keys() | expected.keys() if found.get(test) != expected.get(test))
    return bool(found) and bool(expected) and not wrong, wrong


def solution(task: Task) -> dict[str, str]:
    """The task's files with its module as the notes want it."""
    module = task.payload["module"]
    return {**task.payload["files"], f"{module}.py": module_text(module, task.payload["value"])}


def validate(tasks: Sequence[Task], sandboxes: SandboxFactory) -> Iterator[RejectedInput | Task]:
    """Each task, in order, if its reference passes REFERENCE_RUNS times and the untouched repository fails; else the
    refusal `reference_fails` or `null_passes`. Tasks share sandboxes."""
    for at in range(0, len(tasks), BATCH):
        batch = tasks[at : at + BATCH]
        trees: dict[str, Mapping[str, str]] = {}
        jobs: dict[str, tuple[str, Mapping[str, FunctionCall]]] = {}
        for index, task in enumerate(batch):
            trees[f"{index}/null"] = _changed(task, {})
            trees[f"{index}/reference"] = _changed(task, counted_changes(task.payload["files"], solution(task)))
            jobs[f"{index}/null"] = (f"{index}/null", _calls(task))
            for run in range(REFERENCE_RUNS):
                jobs[f"{index}/reference/{run}"] = (f"{index}/reference", _calls(task))
        results = run_calls(trees, jobs, sandboxes)
        for index, task in enumerate(batch):
            verdicts = {
                job.partition("/")[2]: compare(_outcomes(task, results.get(job, {})), task.payload["expected"])
                for job in jobs
                if job.startswith(f"{index}/")
            }
            null, _ = verdicts.pop("null")
            failed = [wrong for passed, wrong in verdicts.values() if not passed]
            if failed:
                yield RejectedInput(
                    task.task_id, "reference_fails", f"{len(failed)} of {REFERENCE_RUNS} runs: {failed[0]}"
                )
            elif null:
                yield RejectedInput(task.task_id, "null_passes", "the tests go as expected without any change")
            else:
                yield task


def _changed(task: Task, changes: Changes) -> dict[str, str]:
    """The task's modules with an agent's changes."""
    files = {**task.payload["files"], **changes}
    return {path: text for path, text in files.items() if text is not None}


def _calls(task: Task) -> dict[str, FunctionCall]:
    return {test: (path, function, arguments) for test, (path, function, arguments, _) in task.payload["tests"].items()}


def _outcomes(task: Task, values: Mapping[str, list[Any] | None]) -> dict[str, str]:
    """Test -> PASSED or FAILED, of those that reported."""
    wanted = {test: values for test, (_, _, _, values) in task.payload["tests"].items()}
    return {test: "PASSED" if values[test] == wanted[test] else "FAILED" for test in wanted if test in values}
