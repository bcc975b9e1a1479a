"""Judge `repo_fix_tiny` by R2E-Gym's rule: the hidden tests' outcomes equal the expected ones, and neither is empty.

The patch is taken before the hidden tests run, without edited tests, conftest files and start-up hooks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etpi_assets.tasks.family import RejectedInput, Task, Verdict
from etpi_assets.tasks.frozen import Changes, counted_changes
from etpi_assets.tasks.reports import equal_outcomes
from etpi_assets.worlds.calls import FunctionCall, prove_calls, run_calls
from etpi_assets.worlds.repo_fix_tiny.generate import module_text
from etpi_resources.sandboxes import SandboxFactory


def judge(task: Task, files: Mapping[str, str], sandboxes: SandboxFactory) -> Verdict:
    """Verdicts: passed (reward 1); failed_tests, no_patch (no counted file was changed), both 0. `details`: the
    `changed` paths, the number of reported `tests`, and those with an unexpected outcome (`wrong`)."""
    changes = counted_changes(task.payload["files"], files)
    if not changes:
        return Verdict(0.0, "no_patch", {"changed": []})
    results = run_calls({"tree": _changed(task, changes)}, {"job": ("tree", _calls(task))}, sandboxes)
    passed, details = _compared(task, results.get("job", {}))
    return Verdict(float(passed), "passed" if passed else "failed_tests", {"changed": sorted(changes), **details})


def solution(task: Task) -> dict[str, str]:
    """Return the task's files with the fixed module."""
    module = task.payload["module"]
    return {**task.payload["files"], f"{module}.py": module_text(module, task.payload["value"])}


def validate(tasks: Sequence[Task], sandboxes: SandboxFactory) -> Iterator[RejectedInput | Task]:
    """Yield each task, in order, or its rejection (`prove_calls`)."""

    def trees(task: Task) -> tuple[dict[str, str], dict[str, str]]:
        return _changed(task, {}), _changed(task, counted_changes(task.payload["files"], solution(task)))

    return prove_calls(tasks, trees, _calls, lambda task, values: _compared(task, values)[1]["wrong"], sandboxes)


def _changed(task: Task, changes: Changes) -> dict[str, str]:
    """Return the task's files with an agent's changes."""
    files = {**task.payload["files"], **changes}
    return {path: text for path, text in files.items() if text is not None}


def _calls(task: Task) -> dict[str, FunctionCall]:
    return {test: (path, function, arguments) for test, (path, function, arguments, _) in task.payload["tests"].items()}


def _compared(task: Task, values: Mapping[str, list[Any] | None]) -> tuple[bool, Mapping[str, Any]]:
    """Return whether the tests that reported went as expected, and details."""
    wanted = {test: values for test, (_, _, _, values) in task.payload["tests"].items()}
    outcomes = {test: "PASSED" if values[test] == wanted[test] else "FAILED" for test in wanted if test in values}
    return equal_outcomes(outcomes, task.payload["expected"])
