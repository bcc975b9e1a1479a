"""CooperBench's verdict: git merges both agents' changes, then both features' tests run on the merge.

As in CooperBench: test files are removed from both patches; equal patches need no merge; a clean merge is tested with
each feature's tests; if the merge conflicts, the first agent's patch alone is tested with both; there is no union
merge. The runner of the task's folder or image (`runner.sh <tests> <work>`, patches in /patches) runs the tests. A
feature passes if the runner exits with 0 and at least one test passed. Each run of tests has a sandbox of its own.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from etpi_assets.tasks import downloads, places
from etpi_assets.tasks.challenge import CHEATED, challenge, trust_of
from etpi_assets.tasks.changed_tests import name_of_test, names_of_tests
from etpi_assets.tasks.commands import apply_command
from etpi_assets.tasks.family import REFERENCE_RUNS, Verdict
from etpi_assets.tasks.frozen import TEST_FILE, Changes, counted_changes, put_changes
from etpi_assets.tasks.graded_run import GradedRun, run_graded
from etpi_assets.tasks.grading import is_of_machine
from etpi_assets.tasks.reports import counts
from etpi_resources.sandboxes import CommandResult, EnvironmentUnavailable, Sandbox, SandboxFactory

WORKDIR = "/workspace/repo"
PATCHES = "/patches"

_INBOX = ".etpi-in"
_TESTED = "work.patch"
_CHANGED = re.compile(r"^\+\+\+ b/(\S+)\s*$", re.MULTILINE)
_FORGET = f"rm -f .git/index.lock; git reset -q --hard && git clean -fdq && {places.FORGET_HISTORY}"
_GIT = "git -c user.name=etpi -c user.email=etpi@localhost -c core.hooksPath=/dev/null"


def judge(live: Mapping[str, Any], final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
    """Verdicts: passed (reward 1); failed_tests, cheated, merge_conflict, no_patch (no agent changed a counted file),
    all 0. `details`: `patched` {agent: paths}, `merge` (clean, identical, conflicts), `strategy`, `features` {id:
    report}."""
    with places.test_sandbox(live["place"], sandboxes, {}, (PATCHES,)) as sandbox:
        before = sandbox.read_files()
        work = {agent: counted_changes(before, files) for agent, files in final.items()}
        patched = {agent: sorted(changes) for agent, changes in work.items()}
        if not any(work.values()):
            return Verdict(0.0, "no_patch", {"patched": patched})
        _record(live, sandboxes)
        details, patch = _merge(list(work.values()), sandbox)
    details = {"patched": patched, **details}
    if patch is None:
        return Verdict(0.0, "merge_conflict", details)
    reports = {number: _feature_report(live, sandboxes, number, patch, before) for number in live["tests"]}
    solved = all(report["passed"] for report in reports.values())
    cheated = any(CHEATED in report for report in reports.values())
    details |= {"features": reports, "verdict_trust": trust_of(*reports.values())}
    code = "passed" if solved else CHEATED if cheated else "failed_tests"
    if details["merge"] == "conflicts":
        details["strategy"] = "solo-agent1" if solved else "none"
        code = "merge_conflict" if code == "failed_tests" else code
    return Verdict(float(solved), code, details)


def validate(live: Mapping[str, Any], sandboxes: SandboxFactory) -> tuple[str, str] | None:
    """Return None for a valid task, else (no_environment, no_reference, reference_fails or null_passes; detail)."""
    try:
        _record(live, sandboxes)
        with places.test_sandbox(live["place"], sandboxes, {}, (PATCHES,), prepare=_FORGET) as sandbox:
            base = _must(sandbox, "git rev-parse HEAD").output.strip()
            if live["combined"]:
                _apply_reference(sandbox, live["combined"], "reference")
            else:
                for number, patch in live["patches"].items():
                    _branch(sandbox, base, f"reference{number}")
                    _apply_reference(sandbox, patch, number)
                first, second = live["patches"]
                merged = sandbox.run(f"git checkout -q reference{second} && {_GIT} merge -q --no-edit reference{first}")
                if merged.exit_code:
                    return "no_reference", f"the features' own patches conflict: {merged.output[-500:]}"
            _must(sandbox, f"git diff --binary {base} HEAD > {PATCHES}/reference.patch")
            for number, tests in live["tests"].items():
                for run in range(REFERENCE_RUNS):
                    report = _report(_run_tests(live, sandbox, base, number, "reference.patch"), tests)
                    if not report["passed"]:
                        detail = f"feature {number}, run {run + 1} of {REFERENCE_RUNS}: {json.dumps(report)[:1500]}"
                        return "reference_fails", detail + downloads.refusals(live["place"])
                if _report(_run_tests(live, sandbox, base, number, None), tests)["passed"]:
                    return "null_passes", f"the tests of feature {number} pass without any change"
    except EnvironmentUnavailable as error:
        return "no_environment", str(error)
    except OSError as error:
        if is_of_machine(error):
            raise
        return "no_reference", str(error)
    return None


def _apply_reference(sandbox: Sandbox, patch: str, message: str) -> None:
    """Commit what counts of a patch, as of an agent's: upstream's combined patches also change tests."""
    before = sandbox.read_files()
    _must(sandbox, apply_command(patch))
    changes = counted_changes(before, sandbox.read_files())
    _must(sandbox, "git reset -q --hard && git clean -fdq")
    put_changes(sandbox, changes)
    _commit(sandbox, message)


def _record(live: Mapping[str, Any], sandboxes: SandboxFactory) -> None:
    """Let the runner install what it needs once for each feature, with the feature's own patch."""
    for number, tests in live["tests"].items():
        patch = live["patches"][number]

        def run(number: str = number, tests: str = tests, patch: str = patch) -> bool:
            with places.test_sandbox(live["place"], sandboxes, {}, (PATCHES,), record=True, prepare=_FORGET) as sandbox:
                base = _must(sandbox, "git rev-parse HEAD").output.strip()
                _put(sandbox, {f"feature{number}.patch": patch})
                done = _run_tests(live, sandbox, base, number, f"feature{number}.patch")
                return done.exit_code != 124  # its time limit

        downloads.recorded(live["place"], [live["place"]["image"], live["runner"], tests, patch], run)


