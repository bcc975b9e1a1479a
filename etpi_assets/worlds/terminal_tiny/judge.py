"""The verdict on a terminal task: the files that the command left, compared with what the request asks for.

Belongs here: the comparison, and what proves a task. Does not belong here: drawing tasks. The whole workspace is
compared, so a command that also destroys its input has not solved anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from etpi_assets.tasks.batch_validation import validate_in_batches
from etpi_assets.tasks.family import RejectedInput, Task, Verdict
from etpi_resources.sandboxes import SandboxFactory


def wanted(task: Task) -> dict[str, str]:
    """The files as a solution leaves them."""
    files = {**task.payload["files"], **task.payload["left"]}
    return {path: text for path, text in files.items() if text is not None}


def judge(task: Task, files: Mapping[str, str]) -> Verdict:
    """Verdicts: passed (reward 1), no_patch (nothing changed), failed_tests, both 0. `details`: `wrong`, the paths that
    are missing, surplus or otherwise than asked; white space at the ends of a file does not count."""
    if dict(files) == task.payload["files"]:
        return Verdict(0.0, "no_patch", {"wrong": sorted(task.payload["left"])})
    asked = wanted(task)
    wrong = [p for p in sorted({*asked, *files}) if not _same(task, asked.get(p), files.get(p))]
    return Verdict(float(not wrong), "failed_tests" if wrong else "passed", {"wrong": wrong})


def validate(tasks: Sequence[Task], sandboxes: SandboxFactory) -> Iterator[RejectedInput | Task]:
    """Each task, in order, if its command proves it (`validate_in_batches`), else the refusal."""

    def files(task: Task) -> dict[str, str]:
        return dict(task.payload["files"])

    return validate_in_batches(tasks, files, lambda task: task.payload["command"], judge, sandboxes)


def _same(task: Task, asked: str | None, found: str | None) -> bool:
    if asked is None or found is None:
        return asked is found
    if task.payload["unordered"]:
        return sorted(asked.split("\n")) == sorted(found.split("\n"))
    return asked.rstrip() == found.rstrip()
