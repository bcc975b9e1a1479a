"""Validation of many small tasks in one sandbox, with a folder for each run of a reference.

For families with small workspaces and quick references, where a sandbox for each run would cost more than the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from etpi_assets.tasks.family import REFERENCE_RUNS, Family, RejectedInput, Role, Task
from etpi_resources.sandboxes import Limits, SandboxFactory

BATCH = 40
"""Tasks validated in one sandbox."""

_LIMITS = Limits(command_seconds=240.0)
"""Usually seconds; minutes only on a busy machine."""


def validate_in_batches(
    family: Family,
    tasks: Sequence[Task],
    sandboxes: SandboxFactory,
    reference: Callable[[Task, Role], Sequence[str]] | None = None,
) -> Iterator[RejectedInput | Task]:
    """Yield each task, in order, or the rejection `reference_fails` or `null_passes`.

    A task is valid if its reference passes REFERENCE_RUNS times and the untouched workspace fails.

    Args:
        family: one whose tasks have a single agent.
        reference: returns the bash commands that solve the task; None: `family.solve`.
    """
    solve = reference or family.solve
    for at in range(0, len(tasks), BATCH):
        batch = tasks[at : at + BATCH]
        roles = [family.roles(task)[0] for task in batch]
        files = [family.workspace(*task_role) for task_role in zip(batch, roles, strict=True)]
        commands = ["\n".join(solve(*task_role)) for task_role in zip(batch, roles, strict=True)]
        runs = [(index, f"{index}/{run}/") for index in range(len(batch)) for run in range(REFERENCE_RUNS)]
        workspaces = {prefix + path: text for index, prefix in runs for path, text in files[index].items()}
        with sandboxes.create(workspaces, _LIMITS) as sandbox:
            sandbox.run("\n".join(f"(cd {prefix} && {commands[index]})" for index, prefix in runs))
            final = sandbox.read_files()
        for index, (task, role) in enumerate(zip(batch, roles, strict=True)):
            left = [_below(final, prefix) for of, prefix in runs if of == index]
            verdicts = [family.judge(task, {role.agent_id: each}, sandboxes) for each in left]
            failed = [verdict for verdict in verdicts if verdict.verdict != "passed"]
            if failed:
                detail = f"{commands[index]!r} failed {len(failed)} of {REFERENCE_RUNS} runs: {failed[0]}"
                yield RejectedInput(task.task_id, "reference_fails", detail)
            elif family.judge(task, {role.agent_id: files[index]}, sandboxes).verdict == "passed":
                yield RejectedInput(task.task_id, "null_passes", "doing nothing passes")
            else:
                yield task


def _below(files: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {path.removeprefix(prefix): text for path, text in files.items() if path.startswith(prefix)}
