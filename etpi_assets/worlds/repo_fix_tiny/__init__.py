"""The family `repo_fix_tiny`: one agent fixes one number in a small repository, after a two-hop look-up.

The issue names a symptom, a table maps symptoms to modules, another maps modules to values. A tiny model can copy each
hop if it writes it down, but cannot do both in one step: removing the think block should cost reward, compressing it
should not. It is a toy model: results on it describe the pipeline, not language models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from etpi_assets.tasks.family import BLIND, Family, RejectedInput, Role, Task, Verdict, with_defaults
from etpi_assets.tasks.frozen import Changes, counted_changes, write_commands
from etpi_assets.tasks.reports import equal_outcomes
from etpi_assets.worlds.calls import FunctionCall, prove_calls, run_calls
from etpi_assets.worlds.repo_fix_tiny.generate import generate_tasks, module_text
from etpi_resources.sandboxes import SandboxFactory

PARAMS: Mapping[str, Any] = {"train": 240, "heldout": 150, "sandbox": "bubblewrap"}
"""A suite's params and their defaults: tasks of each split, and the kind of sandbox that validates them."""


class RepoFixTiny(Family):
    """The family `repo_fix_tiny`."""

    params = PARAMS
    verdict_trust = BLIND
    feature_id = "issue"
    invents_names = True

    def load(self, suite: str, seed: int, params: Mapping[str, Any]) -> Iterator[Task | RejectedInput]:
        chosen = with_defaults(suite, "repo_fix_tiny", params, PARAMS)
        for split in ("train", "heldout"):
            yield from islice(generate_tasks(suite, seed, split), int(chosen[split]))

    def workspace(self, task: Task, role: Role) -> dict[str, str]:
        return dict(task.payload["files"])

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        """Compare the hidden tests' outcomes with the expected ones by R2E-Gym's rule: equal, and neither is empty.

        Verdicts: passed (reward 1); failed_tests, no_patch (no counted file was changed), both 0. `details`: the
        `changed` paths, the number of reported `tests`, and those with an unexpected outcome (`wrong`). The patch is
        taken before the hidden tests run, without edited tests, conftest files and start-up hooks.
        """
        (files,) = final.values()
        changes = counted_changes(task.payload["files"], files)
        if not changes:
            return Verdict(0.0, "no_patch", {"changed": []})
        results = run_calls({"tree": _changed(task, changes)}, {"job": ("tree", _calls(task))}, sandboxes)
        passed, details = _compared(task, results.get("job", {}))
        return Verdict(float(passed), "passed" if passed else "failed_tests", {"changed": sorted(changes), **details})

    def solve(self, task: Task, role: Role) -> Sequence[str]:
        return write_commands(self.workspace(task, role), solution(task))

    def entities(self, task: Task) -> Sequence[str]:
        return task.payload["names"]

    def validate(self, tasks: Sequence[Task], sandboxes: SandboxFactory) -> Iterator[RejectedInput | Task]:
        """Yield each task, in order, or its rejection (`prove_calls`)."""

        def trees(task: Task) -> tuple[dict[str, str], dict[str, str]]:
            return _changed(task, {}), _changed(task, counted_changes(task.payload["files"], solution(task)))

        return prove_calls(tasks, trees, _calls, lambda task, values: _compared(task, values)[1]["wrong"], sandboxes)


FAMILY = RepoFixTiny()


def solution(task: Task) -> dict[str, str]:
    """Return the task's files with the fixed module."""
    module = task.payload["module"]
    return {**task.payload["files"], f"{module}.py": module_text(module, task.payload["value"])}


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
