"""The core of all families with hidden tests: prove a task, and judge work against its tests.

A family describes its runs of tests (`Trial`). `prove` finds out with the reference solution which expected values can
be holes (`calibration`), which tests have to turn from failing to passing, and how far each can be trusted:

    blind        a strong hole and no literal: the sandbox never has the value, so one run proves it
    reversed     its assertion can be reversed: it has to fail in one run and to pass in another, in random order
    unchallenged neither: its own report counts

`judge_trial` is a function of the trial, its calibration, the work and the machine.
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from etpi_assets.tasks import downloads
from etpi_assets.tasks.calibration import (
    PLAIN,
    Calibration,
    TestRun,
    compared,
    dig_files,
    fitted,
    rate,
    reversals,
    unlike_reference,
)
from etpi_assets.tasks.family import (
    CALIBRATIONS,
    CHEATED,
    REFERENCE_RUNS,
    REVERSED,
    FilesFamily,
    Rejected,
    RejectedInput,
    Task,
)
from etpi_assets.tasks.graded_run import GradedRun
from etpi_assets.tasks.grading import is_of_machine
from etpi_resources.hashes import json_hash
from etpi_resources.sandboxes import EnvironmentUnavailable, SandboxFactory

_TREES = 4
"""Trials whose tests and trees a process keeps."""


@dataclass(frozen=True)
class Tests:
    """The hidden tests of a trial.

    Attributes:
        files: path -> text; the Python files among them may have holes.
        visible: the tree without them, path -> text: the files that agents saw.
        paths: all paths of text that the tests change. Work on them does not count.
        rest: base64 of git's patch of everything else that the tests change; "" if nothing is.
        plugins: the pytest plugins of the machine; None: those that pytest finds.
    """

    __test__: ClassVar[bool] = False  # for pytest
    files: Mapping[str, str]
    visible: Mapping[str, str]
    paths: frozenset[str] = frozenset()
    rest: str = ""
    plugins: Sequence[str] | None = None


class Trial(ABC):
    """One run of hidden tests of a task. Work is what the family takes from agents: changes, a program, an archive.

    Attributes:
        key: its name among the task's trials.
        pytest: whether pytest runs the tests; None: the run of the reference shows it. Other runners are judged by
            their output.
        reversible: whether a run in which a reversed assertion fails says what the other tests do.
        fixed: a text that is equal for trials whose tests and solved trees are; "": no other trial's are.
        nothing: the work of an agent that does nothing.
        needs: decides which downloads the tests need, JSON-serialisable; None: there is no solution that could show it.
    """

    key: str
    task: Task
    pytest: bool | None = True
    reversible: bool = True
    fixed: str = ""
    nothing: Any = ""
    needs: object

    @property
    def identity(self) -> str:
        """A text that differs wherever tree, tests or reference do."""
        return json_hash([self.task.suite, {k: v for k, v in self.task.payload.items() if k != CALIBRATIONS}])

    @property
    def place(self) -> Any:
        """The place where it runs (`places`); None if nothing can be downloaded there."""
        return self.task.payload["place"]

    @abstractmethod
    def tests(self, sandboxes: SandboxFactory) -> Tests:
        """Read the tests where no agent's code runs."""

    @abstractmethod
    def reference(self, sandboxes: SandboxFactory) -> Any:
        """Return the reference solution as work. Raises Rejected if there is none."""

    @abstractmethod
    def run(
        self, work: Any, tests: Tests, sandboxes: SandboxFactory, *, recorded: bool, record: bool = False
    ) -> GradedRun:
        """Run the tests on work in a fresh sandbox, with the recorder of pytest if `recorded`.

        `record`: what it downloads may be fetched and is kept; only for the suite's own code."""

    @abstractmethod
    def passes(self, test: TestRun) -> tuple[float, Mapping[str, Any]]:
        """Return the reward of a run from 0 to 1, which passes, and details for a reader."""

    def record(self, sandboxes: SandboxFactory) -> None:
        """Let the suite's own code download what grading will need, once."""

        def run() -> bool:
            work, tests = self.reference(sandboxes), read_tests(self, sandboxes)
            return not self.run(work, tests, sandboxes, recorded=False, record=True).timed_out

        if self.place and self.needs is not None:
            downloads.recorded(self.place, self.needs, run)


