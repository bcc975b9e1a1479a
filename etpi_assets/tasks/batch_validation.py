"""Validation of many small tasks in one sandbox, with a folder for each run of a reference.

For families with small workspaces and quick references, where a sandbox for each run would cost more than the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from etpi_assets.tasks.family import REFERENCE_RUNS, RejectedInput, Task, Verdict
from etpi_resources.sandboxes import Limits, SandboxFactory

BATCH = 40
"""Tasks validated in one sandbox."""

_LIMITS = Limits(command_seconds=240.0)
"""Usually seconds; minutes only on a busy machine."""


def validate_in_batches(
    tasks: Sequence[Task],
    files: Callable[[Task], Mapping[str, str]],
    reference: Callable[[Task], str],
    judge: Callable[[Task, Mapping[str, str]], Verdict],
    sandboxes: SandboxFactory,
) -> Iterator[RejectedInput | Task]:
    """Yield each task, in order, or the rejection `reference_fails` or `null_passes`.

    A task is valid if its reference passes REFERENCE_RUNS times and the untouched workspace fails.

    Args:
        files: returns a task's workspace (path -> text).
        reference: returns the bash command (or lines of commands) that solves the task.
        judge: returns the verdict on the final files.
    """
    for at in range(0, len(tasks), BATCH):
        batch = tasks[at : at + BATCH]
        runs = [(index, f"{index}/{run}/") for index in range(len(batch)) for run in range(REFERENCE_RUNS)]
        workspaces = {prefix + path: text for index, prefix in runs for path, text in files(batch[index]).items()}
        with sandboxes.create(workspaces, _LIMITS) as sandbox:
            sandbox.run("\n".join(f"(cd {prefix} && {reference(batch[index])})" for index, prefix in runs))
            final = sandbox.read_files()
        for index, task in enumerate(batch):
            verdicts = [judge(task, _below(final, prefix)) for of, prefix in runs if of == index]
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
