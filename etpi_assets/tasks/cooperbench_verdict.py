"""CooperBench's verdict: git merges both agents' changes, then both features' tests run on the merge.

As in CooperBench: test files are removed from both patches; equal patches need no merge; a clean merge is tested with
each feature's tests; if the merge conflicts, the first agent's patch alone is tested with both; there is no union
merge. The runner of the task's folder or image (`runner.sh <tests> <work>`, patches in /patches) runs the tests. A
feature passes if the runner exits with 0 and at least one test passed. Each feature's tests are one `proof.Trial`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from etpi_assets.tasks import downloads, places
from etpi_assets.tasks.commands import apply_command
from etpi_assets.tasks.family import CHEATED, RejectedInput, Task, Verdict, weakest
from etpi_assets.tasks.frozen import Changes, counted_changes, put_changes, refused_changes
from etpi_assets.tasks.proof import (
    TestRun,
    Tests,
    Trial,
    calibration_of,
    identity_of,
    judge_trial,
    must,
    prove,
    put_rest,
    put_test_files,
    read_tests,
)
from etpi_assets.tasks.reports import counts
from etpi_resources.sandboxes import Sandbox, SandboxFactory

WORKDIR = "/workspace/repo"
PATCHES = "/patches"

_INBOX = ".etpi-in"
_PYTHON_FILE = re.compile(r"^\+\+\+ b/\S+\.py\s*$", re.MULTILINE)
_FORGET = f"rm -f .git/index.lock; git reset -q --hard && git clean -fdq && {places.FORGET_HISTORY}"
_GIT = "git -c user.name=etpi -c user.email=etpi@localhost -c core.hooksPath=/dev/null"
_CLEAN = "git reset -q --hard && git clean -fdq"


def judge(
    task: Task, live: Mapping[str, Any], final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory
) -> Verdict:
    """Verdicts: passed (reward 1); failed_tests, cheated, merge_conflict, no_patch (no agent changed a counted file),
    all 0. `details`: `patched` and `refused` {agent: paths}, `merge` (clean, identical, conflicts), `strategy`,
    `features` {id: report}, and their trust."""
    runs = trials(task, live)
    tests = [read_tests(trial, sandboxes) for trial in runs]
    before, hidden = tests[0].visible, [path for each in tests for path in each.paths]
    work = {agent: counted_changes(before, files, hidden) for agent, files in final.items()}
    details: dict[str, Any] = {"patched": {agent: sorted(changes) for agent, changes in work.items()}}
    details["refused"] = {agent: refused_changes(before, files, hidden) for agent, files in final.items()}
    if not any(work.values()):
        return Verdict(0.0, "no_patch", details)
    record(live, runs, sandboxes)
    merge, merged = _merge(list(work.values()), runs[0], before, sandboxes)
    details |= {"merge": merge, "strategy": "naive" if merge == "clean" else merge}
    if not merged:
        return Verdict(0.0, "merge_conflict", details)
    reports: dict[str, Any] = {}
    for trial in runs:
        calibration = calibration_of(task, trial, sandboxes)
        passed, report = judge_trial(trial, calibration, merged, sandboxes)
        reports[trial.key] = {"passed": passed, **report}
    solved = all(report["passed"] for report in reports.values())
    cheated = any(CHEATED in report for report in reports.values())
    trusts = [report["verdict_trust"] for report in reports.values()]
    details |= {"features": reports, "verdict_trust": weakest(trusts)}
    code = "passed" if solved else CHEATED if cheated else "failed_tests"
    if merge == "conflicts":
        details["strategy"] = "solo-agent1" if solved else "none"
        code = "merge_conflict" if code == "failed_tests" else code
    return Verdict(float(solved), code, details)


def validate(task: Task, live: Mapping[str, Any], sandboxes: SandboxFactory) -> Task | RejectedInput:
    runs = trials(task, live)
    return prove(task, runs, partial(record, live, runs, sandboxes), live["place"], sandboxes)


def trials(task: Task, live: Mapping[str, Any]) -> list[Trial]:
    """Return the run of each feature's tests."""
    place = live["place"]

    def tree(sandboxes: SandboxFactory, *, record: bool = False) -> AbstractContextManager[Sandbox]:
        return places.test_sandbox(place, sandboxes, {}, (PATCHES,), record=record, prepare=_FORGET)

    return [
        Trial(
            number, identity_of(task), tree,
            put_tests=lambda sandbox, tests=tests: _apply(sandbox, tests, index=True),
            solve=partial(_solve, live), start=partial(_start, live, number), passes=partial(_passes, tests),
            patches=True, pytest=_PYTHON_FILE.search(tests) is not None, autoload=True,
        )
        for number, tests in live["tests"].items()
    ]  # fmt: skip


