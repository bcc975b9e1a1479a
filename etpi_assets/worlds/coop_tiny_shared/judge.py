"""Judge a pair: take both patches, merge them, and run both features' hidden tests on the merge in a sandbox.

The hidden tests run after the patches are taken. Edited tests, checks and start-up files are never copied.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from etpi_assets.tasks.family import Rejected, RejectedInput, Task, Verdict
from etpi_assets.worlds.calls import FunctionCall, prove_calls, run_calls
from etpi_assets.worlds.coop_tiny_shared.merge import MergeConflict, merge_trees
from etpi_resources.sandboxes import SandboxFactory

References = Callable[[Task], Iterable[Mapping[str, str]]]
"""Returns the files of each agent of a task after its share of the reference solution. Raises ValueError."""

_TEST_FILE = re.compile(
    r"(^|/)(tests?|checks?|tools)/|(^|/)(test_[^/]*|[^/]*_test|conftest|sitecustomize|usercustomize)\.py$"
)


def counted(files: Mapping[str, str], check: str) -> dict[str, str]:
    """Return the files of a tree that a patch may change: Python modules except tests, checks and start-up hooks."""
    return {p: text for p, text in files.items() if p.endswith(".py") and p != check and not _TEST_FILE.search(p)}


def judge(task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
    """Merge the agents' final files (agent_id -> files) and test both features.

    Verdicts: passed (reward 1); failed_tests, merge_conflict, no_patch (no agent changed a counted file), all 0.
    `details`: `patched` {agent_id: paths changed}, and `features` {feature_id: whether its tests pass} or `conflict`.
    Errors of the sandbox itself are raised.
    """
    base = counted(task.payload["files"], task.payload["check"])
    trees = [counted(files, task.payload["check"]) for files in final.values()]
    patched = {
        agent_id: sorted(p for p in {*base, *files} if base.get(p) != files.get(p))
        for agent_id, files in zip(final, trees, strict=True)
    }
    if not any(patched.values()):
        return Verdict(0.0, "no_patch", {"patched": patched})
    merged = base
    try:
        for files in trees:
            merged = merge_trees(base, merged, files)
    except MergeConflict as conflict:
        return Verdict(0.0, "merge_conflict", {"patched": patched, "conflict": str(conflict)})
    calls = _calls(task)
    results = run_calls({"merged": merged}, {key: ("merged", {key: call}) for key, call in calls.items()}, sandboxes)
    passed = {key: _passes(task, key, results.get(key, {})) for key in calls}
    solved = all(passed.values())
    return Verdict(float(solved), "passed" if solved else "failed_tests", {"patched": patched, "features": passed})


def validate(
    tasks: Sequence[Task], sandboxes: SandboxFactory, references: References
) -> Iterator[RejectedInput | Task]:
    """Yield each task, in order, or its rejection: no feature may pass in the untouched tree (`prove_calls`), and also
    no_reference or reference_conflict."""

    def trees(task: Task) -> tuple[dict[str, str], dict[str, str]]:
        base = merged = counted(task.payload["files"], task.payload["check"])
        try:
            for files in references(task):
                merged = merge_trees(base, merged, counted(files, task.payload["check"]))
        except MergeConflict as conflict:
            raise Rejected("reference_conflict", str(conflict)) from conflict
        except ValueError as error:
            raise Rejected("no_reference", str(error)) from error
        return base, merged

    def failed(task: Task, values: Mapping[str, list[Any] | None]) -> list[str]:
        return [key for key in task.payload["features"] if not _passes(task, key, values)]

    return prove_calls(tasks, trees, _calls, failed, sandboxes, each=True)


def _passes(task: Task, feature_id: str, result: Mapping[str, list[Any] | None]) -> bool:
    """Return whether the values equal those of the hidden cases (integers, not booleans)."""
    wanted = [value for _, value in task.payload["features"][feature_id]["hidden"]]
    values = result.get(feature_id)
    return bool(wanted) and values == wanted and all(type(value) is int for value in values or ())


def _calls(task: Task) -> dict[str, FunctionCall]:
    return {
        key: (feature["path"], feature["function"], [argument for argument, _ in feature["hidden"]])
        for key, feature in task.payload["features"].items()
    }
