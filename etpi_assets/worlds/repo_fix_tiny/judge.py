"""Judge `repo_fix_tiny` by R2E-Gym's rule: the hidden tests' outcomes equal the expected ones, and neither is empty.

The patch is taken before the hidden tests run, without edited tests, conftest files and start-up hooks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etpi_assets.tasks.calls import FunctionCall, run_calls
from etpi_assets.tasks.family import REFERENCE_RUNS, RejectedInput, Task, Verdict
from etpi_assets.tasks.frozen import Changes, counted_changes
from etpi_assets.worlds.repo_fix_tiny.generate import module_text
from etpi_resources.sandboxes import SandboxFactory

BATCH = 100
"""Tasks validated in one sandbox."""


def judge(task: Task, files: Mapping[str, str], sandboxes: SandboxFactory) -> Verdict:
    """Verdicts: passed (reward 1); failed_tests, no_patch (no counted file was changed), both 0. `details`: the
    `changed` paths, the number of reported `tests`, and those with an unexpected outcome (`wrong`)."""
    changes = counted_changes(task.payload["files"], files)
    if not changes:
        return Verdict(0.0, "no_patch", {"changed": []})
    results = run_calls({"tree": _changed(task, changes)}, {"job": ("tree", _calls(task))}, sandboxes)
    outcomes = _outcomes(task, results.get("job", {}))
    passed, wrong = compare(outcomes, task.payload["expected"])
    details = {"changed": sorted(changes), "tests": len(outcomes), "wrong": wrong}
    return Verdict(float(passed), "passed" if passed else "failed_tests", details)


def compare(outcomes: Mapping[str, str], expected: Mapping[str, str]) -> tuple[bool, list[str]]:
    """Return (whether the outcomes are as expected and neither map is empty, the tests that differ)."""
    wrong = sorted(test for test in outcomes.keys() | expected.keys() if outcomes.get(test) != expected.get(test))
    return bool(outcomes) and bool(expected) and not wrong, wrong


def solution(task: Task) -> dict[str, str]:
    """Return the task's files with the fixed module."""
    module = task.payload["module"]
    return {**task.payload["files"], f"{module}.py": module_text(module, task.payload["value"])}


def validate(tasks: Sequence[Task], sandboxes: SandboxFactory) -> Iterator[RejectedInput | Task]:
    """Yield each task, in order, if its reference passes REFERENCE_RUNS times and the untouched repository fails; else
    the rejection `reference_fails` or `null_passes`. Tasks share sandboxes."""
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
            of_task = [_outcomes(task, results.get(job, {})) for job in jobs if job.startswith(f"{index}/")]
            (null, _), *runs = [compare(outcomes, task.payload["expected"]) for outcomes in of_task]
            failed = [wrong for passed, wrong in runs if not passed]
            if failed:
                yield RejectedInput(
                    task.task_id, "reference_fails", f"{len(failed)} of {REFERENCE_RUNS} runs: {failed[0]}"
                )
            elif null:
                yield RejectedInput(task.task_id, "null_passes", "the tests go as expected without any change")
            else:
                yield task


def _changed(task: Task, changes: Changes) -> dict[str, str]:
    """Return the task's files with an agent's changes."""
    files = {**task.payload["files"], **changes}
    return {path: text for path, text in files.items() if text is not None}


def _calls(task: Task) -> dict[str, FunctionCall]:
    return {test: (path, function, arguments) for test, (path, function, arguments, _) in task.payload["tests"].items()}


def _outcomes(task: Task, values: Mapping[str, list[Any] | None]) -> dict[str, str]:
    """Return test -> PASSED or FAILED, for tests that reported."""
    wanted = {test: values for test, (_, _, _, values) in task.payload["tests"].items()}
    return {test: "PASSED" if values[test] == wanted[test] else "FAILED" for test in wanted if test in values}
