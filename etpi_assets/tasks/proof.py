"""The core of all families with hidden tests: prove a task, and judge work against its tests.

A family describes a task's runs of tests (`Trial`). `prove` finds out with the reference solution which expected values
can be holes (`Calibration`), which tests have to turn from failing to passing, and how far each can be trusted:

    blind        a strong hole and no literal: the sandbox never has the value, so one run proves it
    reversed     its assertion can be reversed: it has to fail in one run and to pass in another, in random order
    unchallenged neither: its own report counts

`judge_trial` is a function of the trial, its calibration, the work and the machine.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel

from etpi_assets.tasks import downloads
from etpi_assets.tasks.family import (
    BLIND,
    CALIBRATIONS,
    CHEATED,
    REFERENCE_RUNS,
    REVERSED,
    UNCHALLENGED,
    RejectedInput,
    Task,
    weakest,
)
from etpi_assets.tasks.frozen import TEST_FILE, Changes, counted_changes
from etpi_assets.tasks.graded_run import GradedRun, disagreement, installed_plugins, run_graded, without_folder
from etpi_assets.tasks.grading import is_of_machine
from etpi_assets.tasks.holes import Holed, Mode, dig, source_of
from etpi_assets.tasks.reports import Outcomes, pytest_outcomes
from etpi_resources.hashes import json_hash
from etpi_resources.sandboxes import EnvironmentUnavailable, Sandbox, SandboxFactory

_VALUES = Path(__file__).with_name("values.py")
_COMPARE_SECONDS = 60
_CALIBRATIONS = 5
"""Runs of the reference, at most, to find the assertions that holes do not fit."""
_INBOX = ".etpi-in"
_TREES = 4
"""Trials whose tests and trees a process keeps."""


class Tree(Protocol):
    """Opens a fresh sandbox with a task's tree, without hidden tests and history. `record`: downloads are recorded."""

    def __call__(self, sandboxes: SandboxFactory, *, record: bool = False) -> AbstractContextManager[Sandbox]: ...


@dataclass(frozen=True)
class Trial:
    """One run of hidden tests of a task.

    Attributes:
        key: its name among the task's trials.
        identity: a text that differs wherever tree, tests or reference do.
        put_tests: writes the suite's own tests into a tree, by `git apply --index` where `patches`.
        solve: applies the reference solution to a tree.
        start: puts work and tests into a fresh tree, and returns the command that runs them.
        passes: whether a run passes, and details for a reader.
        patches: whether the tests are a patch, which may also change binary files.
        pytest: whether the command runs pytest; other runners are judged by their output.
        autoload: whether pytest loads the plugins that the runner installs.
        roots: folders of the tree, besides its root, that the code under test is imported from.
        fixed: a text that is equal for trials whose tests and solved trees are; "": no other trial's are.
    """

    key: str
    identity: str
    tree: Tree
    put_tests: Callable[[Sandbox], None]
    solve: Callable[[Sandbox], None]
    start: Callable[[Sandbox, Changes, Tests], str]
    passes: Callable[[TestRun], tuple[bool, Mapping[str, Any]]]
    patches: bool = False
    pytest: bool = True
    autoload: bool = False
    roots: Sequence[str] = ()
    fixed: str = ""


@dataclass(frozen=True)
class Tests:
    """The hidden tests of a trial.

    Attributes:
        visible: the tree without them, path -> text: the files that agents saw.
        files: path -> text; the Python files among them may have holes.
        rest: base64 of git's patch of everything else that the tests change; "" if nothing is.
        paths: all paths of text that the tests change. Work on them does not count.
        plugins: the pytest plugins of the machine; None: those that pytest finds.
    """

    __test__: ClassVar[bool] = False  # for pytest
    visible: Mapping[str, str]
    files: Mapping[str, str]
    rest: str
    paths: frozenset[str]
    plugins: Sequence[str] | None


