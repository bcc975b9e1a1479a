"""Judge a pair: take both patches, merge them, and run both features' hidden tests on the merge in a sandbox.

The hidden tests run after the patches are taken. Edited tests, checks and start-up files are never copied.
The merge is a three-way one: two different hunks conflict if they overlap or touch in the original, as in git; equal
hunks merge into one. Not `git merge-file`: its diff finds other hunks around blank lines, so some verdicts would
change, and a process for each file is about a hundred times slower.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from etpi_assets.tasks.calls import FunctionCall, prove_calls, run_calls
from etpi_assets.tasks.family import Rejected, RejectedInput, Task, Verdict
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


LONGEST = 1_000_000
"""Characters of a text; the time and memory of a merge grow with the number of lines."""

_Hunk = tuple[int, int, tuple[str, ...]]


class MergeConflict(Exception):
    """Both sides changed the same lines of `path`."""

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(f"{path}: {detail}")
        self.path = path


def merge_trees(base: Mapping[str, str], ours: Mapping[str, str], theirs: Mapping[str, str]) -> dict[str, str]:
    """Return the files with both sides' changes. MergeConflict names the first path that conflicts."""
    merged: dict[str, str] = {}
    for path in sorted({*base, *ours, *theirs}):
        original, left, right = base.get(path), ours.get(path), theirs.get(path)
        if left == right or right == original:
            text = left
        elif left == original:
            text = right
        elif original is None:
            raise MergeConflict(path, "both added it, with different texts")
        elif left is None or right is None:
            raise MergeConflict(path, "one changed it, the other removed it")
        else:
            text = merge_texts(original, left, right, path)
        if text is not None:
            merged[path] = text
    return merged


def merge_texts(base: str, ours: str, theirs: str, path: str = "") -> str:
    """Return `base` with both sides' changes, by lines. Raises MergeConflict."""
    if max(len(ours), len(theirs)) > LONGEST:
        raise MergeConflict(path, f"longer than {LONGEST} characters")
    lines = _lines(base)
    hunks = sorted({*_hunks(lines, ours), *_hunks(lines, theirs)})
    merged: list[str] = []
    at = 0
    previous: _Hunk | None = None
    for hunk in hunks:
        start, end, replacement = hunk
        if previous is not None and start <= previous[1]:
            raise MergeConflict(path, f"both changed lines {previous[0] + 1} to {max(end, previous[1])}")
        merged += [*lines[at:start], *replacement]
        at, previous = end, hunk
    return "".join([*merged, *lines[at:]])


def _lines(text: str) -> list[str]:
    """Split into lines at newlines only, and keep them."""
    return [line for line in re.split(r"(?<=\n)", text) if line]


def _hunks(base: list[str], text: str) -> list[_Hunk]:
    """Return the changes as (first line, one past the last, replacement lines)."""
    changed = _lines(text)
    matcher = SequenceMatcher(None, base, changed, autojunk=False)
    return [(i1, i2, tuple(changed[j1:j2])) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal"]