def _merge(work: list[Changes], sandbox: Sandbox) -> tuple[dict[str, Any], str | None]:
    """Return (`merge` and `strategy`, the patch to test); no patch if the first agent of a conflict changed nothing."""
    base = _must(sandbox, "git rev-parse HEAD").output.strip()
    for number, changes in enumerate(work, 1):
        _branch(sandbox, base, f"agent{number}")
        put_changes(sandbox, changes)
        _commit(sandbox, f"agent{number}")
    if work[0] == work[-1]:
        merge, tested = "identical", "agent1"
    elif sandbox.run(f"git checkout -q agent2 && {_GIT} merge -q --no-edit --no-ff agent1").exit_code == 0:
        merge, tested = "clean", "HEAD"
    else:
        _must(sandbox, "git merge --abort || git reset -q --hard")
        merge, tested = "conflicts", "agent1"
    details = {"merge": merge, "strategy": "naive" if merge == "clean" else merge}
    if merge == "conflicts" and not work[0]:
        return details, None
    # As base64, since a patch may hold bytes that are no text.
    _must(sandbox, f"mkdir -p {_INBOX} && git diff --binary {base} {tested} | base64 > {_INBOX}/patch")
    return details, sandbox.read_files()[f"{_INBOX}/patch"]


def _feature_report(
    live: Mapping[str, Any], sandboxes: SandboxFactory, number: str, patch: str, visible: Mapping[str, str]
) -> dict[str, Any]:
    """Test a patch (base64) with one feature's tests; `visible` are the files that the agents saw."""

    def again(copies: Mapping[str, str], *, reference: bool) -> GradedRun:
        reference_patch = base64.b64encode(live["patches"][number].encode()).decode()
        second = _run_patch(live, sandboxes, number, reference_patch if reference else patch, copies)
        assert isinstance(second, GradedRun)
        return second

    run = _run_patch(live, sandboxes, number, patch)
    report = _report(run, live["tests"][number])
    if report["passed"] and isinstance(run, GradedRun):
        tests = live["tests"][number]
        report |= challenge(run, visible, again, lambda second: bool(_report(second, tests)["passed"]))
        report["passed"] = "not_believed" not in report
    return report


def _run_patch(
    live: Mapping[str, Any],
    sandboxes: SandboxFactory,
    number: str,
    patch: str,
    copies: Mapping[str, str] | None = None,
) -> GradedRun | CommandResult:
    """Run one feature's tests on a patch (base64) in a fresh sandbox, with `copies` (path -> text) over them."""
    with places.test_sandbox(live["place"], sandboxes, {}, (PATCHES,), prepare=_FORGET) as sandbox:
        base = _must(sandbox, "git rev-parse HEAD").output.strip()
        _put(sandbox, {"encoded": patch})
        _must(sandbox, f"base64 -d {PATCHES}/encoded > {PATCHES}/{_TESTED} && rm {PATCHES}/encoded")
        return _run_tests(live, sandbox, base, number, _TESTED, copies)


