"""The family `harbor`: Harbor's task folders, the format of Terminal-Bench 2, with one agent and one machine.

`folder` reads task folders, `snapshot` copies the working directory, `verifier` runs the tests and reads the reward.

The verdict is about the working directory, with files of any kind and mode. It is copied as data into a fresh machine,
where the tests run: HOME, PATH and the programs are the image's own. Software that the agent installs elsewhere and
processes that it starts do not count; a task that needs either fails its own reference and is quarantined.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from etpi_assets.tasks import downloads, places
from etpi_assets.tasks.family import (
    REFERENCE_RUNS,
    UNCHALLENGED,
    Family,
    RejectedInput,
    Role,
    SandboxNeeds,
    Task,
    Verdict,
    named_path,
    with_defaults,
)
from etpi_assets.tasks.frozen import RESERVED, put_changes
from etpi_assets.tasks.grading import is_of_machine
from etpi_assets.tasks.harbor import snapshot, verifier
from etpi_assets.tasks.harbor.folder import MIGRATE, TASK_FILE, UnreadableTask, read_folder
from etpi_resources.sandboxes import EnvironmentUnavailable, Sandbox, SandboxFactory

PARAMS: Mapping[str, Any] = {
    **places.PARAMS,
    "grading": {"network": "index"},
    "sandbox": "docker",
    "path": None,
    "tasks": (),
    "split": "heldout",
    "heldout_tasks": (),
    "workdir": None,
}
"""Besides those of `places`. path: a folder of task folders, at any depth. tasks: only these. split: of all tasks
but heldout_tasks, which are held out.
workdir: where the agent works; none: [environment] workdir, the last WORKDIR of the task's Dockerfile, or /app.
`memory_gib`, `disk_gib` and `test_seconds` are defaults for tasks that state no limits."""

_IMPORT = re.compile(r"^\s*(?:from|import)\s+(\w+)", re.MULTILINE)


class Harbor(Family):
    """The family `harbor`."""

    params = PARAMS
    feature_id = "request"
    keeps_proofs = True
    verdict_trust = UNCHALLENGED

    def load(self, suite: str, seed: int, params: Mapping[str, Any]) -> Iterator[Task | RejectedInput]:
        """Yield a task or a rejection for each folder with a task.toml, ordered by path. `seed` has no effect.

        Raises:
            ValueError: unknown params, or no path. FileNotFoundError: no task.toml below the path.
        """
        chosen = with_defaults(suite, "harbor", params, PARAMS)
        root = named_path(suite, chosen, "a folder of task folders").resolve()
        folders = sorted(file.parent for file in root.rglob(TASK_FILE))
        if not folders:
            raise FileNotFoundError(f"{root}: no {TASK_FILE} at any depth; {MIGRATE}")
        names = {folder: folder.relative_to(root).as_posix() if folder != root else root.name for folder in folders}
        for name in sorted(set(chosen["tasks"]) - set(names.values())):
            yield RejectedInput(name, "no_such_task", f"params.tasks names it, and {root} has no such folder")
        for folder, name in names.items():
            if chosen["tasks"] and name not in chosen["tasks"]:
                continue
            try:
                yield read_folder(suite, name, root, folder, chosen)
            except UnreadableTask as error:
                yield RejectedInput(name, error.reason, str(error))

    def needs(self, task: Task) -> SandboxNeeds:
        return places.needs(task.payload["place"], None, verifier.PLACES)

    def judge_in_place(self, task: Task, machines: Mapping[str, Sandbox], sandboxes: SandboxFactory) -> Verdict:
        """Verdicts of `verifier.grade`, or no_answer (0) if the working directory cannot be copied out."""
        (machine,) = machines.values()
        self._record(task, sandboxes)
        return self._graded(task, machine, sandboxes)

    def _graded(self, task: Task, machine: Sandbox, sandboxes: SandboxFactory, *, record: bool = False) -> Verdict:
        answer = snapshot.take(machine)
        with self._fresh(task, sandboxes, record=record) as sandbox:
            if answer is None:
                return Verdict(0.0, "no_answer", {"problem": "the agent's machine did not give its files out"})
            if problem := snapshot.put(sandbox, answer, _reserved(task)):
                return Verdict(0.0, "no_answer", {"problem": problem})
            return verifier.grade(task, sandbox)

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        """Judge a fresh machine that gets only the text files of the workspace."""
        (files,) = final.values()
        self._record(task, sandboxes)
        with self._fresh(task, sandboxes) as sandbox:
            before = sandbox.read_files()
            changed = {path: files.get(path) for path in before.keys() | files.keys()}
            put_changes(sandbox, {path: text for path, text in changed.items() if text != before.get(path)})
            return verifier.grade(task, sandbox)

    def solve(self, task: Task, role: Role) -> Sequence[str]:
        return verifier.solution_commands(task)

    def entities(self, task: Task) -> Sequence[str]:
        return task.payload["entities"]

    def rejection(self, task: Task, sandboxes: SandboxFactory) -> RejectedInput | None:
        """Reject a task as no_environment, no_reference, reference_fails, or null_passes on its untouched machine."""
        commands = verifier.solution_commands(task)
        if not commands:
            return RejectedInput(
                task.task_id, "no_reference", "there is no solution/solve.sh that could prove the task"
            )
        try:
            self._record(task, sandboxes)
            for run in range(REFERENCE_RUNS):
                if failure := self._try(task, commands, sandboxes):
                    detail = f"run {run + 1} of {REFERENCE_RUNS}: {json.dumps(failure)[:1500]}"
                    detail += downloads.refusals(task.payload["place"])
                    return RejectedInput(task.task_id, "reference_fails", detail)
            if not self._try(task, (), sandboxes):
                return RejectedInput(task.task_id, "null_passes", "the tests pass on the untouched machine")
        except (EnvironmentUnavailable, OSError) as error:
            if is_of_machine(error):
                raise
            return RejectedInput(task.task_id, "no_environment", str(error))
        return None

    def _record(self, task: Task, sandboxes: SandboxFactory) -> None:
        """Let the tests download what they need once, on the machine that the reference solution leaves."""
        commands = verifier.solution_commands(task)
        record = lambda: not (self._try(task, commands, sandboxes, record=True) or {}).get("timed_out")  # noqa: E731
        downloads.recorded(task.payload["place"], task.content_hash, record)

    def _try(
        self, task: Task, commands: Sequence[str], sandboxes: SandboxFactory, *, record: bool = False
    ) -> Mapping[str, Any] | None:
        """Run the commands as an agent would and judge the machine. Returns the failure's details; None if the tests
        pass."""
        place = task.payload["place"]
        with sandboxes.create({}, places.test_limits(place), self.needs(task).environment) as sandbox:
            outputs = [sandbox.run(command, timeout=task.payload["solution_seconds"]).output for command in commands]
            verdict = self._graded(task, sandbox, sandboxes, record=record)
        return None if verdict.verdict == "passed" else {**verdict.details, "solution": "".join(outputs)[-500:]}

    def _fresh(self, task: Task, sandboxes: SandboxFactory, *, record: bool = False) -> AbstractContextManager[Sandbox]:
        return places.test_sandbox(task.payload["place"], sandboxes, {}, verifier.PLACES, record=record)


def _reserved(task: Task) -> set[str]:
    """Return the modules that an agent may not add: RESERVED and those that the tests import, without those that the
    request or the solution names."""
    solution = [base64.b64decode(file["data"]).decode(errors="replace") for file in task.payload["solution"].values()]
    text = "\n".join([task.instruction, *solution])
    tests = [base64.b64decode(file["data"]).decode(errors="replace") for file in task.payload["tests"].values()]
    imports = {module for test in tests for module in _IMPORT.findall(test)}
    return (set(RESERVED) | imports) - set(re.findall(r"(?<![\w.])(\w+)(?:\.py\b|/)", text))


FAMILY = Harbor()
