"""Judge `terminal_tiny`: compare the final files with the expected ones.

The whole workspace is compared, so a command that also destroys its input fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from etpi_assets.tasks.batch_validation import validate_in_batches
from etpi_assets.tasks.family import WHY_UNPROVEN, RejectedInput, Task, Verdict
from etpi_resources.sandboxes import SandboxFactory


def wanted(task: Task) -> dict[str, str]:
    """Return the expected files."""
    files = {**task.payload["files"], **task.payload["left"]}
    return {path: text for path, text in files.items() if text is not None}


def judge(task: Task, files: Mapping[str, str]) -> Verdict:
    """Verdicts: passed (reward 1); no_patch (nothing changed), failed_tests, both 0. `details`: `wrong`, the paths that
    are missing, unexpected or have other content; trailing white space is ignored."""
    if dict(files) == task.payload["files"]:
        return Verdict(0.0, "no_patch", {"wrong": sorted(task.payload["left"])})
    expected = wanted(task)
    wrong = [p for p in sorted({*expected, *files}) if not _same(task, expected.get(p), files.get(p))]
    return Verdict(float(not wrong), "failed_tests" if wrong else "passed", {"wrong": wrong})


def validate(tasks: Sequence[Task], sandboxes: SandboxFactory) -> Iterator[RejectedInput | Task]:
    """Yield each task, in order, that its command solves (see `validate_in_batches`), else a rejection; one without a
    verdict is yielded as it is."""

    def files(task: Task) -> dict[str, str]:
        return dict(task.payload["files"])

    judged = [task for task in tasks if WHY_UNPROVEN not in task.payload]
    proven = validate_in_batches(judged, files, lambda task: task.payload["command"], judge, sandboxes)
    for task in tasks:
        yield task if WHY_UNPROVEN in task.payload else next(proven)


def _same(task: Task, expected: str | None, actual: str | None) -> bool:
    if expected is None or actual is None:
        return expected is actual
    if task.payload["unordered"]:
        return sorted(expected.split("\n")) == sorted(actual.split("\n"))
    return expected.rstrip() == actual.rstrip()