def _run_tests(
    live: Mapping[str, Any],
    sandbox: Sandbox,
    base: str,
    number: str,
    work: str | None,
    copies: Mapping[str, str] | None = None,
) -> GradedRun | CommandResult:
    """Run one feature's tests on the base commit with a patch of /patches applied."""
    _must(
        sandbox,
        f"rm -f .git/index.lock; git checkout -q --force {base} && git reset -q --hard {base} && git clean -fdq",
    )
    _put(sandbox, {f"tests{number}.patch": live["tests"][number]})
    hidden = _hidden_tests(sandbox, live["tests"][number], f"{PATCHES}/tests{number}.patch", copies or {})
    _put(sandbox, {"runner.sh": live["runner"]} if live["runner"] else {})
    runner = f"{PATCHES}/runner.sh" if live["runner"] else "/usr/local/bin/runner.sh"
    words = [runner, f"tests{number}.patch", *([work] if work else [])]
    command = downloads.command_with_downloads(live["place"], f"bash {shlex.join(words)}")
    return run_graded(sandbox, command, tests=hidden) if hidden else sandbox.run(command)


def _report(run: GradedRun | CommandResult, tests: str) -> dict[str, Any]:
    """Return a run's report; `tests` is the patch of its tests."""
    problem = (run.problem or _unproven(run, tests)) if isinstance(run, GradedRun) else None
    passed, failed = counts(run.output)
    report: dict[str, Any] = {
        "passed": run.exit_code == 0 and passed > 0 and problem is None,
        "exit_code": run.exit_code,
        "tests_passed": passed,
        "tests_failed": failed,
    }
    if problem is not None:
        report["not_believed"] = problem
    return report if report["passed"] else {**report, "output": run.output[-2000:]}


def _put(sandbox: Sandbox, files: Mapping[str, str]) -> None:
    sandbox.write_files({f"{_INBOX}/{name}": text for name, text in files.items()})
    _must(sandbox, f"mv -f {_INBOX}/* {PATCHES}/ && rmdir {_INBOX}")


def _hidden_tests(sandbox: Sandbox, tests: str, file: str, copies: Mapping[str, str]) -> dict[str, str]:
    """Return the Python test files (path -> text) of a tests patch, and check out the base commit again.

    The patch's file is written again by git, with or without `copies`, so that its form tells nothing about them. Empty
    if the patch has no Python file: then another runner than pytest runs the tests."""
    names = [path for path in dict.fromkeys(_CHANGED.findall(tests)) if path.endswith(".py")]
    if not names or sandbox.run(apply_command(tests)).exit_code:
        return {}
    files = sandbox.read_files()
    sandbox.write_files(copies)
    written = " ".join(shlex.quote(path) for path in dict.fromkeys(_CHANGED.findall(tests)))
    ignored = f'for file in {written}; do [ ! -e "$file" ] || git add -f -- "$file"; done'
    clean = "git reset -q --hard && git clean -fdq"
    _must(sandbox, f"git add -A && {ignored} && git diff --cached --binary > {file} && {clean}")
    return {path: files[path] for path in names if path in files and TEST_FILE.search(path)}


def _unproven(run: GradedRun, tests: str) -> str | None:
    """Return a message that names added tests that did not run, or neither passed nor were left out by themselves."""
    added = "\n".join(line[1:] for line in tests.splitlines() if line.startswith("+"))
    ran = {name_of_test(node)[1] for node in run.of_kind("passed", "skipped", "xfailed")}
    wanted = {name for text in run.tests.values() for name in names_of_tests(text) if f"def {name}(" in added}
    return f"added tests did not pass: {sorted(wanted - ran)[:5]}" if wanted - ran else None


def _branch(sandbox: Sandbox, base: str, name: str) -> None:
    _must(sandbox, f"git checkout -q --force {base} && git clean -fdq && git checkout -q -b {name}")


def _commit(sandbox: Sandbox, message: str) -> None:
    _must(sandbox, f"git add -A && {_GIT} commit -q --allow-empty --no-verify -m {shlex.quote(message)}")


def _must(sandbox: Sandbox, command: str) -> CommandResult:
    """Run a command; raise OSError with its output if it fails, which is an infrastructure error."""
    done = sandbox.run(command)
    if done.exit_code:
        raise OSError(f"in the judge's sandbox, {command[:100]!r} failed: {done.output[-500:]}")
    return done