class TestedFamily(FilesFamily):
    """A family whose tasks are proved and judged by runs of hidden tests."""

    __test__: ClassVar[bool] = False  # for pytest
    keeps_proofs = True

    @abstractmethod
    def trials(self, task: Task) -> Sequence[Trial]:
        """Return the runs of hidden tests that judge a task."""

    def entities(self, task: Task) -> Sequence[str]:
        return task.payload["entities"]

    def validate(self, tasks: Sequence[Task], sandboxes: SandboxFactory) -> Iterator[RejectedInput | Task]:
        """Yield each task with the calibrations of its trials, or why it cannot be judged (`prove`)."""
        for task in tasks:
            yield prove(task, self.trials(task), sandboxes)


def read_tests(trial: Trial, sandboxes: SandboxFactory) -> Tests:
    """Return a trial's tests. Kept for the next verdicts."""
    key = f"{trial.identity}/{trial.key}/{sandboxes.name}"
    if key not in _KEPT:
        _KEPT[key] = trial.tests(sandboxes)
    _KEPT.move_to_end(key)
    while len(_KEPT) > _TREES:
        _KEPT.popitem(last=False)
    return _KEPT[key]


_KEPT: OrderedDict[str, Tests] = OrderedDict()


# --- judging ---


def judge_trial(
    trial: Trial, proved: Mapping[str, Any], work: Any, sandboxes: SandboxFactory
) -> tuple[bool, dict[str, Any]]:
    """Return (whether work passes a trial, details: those of `Trial.passes`, `trust` and `verdict_trust`).

    Details have `not_believed` (a message) for a run that cannot count, `cheated` (node ids) if reversed tests passed,
    and `reward` if it is neither 0 nor 1.

    Args:
        proved: the payload of the task.
    """
    calibration = calibration_of(proved, trial, sandboxes)
    reversed_ = [name for name, trust in calibration.trust.items() if trust == REVERSED]
    first = {name for name in reversed_ if secrets.randbelow(2)}
    reward, details = 0.0, dict[str, Any]()
    for reverse in (first, set(reversed_) - first) if reversed_ else (set(),):
        reward, details = _result(trial, _run(trial, calibration, work, sandboxes, reverse))
        if reward < 1:
            if reverse is first and CHEATED in details:  # wrong work passes them too, and was not seen to pass others
                details["passed_reversed"] = details.pop(CHEATED)
            break
    details |= calibration.trusts()
    return reward == 1, details if reward in (0, 1) else {**details, "reward": reward}


def calibration_of(proved: Mapping[str, Any], trial: Trial, sandboxes: SandboxFactory) -> Calibration:
    """Return a trial's calibration: that of the task's payload; for tasks proved before, one that is made now and kept.

    Tests are not recorded if there is no reference solution, or if their runner is unknown and it does not pass."""
    if stored := proved.get(CALIBRATIONS, {}).get(trial.key):
        return Calibration.model_validate(stored)
    key = f"{trial.identity}/{trial.key}/{sandboxes.name}"
    if key not in _MADE:
        try:
            _MADE[key] = prove_trial(trial, trial.reference(sandboxes), sandboxes)
        except Rejected as error:
            if error.reason != "no_reference" and trial.pytest is not None:
                raise
            _MADE[key] = PLAIN
    return _MADE[key]


_MADE: dict[str, Calibration] = {}


def _run(
    trial: Trial,
    calibration: Calibration,
    work: Any,
    sandboxes: SandboxFactory,
    reverse: Collection[str] = (),
    *,
    holes: bool = True,
) -> TestRun:
    """Run a trial's tests on work and compare its records."""
    tests, recorded = read_tests(trial, sandboxes), trial.pytest is not False and calibration.records
    dug = dig_files(tests.files if recorded and holes else {}, calibration, reverse)
    shown = replace(tests, files={**tests.files, **dug.files})
    return compared(trial.run(work, shown, sandboxes, recorded=recorded), dug, calibration, reverse)


def _result(trial: Trial, test: TestRun) -> tuple[float, dict[str, Any]]:
    """Return (the reward of a run, details)."""
    reward, more = trial.passes(test)
    details = dict(more)
    if trial.pytest is not False and test.calibration.records:
        problem = (test.run.problem or unlike_reference(test.calibration, test)) if reward else None
        if test.cheated:
            details[CHEATED] = sorted(test.cheated)[:20]
            problem = "tests passed that must fail"
        if problem:
            reward, details["not_believed"] = 0.0, problem
        if test.failed:
            details["compared"] = dict(sorted(test.failed.items())[:20])
    failed = {} if reward == 1 else {"exit_code": test.run.exit_code, "output": test.run.output[-2000:]}
    return reward, {**details, **failed}


