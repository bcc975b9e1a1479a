"""A suite family from one function: tasks are rows of a file, and the function judges an agent's files.

A row of the file (.jsonl, .json or .parquet): `id`, `instruction`, `files` (path -> text, what the agent starts with),
`solution` (bash commands that solve it), and if wanted `repo` (default: the id), `split` (default: train) and any other
fields, which the judge finds in the task's payload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etpi_assets.tasks.family import FilesFamily, RejectedInput, Role, Task, Verdict
from etpi_assets.tasks.rows import tasks_of
from etpi_resources.sandboxes import SandboxFactory

PARAMS: Mapping[str, Any] = {"path": None, "sandbox": "bubblewrap"}
"""A suite's params and their defaults: the file of rows; the kind of sandbox that validates its tasks."""
_READ_HERE = ("id", "instruction", "repo", "split")

Judge = Callable[[Task, Mapping[str, str], SandboxFactory], float]
"""(task, final files of the workspace by path, sandboxes) -> reward from 0 to 1; 1 is solved. Code of an agent may run
in the sandboxes only."""


@dataclass(frozen=True)
class JudgedRows(FilesFamily):
    """The family of one judge.

    Attributes:
        name: the family's name in errors.
        judge_files: judges the final files.
    """

    name: str
    judge_files: Judge
    invents_names: bool = False
    params = PARAMS
    data = "a file of rows"

    def read_path(self, suite: str, seed: int, path: Path, chosen: Mapping[str, Any]) -> Iterator[Task | RejectedInput]:
        return tasks_of(path, lambda _, row: _task(suite, row))

    def workspace(self, task: Task, role: Role) -> dict[str, str]:
        return dict(task.payload["files"])

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        """Verdicts: passed (reward 1), failed_tests (less).

        Raises:
            ValueError: the judge returns no number from 0 to 1.
        """
        (files,) = final.values()
        reward = self.judge_files(task, files, sandboxes)
        if not isinstance(reward, int | float) or not 0 <= reward <= 1:
            raise ValueError(f"the judge of {self.name} returned {reward!r} for {task.task_id}: a number from 0 to 1")
        return Verdict(float(reward), "passed" if reward == 1 else "failed_tests", {})

    def solve(self, task: Task, role: Role) -> Sequence[str]:
        return task.payload["solution"]

    def entities(self, task: Task) -> Sequence[str]:
        return sorted(task.payload["files"])


def _task(suite: str, row: Mapping[str, Any]) -> Task:
    """Return the task of a row. Raises KeyError, TypeError or ValueError for a row that is none."""
    name, instruction = str(row["id"]), str(row["instruction"]).strip()
    files, solution = dict(row["files"]), list(row["solution"])
    if not instruction or not solution:
        raise ValueError("instruction or solution is empty: a task needs a text, and commands that solve it")
    if not all(isinstance(text, str) for text in (*files.values(), *solution)):
        raise TypeError("files and solution have to be text")
    payload = {**{key: row[key] for key in row if key not in _READ_HERE}, "files": files, "solution": solution}
    split = str(row.get("split", "train"))
    if split not in ("train", "heldout"):
        raise ValueError(f"split is {split!r}, neither train nor heldout")
    return Task.hashed(name, suite, str(row.get("repo", name)), split, instruction, payload)