class Calibration(BaseModel):
    """What a reference solution shows about a trial's tests. Functions are named "path::Class::test".

    Attributes:
        modes: path -> place -> how to replace an assertion that a plain hole does not fit.
        whole: paths of files that stay without holes.
        names: node id with holes -> node id without.
        other: node id -> its kind with the reference, if that is not "passed".
        counts: function -> place of a hole, with the cells in it -> number of comparisons; 0: at least one.
        lengths: path -> place -> characters of the text in which something is looked for.
        reward: the file to which the tests write a reward, in the family `harbor`.
        turned: function that fails without a solution -> number of its nodes that pass with it.
        trust: function that had to turn -> its trust.
    """

    modes: dict[str, dict[str, Mode]] = {}
    whole: list[str] = []
    names: dict[str, str] = {}
    other: dict[str, str] = {}
    counts: dict[str, dict[str, int]] = {}
    lengths: dict[str, dict[str, int]] = {}
    turned: dict[str, int] = {}
    trust: dict[str, str] = {}
    reward: str = ""

    @property
    def levels(self) -> dict[str, int]:
        """Trust -> number of functions."""
        counts = Counter(self.trust.values())
        return {level: counts[level] for level in (BLIND, REVERSED, UNCHALLENGED)}


@dataclass
class TestRun:
    """A run of tests after the host compared its records.

    Attributes:
        run: the claims.
        failed: node ids that fail by what was recorded -> the reason.
        reversed: functions whose assertion was reversed in this run.
        turned_over, cheated: node ids of these that failed, and that passed.
        names: node id with holes -> without.
        dug: path -> the file with holes.
        reasons, sizes: of each record, as `values` says.
    """

    __test__: ClassVar[bool] = False  # for pytest
    run: GradedRun
    failed: dict[str, str] = field(default_factory=dict)
    reversed: Collection[str] = ()
    turned_over: set[str] = field(default_factory=set)
    cheated: list[str] = field(default_factory=list)
    names: Mapping[str, str] = field(default_factory=dict)
    dug: Mapping[str, Holed] = field(default_factory=dict)
    reasons: Sequence[str | None] = ()
    sizes: Sequence[int] = ()

    @property
    def output(self) -> str:
        return self.run.output

    @property
    def exit_code(self) -> int:
        """The command's exit status; 0 where it is 1 because of the tests that were reversed, and failed."""
        return 0 if self.run.exit_code == 1 and self.turned_over else self.run.exit_code

    def outcomes(self, printed: Outcomes | None = None) -> Outcomes:
        """Return the printed outcomes by the names of the original tests, as they are after the comparison."""
        printed = pytest_outcomes(self.run.output) if printed is None else printed
        failed, over = ({without_folder(node) for node in nodes} for nodes in (self.failed, self.turned_over))
        brackets = {without_folder(new): old.partition("[")[2] for new, old in self.names.items()}
        fixed: Outcomes = {}
        for name, outcome in printed.items():
            last = without_folder(name)
            plain = f"{name.partition('[')[0]}[{brackets[last]}" if last in brackets else name
            fixed[plain] = "FAILED" if last in failed else "PASSED" if last in over else outcome
        return fixed


