"""The family `coop_tiny_shared`: two agents add a function each, and both functions must be exported from one file.

Each agent can do its feature alone, and then both append a line at the end of the shared file, which git cannot merge.
Agents that agree who edits that file, and keep to it, avoid the conflict. The judge takes both patches, merges them and
runs both features' hidden tests on the merge; edited tests, checks and start-up files are never copied. It is a toy
model: results on it describe the pipeline, not language models.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from etpi_assets.tasks.family import BLIND, Family, Rejected, RejectedInput, Role, Task, Verdict, with_defaults
from etpi_assets.tasks.frozen import write_commands
from etpi_assets.worlds.calls import FunctionCall, prove_calls, run_calls
from etpi_assets.worlds.coop_tiny_shared.generate import divided_solution, generate_tasks
from etpi_assets.worlds.coop_tiny_shared.merge import MergeConflict, merge_trees
from etpi_resources.sandboxes import SandboxFactory

PARAMS: Mapping[str, Any] = {"train": 1000, "heldout": 100, "sandbox": "bubblewrap"}
"""A suite's params and their defaults: tasks of each split, and the kind of sandbox that validates the tasks."""


class CoopTinyShared(Family):
    """The family `coop_tiny_shared`."""

    params = PARAMS
    verdict_trust = BLIND
    invents_names = True

    def load(self, suite: str, seed: int, params: Mapping[str, Any]) -> Iterator[Task | RejectedInput]:
        chosen = with_defaults(suite, "coop_tiny_shared", params, PARAMS)
        for split in ("train", "heldout"):
            importable = (task for task in generate_tasks(suite, seed, split) if not _hides_python(task))
            yield from islice(importable, int(chosen[split]))

    def roles(self, task: Task) -> Sequence[Role]:
        return [
            Role(role["agent_id"], role["feature_id"], role["instruction"], role["partner"])
            for role in task.payload["roles"]
        ]

    def workspace(self, task: Task, role: Role) -> dict[str, str]:
        return dict(task.payload["files"])

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        """Merge the agents' final files (agent_id -> files) and test both features.

        Verdicts: passed (reward 1); failed_tests, merge_conflict, no_patch (no agent changed a counted file), all 0.
        `details`: `patched` {agent_id: paths changed}, and `features` {feature_id: whether its tests pass} or
        `conflict`. Errors of the sandbox itself are raised.
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
        jobs = {key: ("merged", {key: call}) for key, call in calls.items()}
        results = run_calls({"merged": merged}, jobs, sandboxes)
        passed = {key: _passes(task, key, results.get(key, {})) for key in calls}
        solved = all(passed.values())
        return Verdict(float(solved), "passed" if solved else "failed_tests", {"patched": patched, "features": passed})

    def reference(self, task: Task, role: Role) -> dict[str, str]:
        """Return the files after this role's share of the divided reference solution."""
        return divided_solution(task, role.feature_id)

    def solve(self, task: Task, role: Role) -> Sequence[str]:
        return write_commands(self.workspace(task, role), self.reference(task, role))

    def entities(self, task: Task) -> Sequence[str]:
        """Return the files' paths, then the features' function names, as they occur in the instructions."""
        payload = task.payload
        return [*payload["files"], *(feature["function"] for feature in payload["features"].values())]

    def validate(self, tasks: Sequence[Task], sandboxes: SandboxFactory) -> Iterator[RejectedInput | Task]:
        """Yield each task, in order, or its rejection: no feature may pass in the untouched tree (`prove_calls`),
        and also no_reference or reference_conflict."""

        def trees(task: Task) -> tuple[dict[str, str], dict[str, str]]:
            base = merged = counted(task.payload["files"], task.payload["check"])
            try:
                for role in self.roles(task):
                    files = counted(self.reference(task, role), task.payload["check"])
                    merged = merge_trees(base, merged, files)
            except MergeConflict as conflict:
                raise Rejected("reference_conflict", str(conflict)) from conflict
            except ValueError as error:
                raise Rejected("no_reference", str(error)) from error
            return base, merged

        def failed(task: Task, values: Mapping[str, list[Any] | None]) -> list[str]:
            return [key for key in task.payload["features"] if not _passes(task, key, values)]

        return prove_calls(tasks, trees, _calls, failed, sandboxes, each=True)


def _hides_python(task: Task) -> bool:
    """Return whether a module has a name of Python's, such as `site`: Python's own would be imported instead."""
    return any(path.removesuffix(".py") in sys.stdlib_module_names for path in task.payload["files"])


FAMILY = CoopTinyShared()


_TEST_FILE = re.compile(
    r"(^|/)(tests?|checks?|tools)/|(^|/)(test_[^/]*|[^/]*_test|conftest|sitecustomize|usercustomize)\.py$"
)


def counted(files: Mapping[str, str], check: str) -> dict[str, str]:
    """Return the files of a tree that a patch may change: Python modules except tests, checks and start-up hooks."""
    return {p: text for p, text in files.items() if p.endswith(".py") and p != check and not _TEST_FILE.search(p)}


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
