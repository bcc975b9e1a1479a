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
from dataclasses import replace
from typing import Any

from etpi_assets.tasks import downloads, places
from etpi_assets.tasks.family import (
    CALIBRATIONS,
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
from etpi_assets.tasks.graded_run import GradedRun
from etpi_assets.tasks.grading import is_of_machine
from etpi_assets.tasks.harbor import snapshot, verifier
from etpi_assets.tasks.harbor.folder import MIGRATE, TASK_FILE, UnreadableTask, read_folder
from etpi_assets.tasks.proof import Calibration, TestRun, Unproven, fitted, identity_of, note_trust, rate, trust_of
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
        calibration = self._calibration(task, sandboxes)
        verdict, _ = self._graded(task, machine, sandboxes, calibration)
        return _trusted(verdict, calibration)

    def _graded(
        self,
        task: Task,
        machine: Sandbox,
        sandboxes: SandboxFactory,
        calibration: Calibration | None = None,
        *,
        record: bool = False,
    ) -> tuple[Verdict, TestRun]:
        answer = snapshot.take(machine)
        with self._fresh(task, sandboxes, record=record) as sandbox:
            if answer is None:
                problem: str | None = "the agent's machine did not give its files out"
            else:
                problem = snapshot.put(sandbox, answer, _reserved(task))
            if problem:
                return Verdict(0.0, "no_answer", {"problem": problem}), TestRun(GradedRun("", 1))
            return verifier.grade(task, sandbox, calibration)

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        """Judge a fresh machine that gets only the text files of the workspace."""
        (files,) = final.values()
        self._record(task, sandboxes)
        calibration = self._calibration(task, sandboxes)
        with self._fresh(task, sandboxes) as sandbox:
            before = sandbox.read_files()
            changed = {path: files.get(path) for path in before.keys() | files.keys()}
            put_changes(sandbox, {path: text for path, text in changed.items() if text != before.get(path)})
            return _trusted(verifier.grade(task, sandbox, calibration)[0], calibration)

    def solve(self, task: Task, role: Role) -> Sequence[str]:
        return verifier.solution_commands(task)

    def entities(self, task: Task) -> Sequence[str]:
        return task.payload["entities"]

    def validate(self, tasks: Sequence[Task], sandboxes: SandboxFactory) -> Iterator[RejectedInput | Task]:
        """Yield each task with the calibration of its tests, or a rejection: no_environment, no_reference,
        reference_fails, or null_passes on its untouched machine."""
        for task in tasks:
            try:
                self._record(task, sandboxes)
                stored = {"tests": self._prove(task, sandboxes).model_dump(exclude_defaults=True)}
                yield replace(task, payload={**task.payload, CALIBRATIONS: stored})
            except Unproven as error:
                refused = downloads.refusals(task.payload["place"]) if error.reason == "reference_fails" else ""
                yield RejectedInput(task.task_id, error.reason, f"{error}{refused}")
            except (EnvironmentUnavailable, OSError) as error:
                if isinstance(error, OSError) and is_of_machine(error):
                    raise
                yield RejectedInput(task.task_id, "no_environment", str(error))

    def _calibration(self, task: Task, sandboxes: SandboxFactory) -> Calibration:
        """Return the calibration of the tests: the proved task's, or one that is made now and kept."""
        if stored := task.payload.get(CALIBRATIONS, {}).get("tests"):
            return Calibration.model_validate(stored)
        key = f"{identity_of(task)}/{sandboxes.name}"
        if key not in _MADE:
            try:
                _MADE[key] = self._prove(task, sandboxes)
            except Unproven:  # a task that was never proved: holes without a reference, and no trust
                whole = [] if verifier.names_pytest(task) else sorted(verifier.python_tests(task))
                _MADE[key] = Calibration(whole=whole, trust={"all": UNCHALLENGED})
        return _MADE[key]

    def _prove(self, task: Task, sandboxes: SandboxFactory) -> Calibration:
        """Return the calibration of tests that the reference passes REFERENCE_RUNS times and the untouched machine
        does not. Raises Unproven."""
        commands = verifier.solution_commands(task)
        if not commands:
            raise Unproven("no_reference", "there is no solution/solve.sh that could prove the task")
        _, files = self._passing(task, commands, sandboxes, None, 1)
        without = Calibration(whole=sorted(verifier.python_tests(task)), reward=files["reward_file"])

        def attempt(calibration: Calibration) -> TestRun:
            return self._try(task, commands, sandboxes, calibration)[1]

        def require(calibration: Calibration, test: TestRun, number: int) -> None:
            if test.failed or test.run.problem:
                raise Unproven("reference_fails", f"run {number}: {json.dumps([test.failed, test.run.problem])[:1500]}")

        # The recorder alone, first: it shows whether the script runs pytest at all.
        plain = attempt(without) if without.whole else None
        if plain is None or plain.run.problem:
            calibration = Calibration(whole=without.whole, reward=without.reward, trust={"all": UNCHALLENGED})
            for number in range(2, REFERENCE_RUNS + 1):
                self._passing(task, commands, sandboxes, calibration, number)
            null, _ = self._try(task, (), sandboxes, calibration)
        else:
            calibration = fitted(plain.run, attempt, require)
            calibration.reward = without.reward
            self._passing(task, commands, sandboxes, calibration, REFERENCE_RUNS)
            null, test = self._try(task, (), sandboxes, calibration)
            rate(calibration, plain.run.of_kind("passed"), test)
            note_trust(calibration, verifier.python_tests(task), {})
        if null.verdict == "passed":
            raise Unproven("null_passes", "the tests pass on the untouched machine")
        return calibration

    def _passing(
        self,
        task: Task,
        commands: Sequence[str],
        sandboxes: SandboxFactory,
        calibration: Calibration | None,
        number: int,
    ) -> tuple[TestRun, Mapping[str, Any]]:
        verdict, test = self._try(task, commands, sandboxes, calibration)
        if verdict.verdict != "passed":
            detail = f"run {number} of {REFERENCE_RUNS}: {json.dumps(verdict.details)[:1500]}"
            raise Unproven("reference_fails", detail)
        return test, verdict.details

    def _record(self, task: Task, sandboxes: SandboxFactory) -> None:
        """Let the tests download what they need once, on the machine that the reference solution leaves."""
        commands = verifier.solution_commands(task)
        if not commands:
            return

        def record() -> bool:
            verdict, _ = self._try(task, commands, sandboxes, None, record=True)
            return not verdict.details.get("timed_out")

        downloads.recorded(task.payload["place"], task.content_hash, record)

    def _try(
        self,
        task: Task,
        commands: Sequence[str],
        sandboxes: SandboxFactory,
        calibration: Calibration | None,
        *,
        record: bool = False,
    ) -> tuple[Verdict, TestRun]:
        """Run the commands as an agent would and judge the machine."""
        place = task.payload["place"]
        with sandboxes.create({}, places.test_limits(place), self.needs(task).environment) as sandbox:
            outputs = [sandbox.run(command, timeout=task.payload["solution_seconds"]).output for command in commands]
            verdict, test = self._graded(task, sandbox, sandboxes, calibration, record=record)
        shown = {} if verdict.verdict == "passed" else {"solution": "".join(outputs)[-500:]}
        return replace(verdict, details={**verdict.details, **shown}), test

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


def _trusted(verdict: Verdict, calibration: Calibration) -> Verdict:
    details = {key: value for key, value in verdict.details.items() if key != "reward_file"}
    return replace(verdict, details={**details, "verdict_trust": trust_of(calibration)})


_MADE: dict[str, Calibration] = {}

FAMILY = Harbor()
