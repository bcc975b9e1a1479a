"""Harbor's task folders, the format of Terminal-Bench 2: one agent, one machine, a script that grades what it is then.

Belongs here: the family as the rest of etpi knows it. Its parts are `folder` (reading task folders), `snapshot`
(the working directory as data) and `verifier` (tests into a machine, and the reward out of it).

The verdict is about the files of any kind and mode that the agent leaves in the working directory. They are copied out
as data into a fresh machine, where the tests come in and run: HOME, PATH and the programs there are the image's own.
What an agent installs elsewhere in its machine does not count, nor does anything that it started; a task that wants
either fails its own reference and is quarantined.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etpi_assets.specs.paths import expand
from etpi_assets.tasks import places
from etpi_assets.tasks.family import RejectedInput, Role, SandboxNeeds, Task, Verdict, with_defaults
from etpi_assets.tasks.frozen import put_changes
from etpi_assets.tasks.harbor import snapshot, verifier
from etpi_assets.tasks.harbor.folder import TASK_FILE, UnreadableTask, read_folder
from etpi_resources.sandboxes import EnvironmentUnavailable, Sandbox, SandboxFactory

PARAMS: Mapping[str, Any] = {
    **places.PARAMS,
    "sandbox": "docker",
    "path": None,
    "tasks": (),
    "split": "heldout",
    "workdir": None,
}
"""Besides those of `places`. path: a folder of task folders, at any depth. tasks: only these. split: of all tasks.
workdir: where the agent works; none: the last WORKDIR of the task's Dockerfile, or /app. `memory_gib`, `disk_gib` and
`test_seconds` are of tasks that state no such bounds of their own."""

REFERENCE_RUNS = 3
"""A reference passes so many times, or the task is refused."""


class Harbor:
    """The family `harbor`."""

    invents_names = False

    def sandbox(self, params: Mapping[str, Any]) -> str | None:
        return {**PARAMS, **params}["sandbox"]

    def load(self, suite: str, seed: int, params: Mapping[str, Any]) -> Iterator[Task | RejectedInput]:
        """A task or a refusal a folder with a task.toml, in order of their paths. `seed` draws nothing.

        Raises:
            ValueError: unknown params, or no path. FileNotFoundError: no task.toml below the path.
        """
        chosen = with_defaults(suite, "harbor", params, PARAMS)
        if not chosen["path"]:
            raise ValueError(f"suite {suite}: params.path has to name a folder of task folders")
        root = expand(str(chosen["path"])).resolve()
        folders = sorted(file.parent for file in root.rglob(TASK_FILE))
        if not folders:
            raise FileNotFoundError(f"{root}: no {TASK_FILE} at any depth; params.path names a folder of task folders")
        names = {folder: folder.relative_to(root).as_posix() if folder != root else root.name for folder in folders}
        for name in sorted(set(chosen["tasks"]) - set(names.values())):
            yield RejectedInput(name, "no_such_task", f"params.tasks names it, and {root} has no such folder")
        for folder, name in names.items():
            if chosen["tasks"] and name not in chosen["tasks"]:
                continue
            try:
                yield read_folder(suite, name, folder, chosen)
            except UnreadableTask as error:
                yield RejectedInput(name, error.reason, str(error))

    def roles(self, task: Task) -> Sequence[Role]:
        return [Role("agent1", "request", task.instruction)]

    def needs(self, task: Task) -> SandboxNeeds:
        return places.needs(task.payload["place"], None, verifier.PLACES)

    def workspace(self, task: Task, role: Role) -> dict[str, str]:
        return {}

    def judge_in_place(self, task: Task, machines: Mapping[str, Sandbox], sandboxes: SandboxFactory) -> Verdict:
        """passed where the tests' reward is 1, else failed_tests with it, or no_reward (0), see `verifier.grade`;
        no_answer (0) where the agent's machine does not give its working directory out."""
        (machine,) = machines.values()
        return self._graded(task, machine, sandboxes)

    def _graded(self, task: Task, machine: Sandbox, sandboxes: SandboxFactory) -> Verdict:
        answer = snapshot.take(machine)
        with self._fresh(task, sandboxes) as sandbox:
            if answer is None:
                return Verdict(0.0, "no_answer", {"problem": "the agent's machine did not give its files out"})
            if problem := snapshot.put(sandbox, answer):
                return Verdict(0.0, "no_answer", {"problem": problem})
            return verifier.grade(task, sandbox)

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        """As `judge_in_place`, of a fresh machine that gets the text files of the workspace alone."""
        (left,) = final.values()
        with self._fresh(task, sandboxes) as sandbox:
            before = sandbox.read_files()
            changed = {path: left.get(path) for path in before.keys() | left.keys()}
            put_changes(sandbox, {path: text for path, text in changed.items() if text != before.get(path)})
            return verifier.grade(task, sandbox)

    def solve(self, task: Task, role: Role) -> Sequence[str]:
        return verifier.solution_commands(task)

    def entities(self, task: Task) -> Sequence[str]:
        return task.payload["entities"]

    def validate(self, tasks: Sequence[Task], sandboxes: SandboxFactory) -> Iterator[RejectedInput | Task]:
        """Each task whose solution passes REFERENCE_RUNS times and whose untouched machine fails; else the refusal:
        no_environment, no_reference, reference_fails or null_passes."""
        for task in tasks:
            yield self._proven(task, sandboxes) or task

    def _proven(self, task: Task, sandboxes: SandboxFactory) -> RejectedInput | None:
        commands = verifier.solution_commands(task)
        if not commands:
            return RejectedInput(
                task.task_id, "no_reference", "there is no solution/solve.sh that could prove the task"
            )
        try:
            for run in range(REFERENCE_RUNS):
                if found := self._try(task, commands, sandboxes):
                    detail = f"run {run + 1} of {REFERENCE_RUNS}: {json.dumps(found)[:1500]}"
                    return RejectedInput(task.task_id, "reference_fails", detail)
            if not self._try(task, (), sandboxes):
                return RejectedInput(task.task_id, "null_passes", "the tests pass on the untouched machine")
        except EnvironmentUnavailable as error:
            return RejectedInput(task.task_id, "no_environment", str(error))
        return None

    def _try(self, task: Task, commands: Sequence[str], sandboxes: SandboxFactory) -> Mapping[str, Any] | None:
        """What was found wrong after the commands; None where the tests pass."""
        with self._fresh(task, sandboxes) as sandbox:
            said = [sandbox.run(command, timeout=task.payload["solution_seconds"]).output for command in commands]
            verdict = self._graded(task, sandbox, sandboxes)
        return None if verdict.verdict == "passed" else {**verdict.details, "solution": "".join(said)[-500:]}

    def _fresh(self, task: Task, sandboxes: SandboxFactory) -> Sandbox:
        limits, environment = places.test_needs(task.payload["place"], verifier.PLACES)
        return sandboxes.create({}, limits, environment)


FAMILY = Harbor()
