"""Proving many small tasks in one sandbox, each run of a reference in a folder of its own.

Belongs here: validation of families whose workspaces are a few small files and whose references are quick, where a
sandbox a run would cost more than the run. Does not belong here: tasks that bring an environment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from etpi_assets.tasks.family import RejectedInput, Task, Verdict
from etpi_resources.sandboxes import Limits, SandboxFactory

REFERENCE_RUNS = 3
"""A reference passes so many times, or the task is refused."""

BATCH = 40
"""Tasks validated in one sandbox."""

_LIMITS = Limits(command_seconds=240.0)
"""Seconds in all; minutes only where the machine is busy with something else."""


def validate_in_batches(
    tasks: Sequence[Task],
    files: Callable[[Task], Mapping[str, str]],
    reference: Callable[[Task], str],
    judge: Callable[[Task, Mapping[str, str]], Verdict],
    sandboxes: SandboxFactory,
) -> Iterator[RejectedInput | Task]:
    """Each task, in order, if its reference command passes REFERENCE_RUNS times and doing nothing does not, else the
    refusal `reference_fails` or `null_passes`.

    Args:
        files, reference: a task's workspace, and the bash command (or lines of them) that solves it there.
        judge: the verdict on the files that are left.
    """
    for at in range(0, len(tasks), BATCH):
        batch = tasks[at : at + BATCH]
        runs = [(index, f"{index}/{run}/") for index in range(len(batch)) for run in range(REFERENCE_RUNS)]
        workspaces = {prefix + path: text for index, prefix in runs for path, text in files(batch[index]).items()}
        with sandboxes.create(workspaces, _LIMITS) as sandbox:
            sandbox.run("\n".join(f"(cd {prefix} && {reference(batch[index])})" for index, prefix in runs))
            left = sandbox.read_files()
        for index, task in enumerate(batch):
            verdicts = [judge(task, _below(left, prefix)) for of, prefix in runs if of == index]
            failed = [verdict for verdict in verdicts if verdict.verdict != "passed"]
            if failed:
                detail = f"{reference(task)!r} failed {len(failed)} of {REFERENCE_RUNS} runs: {failed[0]}"
                yield RejectedInput(task.task_id, "reference_fails", detail)
            elif judge(task, files(task)).verdict == "passed":
                yield RejectedInput(task.task_id, "null_passes", "doing nothing passes")
            else:
                yield task


def _below(files: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {path.removeprefix(prefix): text for path, text in files.items() if path.startswith(prefix)}
