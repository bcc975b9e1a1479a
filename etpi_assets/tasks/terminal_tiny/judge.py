"""The verdict on a terminal task: the files that the command left, compared with what the request asks for.

Belongs here: the comparison, and validating tasks by really running their reference commands. Does not belong here:
drawing tasks. The whole workspace is compared, so a command that also destroys its input has not solved anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from etpi_assets.tasks.family import Refusal, Task, Verdict
from etpi_resources.sandboxes import Limits, SandboxFactory

REFERENCE_RUNS = 3
"""A reference command passes so many times, or the task is refused."""

BATCH = 40
"""Tasks validated in one sandbox."""

_LIMITS = Limits(command_seconds=60.0)


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


def validate(tasks: Sequence[Task], sandboxes: SandboxFactory) -> Iterator[Refusal | Task]:
    """Each task, in order, if its command passes REFERENCE_RUNS times in a sandbox, else the refusal `reference_fails`.
    Tasks share sandboxes, each run in a folder of its own. Doing nothing never passes, by the verdict's own rule: a
    task that asks for nothing fails its reference."""
    for at in range(0, len(tasks), BATCH):
        batch = tasks[at : at + BATCH]
        runs = [f"{index}/{run}" for index in range(len(batch)) for run in range(REFERENCE_RUNS)]
        files = {
            f"{run}/{path}": text
            for run in runs
            for path, text in batch[int(run.split("/")[0])].payload["files"].items()
        }
        with sandboxes.create(files, _LIMITS) as sandbox:
            commands = [batch[int(run.split("/")[0])].payload["command"] for run in runs]
            sandbox.run("\n".join(f"(cd {run} && {line})" for run, line in zip(runs, commands, strict=True)))
            left = sandbox.read_files()
        for index, task in enumerate(batch):
            trees = [_below(left, f"{index}/{run}/") for run in range(REFERENCE_RUNS)]
            failed = [verdict for tree in trees if (verdict := judge(task, tree)).verdict != "passed"]
            if failed:
                detail = f"{task.payload['command']!r} failed {len(failed)} of {REFERENCE_RUNS} runs: {failed[0]}"
                yield Refusal(task.task_id, "reference_fails", detail)
            else:
                yield task


def _below(files: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {path.removeprefix(prefix): text for path, text in files.items() if path.startswith(prefix)}


def _same(task: Task, asked: str | None, found: str | None) -> bool:
    if asked is None or found is None:
        return asked is found
    if task.payload["unordered"]:
        return sorted(asked.split("\n")) == sorted(found.split("\n"))
    return asked.rstrip() == found.rstrip()