def read_tests(trial: Trial, sandboxes: SandboxFactory) -> Tests:
    """Return a trial's tests, read in a sandbox in which no agent's code runs. Kept for the next verdicts."""
    key = f"{trial.identity}/{trial.key}/{sandboxes.name}"
    if (known := _KEPT.get(key)) is not None:
        _KEPT.move_to_end(key)
        return known
    with trial.tree(sandboxes) as sandbox:
        plugins = installed_plugins(sandbox) if trial.pytest and not trial.autoload else None
        before = sandbox.read_files()
        try:
            trial.put_tests(sandbox)
        except OSError as error:
            if is_of_machine(error):
                raise
            raise Unproven("reference_fails", f"the suite's tests cannot be put into its tree: {error}") from error
        after = sandbox.read_files()
        paths = frozenset(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
        files = {path: after[path] for path in sorted(paths) if path in after}
        rest = ""
        if trial.patches:
            files = {path: text for path, text in files.items() if path.endswith(".py") and TEST_FILE.search(path)}
            unstaged = f"git reset -q -- {shlex.join(files)} &&" if files else ""
            must(sandbox, f"{unstaged} mkdir -p {_INBOX} && git diff --cached --binary | base64 -w 0 > {_INBOX}/rest")
            rest = sandbox.read_files().get(f"{_INBOX}/rest", "")
    tests = Tests(before, files, rest, paths, plugins)
    _KEPT[key] = tests
    while len(_KEPT) > _TREES:
        _KEPT.popitem(last=False)
    return tests


_KEPT: OrderedDict[str, Tests] = OrderedDict()


def put_rest(sandbox: Sandbox, tests: Tests) -> None:
    """Apply the part of the tests that is no Python file."""
    if tests.rest:
        sandbox.write_files({f"{_INBOX}/rest": tests.rest})
        must(sandbox, f"base64 -d {_INBOX}/rest | git apply --whitespace=nowarn - && rm -r {_INBOX}")


def put_test_files(sandbox: Sandbox, tests: Tests) -> None:
    """Write the Python files of the tests, without compiled copies of other versions beside them."""
    stems = [path.rpartition("/") for path in tests.files if path.endswith(".py")]
    caches = " ".join(f"{shlex.quote(a + b)}__pycache__/{shlex.quote(c.removesuffix('.py'))}.*" for a, b, c in stems)
    sandbox.run(f"rm -f -- {caches}")
    sandbox.write_files(tests.files)


def identity_of(task: Task) -> str:
    """Return a hash of all that a task's trials depend on."""
    return json_hash([task.suite, {key: value for key, value in task.payload.items() if key != CALIBRATIONS}])


def must(sandbox: Sandbox, command: str) -> str:
    """Run a command and return its output; raise OSError if it fails, which is an infrastructure error."""
    done = sandbox.run(command)
    if done.exit_code:
        raise OSError(f"in the judge's sandbox, {command[:100]!r} failed: {done.output[-500:]}")
    return done.output


# --- judging ---


def judge_trial(
    trial: Trial, calibration: Calibration, changes: Changes, sandboxes: SandboxFactory
) -> tuple[bool, dict[str, Any]]:
    """Return (whether work passes a trial, details: those of `Trial.passes`, `trust` and `verdict_trust`).

    Details have `not_believed` (a message) for a run that cannot count, and `cheated` (node ids) if reversed tests
    passed.

    Args:
        changes: the work: path -> text, None: removed.
    """
    tests = read_tests(trial, sandboxes)
    drawn = [name for name, trust in calibration.trust.items() if trust == REVERSED]
    first = {name for name in drawn if secrets.randbelow(2)}
    passed, details = False, dict[str, Any]()
    for reverse in (first, set(drawn) - first) if drawn else (set(),):
        run = _run(trial, tests, calibration, changes, sandboxes, reverse)
        passed, details = _result(trial, calibration, run)
        if not passed:
            if reverse is first and CHEATED in details:  # wrong work passes them too, and was not seen to pass others
                details["passed_reversed"] = details.pop(CHEATED)
            break
    details |= {"trust": calibration.levels, "verdict_trust": trust_of(calibration)}
    return passed, details


def trust_of(calibration: Calibration) -> str:
    """Return the weakest trust of the tests that had to turn."""
    return weakest(calibration.trust.values())


def run_plain(trial: Trial, changes: Changes, sandboxes: SandboxFactory) -> TestRun:
    """Run the suite's own tests, without holes; only for changes of the suite's own."""
    return _run(trial, read_tests(trial, sandboxes), None, changes, sandboxes)


def _run(
    trial: Trial,
    tests: Tests,
    calibration: Calibration | None,
    changes: Changes,
    sandboxes: SandboxFactory,
    reverse: Collection[str] = (),
) -> TestRun:
    """Run a trial's tests on changes in a fresh sandbox and compare its records."""
    dug = dig_files(tests.files, calibration, reverse) if calibration is not None and trial.pytest else {}
    shown = replace(tests, files={**tests.files, **{path: holed.text for path, holed in dug.items()}})
    counted = {path: text for path, text in changes.items() if path not in tests.paths}
    with trial.tree(sandboxes) as sandbox:
        command = trial.start(sandbox, counted, shown)
        if not trial.pytest:
            done = sandbox.run(command)
            return TestRun(GradedRun(done.output, done.exit_code, done.timed_out))
        run = run_graded(sandbox, command, roots=trial.roots, plugins=tests.plugins)
    return compared(run, dug, calibration or Calibration(), reverse)


def dig_files(files: Mapping[str, str], calibration: Calibration, reverse: Collection[str] = ()) -> dict[str, Holed]:
    """Return the Python files with holes."""
    dug = {}
    for path, text in files.items():
        if path.endswith(".py") and path not in calibration.whole:
            chosen = [name.removeprefix(f"{path}::") for name in reverse if name.startswith(f"{path}::")]
            dug[path] = dig(text, f"k{secrets.token_hex(5)}_", calibration.modes.get(path, {}), chosen)
    return dug


def compared(
    run: GradedRun, dug: Mapping[str, Holed], calibration: Calibration, reverse: Collection[str] = ()
) -> TestRun:
    """Compare a run's records with the expected values, and their numbers with those of the reference."""
    reasons, sizes = _compare(run, dug, calibration)
    result = TestRun(run, reversed=reverse, names=calibration.names, dug=dug, reasons=reasons, sizes=sizes)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    nodes: dict[str, set[str]] = defaultdict(set)
    function_of = _function_of(dug)
    for node in run.outcomes:
        nodes[function_of(node)].add(node)
    for (node, key, values, number), reason in zip(run.records, reasons, strict=True):
        counts[function_of(node)][_counted(key, values, dug)] += number
        if reason is not None:
            result.failed.setdefault(node, reason)
    for function, expected in calibration.counts.items():
        if function in reverse:
            continue
        if wrong := _differences(expected, counts[function]):
            result.failed.update((node, f"comparisons at {wrong}") for node in nodes[function] - result.failed.keys())
    for function in reverse:
        for node in nodes[function]:
            if run.outcomes[node] == "passed":
                result.cheated.append(node)
            elif run.outcomes[node] == "failed":
                result.turned_over.add(node)
    return result


def _differences(expected: Mapping[str, int], counts: Mapping[str, int]) -> list[str]:
    """Return places that were compared more or less often than with the reference."""
    return [
        place
        for place in sorted(expected.keys() | counts.keys())
        if place in expected
        and (counts.get(place, 0) != expected[place] if expected[place] else not counts.get(place, 0))
    ]


def _counted(key: str, values: Sequence[Any], dug: Mapping[str, Holed]) -> str:
    """Return the place of a hole with the places of the cells that were expected there."""
    holed = next((holed for holed in dug.values() if key in holed.places), None)
    if holed is None:
        return key
    cells = [value[1] for value in values[1:] if isinstance(value, list) and value[:1] == ["cell"]]
    return " ".join([holed.places[key], *(holed.places.get(cell, "?") for cell in cells if isinstance(cell, str))])


def _compare(run: GradedRun, dug: Mapping[str, Holed], calibration: Calibration) -> tuple[list[str | None], list[int]]:
    """Return (the reason why each record disagrees or None, the length of each text that is searched)."""
    holes = {key: hole for holed in dug.values() for key, hole in holed.holes.items()}
    lengths = {
        key: length
        for path, holed in dug.items()
        for key, place in holed.places.items()
        if (length := calibration.lengths.get(path, {}).get(place)) is not None
    }
    known = [at for at, (_, key, _, _) in enumerate(run.records) if key in holes]
    request = {
        "holes": holes,
        "cells": {key: literal for holed in dug.values() for key, literal in holed.cells.items()},
        "lengths": lengths,
        "records": [run.records[at][1:3] for at in known],
    }
    reasons: list[str | None] = ["no such hole"] * len(run.records)
    sizes = [0] * len(run.records)
    if known:
        done = subprocess.run(
            [sys.executable, "-I", str(_VALUES), str(_COMPARE_SECONDS)],
            input=json.dumps(request), capture_output=True, text=True, check=False, cwd="/", env={},
        )  # fmt: skip
        answer = json.loads(done.stdout) if done.returncode == 0 else None
        for number, at in enumerate(known):
            reasons[at], sizes[at] = (answer[0][number], answer[1][number]) if answer else ("cannot be compared", 0)
    return reasons, sizes


def _function_of(dug: Mapping[str, Holed]) -> Callable[[str], str]:
    """Return a function: node id -> "path::Class::test", whatever folder the node id is relative to."""
    paths: dict[str, str] = {}

    def function(node: str) -> str:
        file, _, rest = node.partition("[")[0].partition("::")
        if file not in paths:
            ends = [p for p in dug if p == file or p.endswith(f"/{file}") or file.endswith(f"/{p}")]
            paths[file] = max(ends, key=len) if ends else file
        return f"{paths[file]}::{rest}"

    return function


def _result(trial: Trial, calibration: Calibration, test: TestRun) -> tuple[bool, dict[str, Any]]:
    """Return (whether a run passes, details)."""
    passed, details = trial.passes(test)
    details = dict(details)
    if trial.pytest:
        problem = (test.run.problem or _unbelievable(calibration, test)) if passed else None
        if test.cheated:
            details[CHEATED] = sorted(test.cheated)[:20]
            problem = "tests passed that must fail"
        if problem:
            passed, details["not_believed"] = False, problem
        if test.failed:
            details["compared"] = dict(sorted(test.failed.items())[:20])
    return passed, details if passed else {**details, "exit_code": test.run.exit_code, "output": test.output[-2000:]}


def _unbelievable(calibration: Calibration, test: TestRun) -> str | None:
    """Return a message about tests that were not run as with the reference, or were printed otherwise; else None."""
    listed = (name for name, outcome in pytest_outcomes(test.output).items() if outcome == "PASSED")
    return disagreement(test.run, listed) or unlike_reference(calibration, test)


def unlike_reference(calibration: Calibration, test: TestRun) -> str | None:
    """Return a message about tests that were not run as with the reference; else None."""
    skipped = test.run.of_kind("skipped", "xfailed")
    unlike = {node for node in skipped if calibration.other.get(test.names.get(node, node)) != test.run.outcomes[node]}
    function_of = _function_of(dict.fromkeys(_paths(calibration), Holed("")))
    passed = Counter(function_of(node) for node in (test.run.of_kind("passed") - test.failed.keys()) | test.turned_over)
    unlike |= {name for name, number in calibration.turned.items() if passed[name] < number}
    return f"tests did not run as with the reference: {sorted(unlike)[:5]}" if unlike else None


def _paths(calibration: Calibration) -> set[str]:
    return {name.partition("::")[0] for name in [*calibration.turned, *calibration.counts]}


# --- proving ---


class Unproven(ValueError):
    """A reference or an untouched tree that does not behave; `reason` is a code of rejected inputs."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def reference_changes(trial: Trial, sandboxes: SandboxFactory) -> Changes:
    """Return what counts of the reference solution. Raises Unproven if nothing does."""
    with trial.tree(sandboxes) as sandbox:
        before = sandbox.read_files()
        trial.solve(sandbox)
        changes = counted_changes(before, sandbox.read_files())
    if not changes:
        raise Unproven("no_reference", "the reference solution changes no file that counts")
    return changes


def prove_trial(trial: Trial, reference: Changes, sandboxes: SandboxFactory) -> Calibration:
    """Return the calibration of a trial.

    The reference passes REFERENCE_RUNS times at least, first without holes, and the untouched tree does not.

    Raises:
        Unproven: reference_fails, or null_passes.
    """
    if not trial.pytest:
        for number in range(REFERENCE_RUNS):
            _require(trial, Calibration(), run_plain(trial, reference, sandboxes), number + 1)
        _require_failure(trial, Calibration(), run_plain(trial, {}, sandboxes))
        return Calibration(trust={"all": UNCHALLENGED})
    if trial.fixed not in _FITTED or not trial.fixed:
        _FITTED[trial.fixed] = _fitted(trial, reference, sandboxes)
    calibration, good = _FITTED[trial.fixed]
    calibration = calibration.model_copy(deep=True)
    tests = read_tests(trial, sandboxes)
    null = _run(trial, tests, calibration, {}, sandboxes)
    _require_failure(trial, calibration, null)
    rate(calibration, good, null)
    reversible = note_trust(calibration, tests.files, tests.visible)
    if reversible:
        test = _run(trial, tests, calibration, reference, sandboxes, reversible)
        over = Counter(map(_function_of(test.dug), test.turned_over))
        calibration.trust |= {f: REVERSED for f in reversible if over[f] >= calibration.turned[f]}
    return calibration


def prove(
    task: Task, trials: Sequence[Trial], record: Callable[[], None], place: Mapping[str, Any], sandboxes: SandboxFactory
) -> Task | RejectedInput:
    """Return the task with the calibrations of its trials, or a rejection.

    Reasons: no_environment, no_reference, reference_fails, or null_passes without any change.

    Args:
        record: lets the suite's own code download what grading will need.
        place: see `places`.
    """
    calibrations: dict[str, Any] = {}
    try:
        references = [reference_changes(trial, sandboxes) for trial in trials]
        record()
        for trial, reference in zip(trials, references, strict=True):
            calibration = prove_trial(trial, reference, sandboxes)
            calibrations[trial.key] = calibration.model_dump(exclude_defaults=True)
    except Unproven as error:
        refused = downloads.refusals(place) if error.reason == "reference_fails" else ""
        return RejectedInput(task.task_id, error.reason, f"{error}{refused}")
    except EnvironmentUnavailable as error:
        return RejectedInput(task.task_id, "no_environment", str(error))
    except (OSError, ValueError) as error:
        if is_of_machine(error):
            raise
        return RejectedInput(task.task_id, "no_reference", str(error))
    return replace(task, payload={**task.payload, CALIBRATIONS: calibrations})


def calibration_of(task: Task, trial: Trial, sandboxes: SandboxFactory) -> Calibration:
    """Return a trial's calibration: the proved task's, or one that is made now and kept, for tasks proved before."""
    if stored := task.payload.get(CALIBRATIONS, {}).get(trial.key):
        return Calibration.model_validate(stored)
    key = f"{trial.identity}/{trial.key}/{sandboxes.name}"
    if key not in _MADE:
        _MADE[key] = prove_trial(trial, reference_changes(trial, sandboxes), sandboxes)
    return _MADE[key]


_MADE: dict[str, Calibration] = {}
_FITTED: dict[str, tuple[Calibration, set[str]]] = {}


def _fitted(trial: Trial, reference: Changes, sandboxes: SandboxFactory) -> tuple[Calibration, set[str]]:
    """Return (a calibration with which the reference passes every comparison, the nodes that pass without holes)."""
    tests = read_tests(trial, sandboxes)
    plain = run_plain(trial, reference, sandboxes)
    _require(trial, Calibration(other=_other(plain.run)), plain, 1)

    def attempt(calibration: Calibration) -> TestRun:
        return _run(trial, tests, calibration, reference, sandboxes)

    return fitted(plain.run, attempt, partial(_require, trial)), plain.run.of_kind("passed")


def fitted(
    plain: GradedRun,
    attempt: Callable[[Calibration], TestRun],
    require: Callable[[Calibration, TestRun, int], None],
) -> Calibration:
    """Return a calibration with which the reference passes every comparison, twice.

    Args:
        plain: its run without holes.
        attempt: runs it with holes.
        require: raises Unproven for a run (the third value is its number) that does not pass.
    """
    good, calibration = plain.of_kind("passed"), Calibration()
    runs = 1
    while True:
        runs, test = runs + 1, attempt(calibration)
        calibration.names, torn = _renamed(plain.collected, test.run.collected)
        if not _fit(calibration, test, good, torn) or not test.dug:
            break
        if runs > _CALIBRATIONS:
            calibration = Calibration(whole=sorted(test.dug))
    calibration.other, calibration.counts, calibration.lengths = _other(plain), _counts(test), _lengths(test)
    for number in range(max(1, REFERENCE_RUNS - runs)):
        again = attempt(calibration)
        counts = _counts(again)
        for function, places in calibration.counts.items():
            now = counts.get(function, {})
            calibration.counts[function] = {p: n if now[p] == n else 0 for p, n in places.items() if p in now}
        require(calibration, compared(again.run, again.dug, calibration), runs + number + 1)
    return calibration


def _other(run: GradedRun) -> dict[str, str]:
    return {node: kind for node, kind in run.outcomes.items() if kind != "passed"}


def _renamed(before: Sequence[str], after: Sequence[str]) -> tuple[dict[str, str], set[str]]:
    """Return ({node id with holes: without} where they differ, functions whose nodes differ in number)."""
    old, new = ({}, {})
    for groups, nodes in ((old, before), (new, after)):
        for node in nodes:
            groups.setdefault(node.partition("[")[0], []).append(node)
    torn = {base for base, nodes in old.items() if len(nodes) != len(new.get(base, ()))}
    pairs = [pair for base in old.keys() - torn for pair in zip(new[base], old[base], strict=True)]
    return {a: b for a, b in pairs if a != b}, torn


def _fit(calibration: Calibration, test: TestRun, good: set[str], torn: set[str]) -> bool:
    """Note the assertions that the reference does not satisfy with holes. Returns whether there are any."""
    before = calibration.model_dump_json(include={"modes", "whole"})
    function_of = _function_of(test.dug)
    for (node, key, _, _), reason in zip(test.run.records, test.reasons, strict=True):
        path = next((path for path, holed in test.dug.items() if key in holed.holes), None)
        if reason is None or path is None or test.names.get(node, node) not in good:
            continue
        place, item = re.fullmatch(r"(\d+_\d+)(i\d+)?", test.dug[path].places[key]).groups()  # pyright: ignore
        modes = calibration.modes.setdefault(path, {})
        modes[place] = "items" if reason.startswith("opaque") and place not in modes and not item else "kept"
    passed = {calibration.names.get(node, node) for node in test.run.of_kind("passed")}
    for function in {function_of(node) for node in good - passed} | {function_of(node) for node in torn}:
        path, _, name = function.partition("::")
        if path in test.dug:
            modes = calibration.modes.setdefault(path, {})
            places: dict[str, Mode] = {each.place: "kept" for each in test.dug[path].tests.get(name, [])}
            if all(modes.get(place) == "kept" for place in places) and path not in calibration.whole:
                calibration.whole.append(path)
            modes.update(places)
    return before != calibration.model_dump_json(include={"modes", "whole"})


def _counts(test: TestRun) -> dict[str, dict[str, int]]:
    """Return {function: {place of a hole and its cells: comparisons; 0 where they may be more or fewer}}."""
    function_of = _function_of(test.dug)
    often = {
        (f"{path}::{name}", each.place)
        for path, holed in test.dug.items() for name, several in holed.tests.items() for each in several if each.often
    }  # fmt: skip
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for node, key, values, number in test.run.records:
        counts[function_of(node)][_counted(key, values, test.dug)] += number
    return {
        function: {place: 0 if (function, place.partition(" ")[0].partition("i")[0]) in often else number
                   for place, number in places.items()}
        for function, places in counts.items()
    }  # fmt: skip


def _lengths(test: TestRun) -> dict[str, dict[str, int]]:
    lengths: dict[str, dict[str, int]] = {}
    for (_, key, _, _), size in zip(test.run.records, test.sizes, strict=True):
        for path, holed in test.dug.items():
            if size and key in holed.places:
                places = lengths.setdefault(path, {})
                places[holed.places[key]] = max(size, places.get(holed.places[key], 0))
    return lengths


def rate(calibration: Calibration, good: set[str], null: TestRun) -> None:
    """Note the functions of which a node does not pass in the untouched tree."""
    function_of = _function_of(null.dug)
    passing = {null.names.get(node, node) for node in null.run.of_kind("passed") - null.failed.keys()}
    functions = Counter(function_of(node) for node in good)
    turned = {function_of(node) for node in good - passing}
    calibration.turned = {function: functions[function] for function in sorted(turned)}


def note_trust(calibration: Calibration, files: Mapping[str, str], visible: Mapping[str, str]) -> set[str]:
    """Note the trust of each function that had to turn, and return those whose assertion could be reversed.

    Args:
        files: the tests, path -> text.
        visible: the files that agents saw. The values of a test that stands there are known.
    """
    dug = dig_files(files, calibration)
    seen = "\n".join(text for path, text in visible.items() if path.endswith(".py"))
    calibration.trust = dict.fromkeys(calibration.turned, UNCHALLENGED)
    reversible = set()
    for function in calibration.turned:
        path, _, name = function.partition("::")
        if (holed := dug.get(path)) is None:
            continue
        compared_at = {place.partition(" ")[0].partition("i")[0] for place in calibration.counts.get(function, {})}
        strong = any(each.strong and each.place in compared_at for each in holed.tests.get(name, []))
        if strong and holed.is_blind(name) and source_of(files[path], name) not in seen:
            calibration.trust[function] = BLIND
        elif name in holed.reversible:
            reversible.add(function)
    return reversible


def _require(trial: Trial, calibration: Calibration, test: TestRun, number: int) -> None:
    passed, details = _result(trial, calibration, test)
    if not passed:
        raise Unproven("reference_fails", f"run {number}: {json.dumps(details)[:1500]}")


def _require_failure(trial: Trial, calibration: Calibration, test: TestRun) -> None:
    if _result(trial, calibration, test)[0]:
        raise Unproven("null_passes", "the tests pass without any change")
