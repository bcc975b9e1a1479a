"""The family `harbor`: Harbor's task folders, the format of Terminal-Bench 2, with one agent and one machine.

`folder` reads task folders, `snapshot` copies the working directory, `verifier` runs the tests and reads the reward.

The verdict is about the working directory, with files of any kind and mode. It is copied as data into a fresh machine,
where the tests run: HOME, PATH and the programs are the image's own. Software that the agent installs elsewhere and
processes that it starts do not count; a task that needs either fails its own reference and is quarantined.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etpi_assets.tasks import places
from etpi_assets.tasks.family import Rejected, RejectedInput, Role, SandboxNeeds, Task, Verdict
from etpi_assets.tasks.frozen import put_changes
from etpi_assets.tasks.harbor import snapshot
from etpi_assets.tasks.harbor.folder import MIGRATE, TASK_FILE, read_folder
from etpi_assets.tasks.harbor.verifier import PLACES, MachineTrial, Unpacked, solution_commands
from etpi_assets.tasks.proof import TestedFamily, judge_trial
from etpi_assets.tasks.rows import one_each
from etpi_resources.sandboxes import Sandbox, SandboxFactory

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


class Harbor(TestedFamily):
    """The family `harbor`."""

    name, data = "harbor", "a folder of task folders"
    params = PARAMS
    feature_id = "request"

    def read_path(self, suite: str, seed: int, path: Path, chosen: Mapping[str, Any]) -> Iterator[Task | RejectedInput]:
        """Yield a task or a rejection for each folder with a task.toml, ordered by path."""
        root = path.resolve()
        folders = sorted(file.parent for file in root.rglob(TASK_FILE))
        if not folders:
            raise FileNotFoundError(f"{root}: no {TASK_FILE} at any depth; {MIGRATE}")
        names = {folder: folder.relative_to(root).as_posix() if folder != root else root.name for folder in folders}
        for name in sorted(set(chosen["tasks"]) - set(names.values())):
            yield RejectedInput(name, "no_such_task", f"params.tasks names it, and {root} has no such folder")

        def items() -> Iterator[tuple[str, Task | RejectedInput]]:
            for folder, name in names.items():
                if chosen["tasks"] and name not in chosen["tasks"]:
                    continue
                try:
                    yield name, read_folder(suite, name, root, folder, chosen)
                except Rejected as error:
                    yield name, RejectedInput(name, error.reason, str(error))

        yield from one_each(items())

    def needs(self, task: Task) -> SandboxNeeds:
        return places.needs(task.payload["place"], None, PLACES)

    def judge_in_place(self, task: Task, machines: Mapping[str, Sandbox], sandboxes: SandboxFactory) -> Verdict:
        """Verdicts: passed (reward 1), failed_tests, no_reward (0: the tests left none), or no_answer (0: the working
        directory cannot be copied)."""
        (machine,) = machines.values()
        answer = snapshot.take(machine)
        if answer is None:
            return Verdict(0.0, "no_answer", {"problem": "the agent's machine did not give its files out"})
        (trial,) = self.trials(task)
        trial.record(sandboxes)
        try:
            passed, details = judge_trial(trial, task.payload, answer, sandboxes)
        except Unpacked as error:
            return Verdict(0.0, "no_answer", {"problem": str(error)})
        file, reward = details.pop("reward_file", ""), details.pop("reward", float(passed))
        return Verdict(reward, "passed" if passed else "failed_tests" if file else "no_reward", details)

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        """Judge a fresh machine that gets only the text files of the workspace."""
        (files,) = final.values()
        place = task.payload["place"]
        with sandboxes.create({}, places.test_limits(place), self.needs(task).environment) as sandbox:
            before = sandbox.read_files()
            changed = {path: files.get(path) for path in before.keys() | files.keys()}
            put_changes(sandbox, {path: text for path, text in changed.items() if text != before.get(path)})
            return self.judge_in_place(task, {"agent1": sandbox}, sandboxes)

    def solve(self, task: Task, role: Role) -> Sequence[str]:
        return solution_commands(task)

    def trials(self, task: Task) -> list[MachineTrial]:
        return [MachineTrial(task)]


FAMILY = Harbor()
