"""CooperBench's verdict: git merges both agents' changes, then both features' tests run on the merge.

As in CooperBench: test files are removed from both patches; equal patches need no merge; a clean merge is tested with
each feature's tests; if the merge conflicts, the first agent's patch alone is tested with both; there is no union
merge. The runner of the task's folder or image (`runner.sh <tests> <work>`, patches in /patches) runs the tests. A
feature passes if the runner exits with 0 and at least one test passed. Each feature's tests are one `PatchTrial`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from functools import partial
from typing import Any

from etpi_assets.tasks import downloads, places
from etpi_assets.tasks.calibration import TestRun
from etpi_assets.tasks.family import Task, Verdict
from etpi_assets.tasks.frozen import Changes, counted_changes, put_changes
from etpi_assets.tasks.patches import INBOX, PatchTrial, apply_patch, judge_patches, must, put_tests
from etpi_assets.tasks.proof import Tests, identity_of
from etpi_assets.tasks.reports import counts
from etpi_resources.sandboxes import Sandbox, SandboxFactory

WORKDIR = "/workspace/repo"
PATCHES = "/patches"

_PYTHON_FILE = re.compile(r"^\+\+\+ b/\S+\.py\s*$", re.MULTILINE)
_FORGET = f"rm -f .git/index.lock; git reset -q --hard && git clean -fdq && {places.FORGET_HISTORY}"
_GIT = "git -c user.name=etpi -c user.email=etpi@localhost -c core.hooksPath=/dev/null"
_CLEAN = "git reset -q --hard && git clean -fdq"


def judge(
    task: Task, live: Mapping[str, Any], final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory
) -> Verdict:
    """See `judge_patches`."""
    runs = trials(task, live)
    return judge_patches(task, runs, final, sandboxes, partial(_merge, runs[0], sandboxes))


def trials(task: Task, live: Mapping[str, Any]) -> list[PatchTrial]:
    """Return the run of each feature's tests. The runner may install what it needs with the feature's own patch."""
    return [
        PatchTrial(
            number, identity_of(task), live["place"], _FORGET, folders=(PATCHES,),
            put_tests=lambda sandbox, tests=tests: apply_patch(sandbox, tests, index=True),
            solve=partial(_solve, live), start=partial(_start, live, number), outcome=_passes,
            patches=True, pytest=_PYTHON_FILE.search(tests) is not None, autoload=True,
            needs=[live["place"]["image"], live["runner"], tests, live["patches"][number]],
            shown=partial(apply_patch, patch=live["patches"][number]),
        )
        for number, tests in live["tests"].items()
    ]  # fmt: skip


def _solve(live: Mapping[str, Any], sandbox: Sandbox) -> None:
    """Apply the task's combined patch (upstream's also changes tests), or merge those of the features."""
    if live["combined"]:
        return apply_patch(sandbox, live["combined"])
    base = must(sandbox, "git rev-parse HEAD").strip()
    for number, patch in live["patches"].items():
        _branch(sandbox, base, f"reference{number}")
        apply_patch(sandbox, patch)
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
    put_tests(sandbox, tests)
    names = " ".join(map(shlex.quote, sorted(tests.paths)))
    ignored = f'for file in {names}; do [ ! -e "$file" ] || git add -f -- "$file"; done'
    must(sandbox, f"git add -A && {ignored} && git diff --cached --binary > {PATCHES}/tests{number}.patch && {_CLEAN}")
    if live["runner"]:
        sandbox.write_files({f"{INBOX}/runner.sh": live["runner"]})
        must(sandbox, f"mv -f {INBOX}/runner.sh {PATCHES}/ && rmdir {INBOX}")
    runner = f"{PATCHES}/runner.sh" if live["runner"] else "/usr/local/bin/runner.sh"
    words = [runner, f"tests{number}.patch", *(["work.patch"] if changes else [])]
    return downloads.command_with_downloads(live["place"], f"bash {shlex.join(words)}")


def _passes(test: TestRun) -> tuple[bool, Mapping[str, Any]]:
    passed, failed = counts(test.output)
    failed -= len(test.turned_over)
    report = {"exit_code": test.exit_code, "tests_passed": passed + len(test.turned_over), "tests_failed": failed}
    return test.exit_code == 0 and report["tests_passed"] > 0 and not test.failed, report


def _merge(
    trial: PatchTrial, sandboxes: SandboxFactory, work: list[Changes], before: Mapping[str, str]
) -> tuple[str, Changes]:
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


def _branch(sandbox: Sandbox, base: str, name: str) -> None:
    must(sandbox, f"git checkout -q --force {base} && git clean -fdq && git checkout -q -b {name}")


def _commit(sandbox: Sandbox, message: str) -> None:
    must(sandbox, f"git add -A && {_GIT} commit -q --allow-empty --no-verify -m {shlex.quote(message)}")