# --- proving ---


def prove(task: Task, trials: Sequence[Trial], sandboxes: SandboxFactory) -> Task | RejectedInput:
    """Return the task with the calibrations of its trials, or a rejection.

    Reasons: no_environment, no_reference, reference_fails, or null_passes without any change.
    """
    calibrations: dict[str, Any] = {}
    try:
        references = [trial.reference(sandboxes) for trial in trials]
        for trial in trials:
            trial.record(sandboxes)
        for trial, reference in zip(trials, references, strict=True):
            calibration = prove_trial(trial, reference, sandboxes)
            calibrations[trial.key] = calibration.model_dump(exclude_defaults=True)
    except Rejected as error:
        place = trials[0].place if error.reason == "reference_fails" else None
        refused = downloads.refusals(place) if place else ""
        return RejectedInput(task.task_id, error.reason, f"{error}{refused}")
    except EnvironmentUnavailable as error:
        return RejectedInput(task.task_id, "no_environment", str(error))
    except (OSError, ValueError) as error:
        if is_of_machine(error):
            raise
        return RejectedInput(task.task_id, "no_reference", str(error))
    return replace(task, payload={**task.payload, CALIBRATIONS: calibrations})


def prove_trial(trial: Trial, reference: Any, sandboxes: SandboxFactory) -> Calibration:
    """Return the calibration of a trial.

    The reference passes REFERENCE_RUNS times at least, first without holes, and the untouched tree does not.

    Raises:
        Rejected: reference_fails, or null_passes.
    """
    if trial.fixed not in _FITTED or not trial.fixed:
        _FITTED[trial.fixed] = _fitted(trial, reference, sandboxes)
    calibration, good, run = _FITTED[trial.fixed]
    calibration = calibration.model_copy(deep=True)
    null = _run(trial, calibration, trial.nothing, sandboxes)
    if _result(trial, null)[0] == 1:
        raise Rejected("null_passes", "the tests pass without any change")
    if calibration.records:
        tests = read_tests(trial, sandboxes)
        seen = "\n".join(text for path, text in tests.visible.items() if path.endswith(".py"))
        reversible = rate(calibration, good, run, null, tests.files, seen)
        if trial.reversible and reversible:
            done = reversals(_run(trial, calibration, reference, sandboxes, reversible))
            calibration.trust |= {f: REVERSED for f in reversible if done[f] >= calibration.turned[f]}
    return calibration


_FITTED: dict[str, tuple[Calibration, set[str], TestRun]] = {}


def _fitted(trial: Trial, reference: Any, sandboxes: SandboxFactory) -> tuple[Calibration, set[str], TestRun]:
    """Return (a calibration with which the reference passes every comparison, the nodes that pass without holes, its
    last run)."""
    plain = None if trial.pytest is False else _run(trial, Calibration(), reference, sandboxes, holes=False)
    if plain is None or (trial.pytest is None and plain.run.problem):
        runs = [_run(trial, PLAIN, reference, sandboxes) for _ in range(REFERENCE_RUNS)]
        rewards = [_require(trial, run, number) for number, run in enumerate(runs, 1)]
        return PLAIN.model_copy(update={"reward": rewards[0]}), set(), runs[-1]
    plain.calibration = Calibration(other={n: k for n, k in plain.run.outcomes.items() if k != "passed"})
    reward = _require(trial, plain, 1)
    calibration, runs = fitted(plain.run, lambda each: _run(trial, each, reference, sandboxes))
    calibration.reward = reward
    for number, run in enumerate(runs, REFERENCE_RUNS - len(runs) + 1):
        _require(trial, run, number)
    return calibration, plain.run.of_kind("passed"), runs[-1]


def _require(trial: Trial, test: TestRun, number: int) -> str:
    """Return the file to which tests wrote a reward, if any. Raises Rejected unless the run passes."""
    reward, details = _result(trial, test)
    if reward < 1:
        raise Rejected("reference_fails", f"run {number}: {json.dumps(details)[:1500]}")
    return details.get("reward_file", "")