def record(live: Mapping[str, Any], runs: Sequence[Trial], sandboxes: SandboxFactory) -> None:
    """Let the runner install what it needs once for each feature, with the feature's own patch."""
    for trial in runs:
        patch = live["patches"][trial.key]

        def run(trial: Trial = trial, patch: str = patch) -> bool:
            tests = read_tests(trial, sandboxes)
            with trial.tree(sandboxes) as sandbox:
                _apply(sandbox, patch)
                changes = counted_changes(tests.visible, sandbox.read_files())
            with trial.tree(sandboxes, record=True) as sandbox:
                return sandbox.run(trial.start(sandbox, changes, tests)).exit_code != 124  # its time limit

        wanted = [live["place"]["image"], live["runner"], live["tests"][trial.key], patch]
        downloads.recorded(live["place"], wanted, run)


def _solve(live: Mapping[str, Any], sandbox: Sandbox) -> None:
    """Apply the task's combined patch (upstream's also changes tests), or merge those of the features."""
    if live["combined"]:
        return _apply(sandbox, live["combined"])
    base = must(sandbox, "git rev-parse HEAD").strip()
    for number, patch in live["patches"].items():
        _branch(sandbox, base, f"reference{number}")
        _apply(sandbox, patch)
        _commit(sandbox, number)
    first, second = live["patches"]
    merged = sandbox.run(f"git checkout -q reference{second} && {_GIT} merge -q --no-edit reference{first}")
    if merged.exit_code:
        raise OSError(f"the features' own patches conflict: {merged.output[-500:]}")
    return None


def _start(live: Mapping[str, Any], number: str, sandbox: Sandbox, changes: Changes, tests: Tests) -> str:
    """Write the patches of the work and of the tests, and return the runner's command on the clean base."""
    put_changes(sandbox, changes)
    must(sandbox, f"git add -A && git diff --cached --binary > {PATCHES}/work.patch && {_CLEAN}")
    put_rest(sandbox, tests)
    put_test_files(sandbox, tests)
    names = " ".join(map(shlex.quote, sorted(tests.paths)))
    ignored = f'for file in {names}; do [ ! -e "$file" ] || git add -f -- "$file"; done'
    must(sandbox, f"git add -A && {ignored} && git diff --cached --binary > {PATCHES}/tests{number}.patch && {_CLEAN}")
    if live["runner"]:
        sandbox.write_files({f"{_INBOX}/runner.sh": live["runner"]})
        must(sandbox, f"mv -f {_INBOX}/runner.sh {PATCHES}/ && rmdir {_INBOX}")
    runner = f"{PATCHES}/runner.sh" if live["runner"] else "/usr/local/bin/runner.sh"
    words = [runner, f"tests{number}.patch", *(["work.patch"] if changes else [])]
    return downloads.command_with_downloads(live["place"], f"bash {shlex.join(words)}")


def _passes(tests: str, run: TestRun) -> tuple[bool, Mapping[str, Any]]:
    passed, failed = counts(run.output)
    failed -= len(run.turned_over)
    report = {"exit_code": run.exit_code, "tests_passed": passed + len(run.turned_over), "tests_failed": failed}
    return run.exit_code == 0 and report["tests_passed"] > 0 and not run.failed, report


def _merge(
    work: list[Changes], trial: Trial, before: Mapping[str, str], sandboxes: SandboxFactory
) -> tuple[str, Changes]:
    """Return (clean, identical or conflicts; the changes to test, none if the first agent of a conflict has none)."""
    if work[0] == work[-1]:
        return "identical", work[0]
    with trial.tree(sandboxes) as sandbox:
        base = must(sandbox, "git rev-parse HEAD").strip()
        for number, changes in enumerate(work, 1):
            _branch(sandbox, base, f"agent{number}")
            put_changes(sandbox, changes)
            _commit(sandbox, f"agent{number}")
        if sandbox.run(f"git checkout -q agent2 && {_GIT} merge -q --no-edit --no-ff agent1").exit_code:
            return "conflicts", work[0]
        return "clean", counted_changes(before, sandbox.read_files())


def _apply(sandbox: Sandbox, patch: str, *, index: bool = False) -> None:
    must(sandbox, apply_command(patch, index=index))


def _branch(sandbox: Sandbox, base: str, name: str) -> None:
    must(sandbox, f"git checkout -q --force {base} && git clean -fdq && git checkout -q -b {name}")


def _commit(sandbox: Sandbox, message: str) -> None:
    must(sandbox, f"git add -A && {_GIT} commit -q --allow-empty --no-verify -m {shlex.quote(message)}")
