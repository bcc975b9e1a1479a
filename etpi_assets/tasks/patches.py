"""Judge changes of a repository by its hidden tests: `PatchTrial`, and the verdict on the patches of one or two agents.

Read the agents' final files, apply the counted changes in a fresh sandbox, add the hidden tests, run them (`proof`).
Edited tests, conftest files, settings of the test runner and later commits of the repository never reach that sandbox.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from etpi_assets.tasks import downloads, places
from etpi_assets.tasks.calibration import TestRun
from etpi_assets.tasks.family import CHEATED, Rejected, Task, Verdict, weakest
from etpi_assets.tasks.frozen import TEST_FILE, Changes, counted_changes, put_changes, refused_changes
from etpi_assets.tasks.graded_run import GradedRun, installed_plugins, run_graded
from etpi_assets.tasks.grading import is_of_machine
from etpi_assets.tasks.proof import Tests, Trial, judge_trial, read_tests
from etpi_resources.sandboxes import Sandbox, SandboxFactory

INBOX = ".etpi-in"


@dataclass(frozen=True)
class PatchTrial(Trial):
    """A run of hidden tests on changes of a tree.

    Attributes:
        files, folders, prepare: of the tree (`places.test_sandbox`), which has no hidden tests and no history.
        put_tests: writes the suite's own tests into a tree, by `git apply --index` where `patches`.
        solve: applies the reference solution to a tree.
        start: puts changes and tests into a fresh tree, and returns the command that runs them.
        outcome: whether a run passes, and details for a reader.
        patches: whether the tests are a patch, which may also change binary files.
        pytest: whether the command runs pytest; other runners are judged by their output.
        autoload: whether pytest loads the plugins that the runner installs.
        roots: folders of the tree, besides its root, that the code under test is imported from.
        downloads_for: applies the solution whose tests may download; None: `solve`.
    """

    key: str
    identity: str
    place: Mapping[str, Any]
    prepare: str
    put_tests: Callable[[Sandbox], None]
    solve: Callable[[Sandbox], None]
    start: Callable[[Sandbox, Changes, Tests], str]
    outcome: Callable[[TestRun], tuple[bool, Mapping[str, Any]]]
    needs: object
    files: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    downloads_for: Callable[[Sandbox], None] | None = None
    patches: bool = False
    pytest: bool | None = True
    autoload: bool = False
    roots: Sequence[str] = ()
    fixed: str = ""

    @property
    def nothing(self) -> Changes:
        return {}

    def tree(self, sandboxes: SandboxFactory, *, record: bool = False) -> AbstractContextManager[Sandbox]:
        """Open a fresh sandbox with the tree. `record`: its downloads are recorded."""
        return places.test_sandbox(self.place, sandboxes, self.files, self.folders, record=record, prepare=self.prepare)

    def tests(self, sandboxes: SandboxFactory) -> Tests:
        with self.tree(sandboxes) as sandbox:
            plugins = installed_plugins(sandbox) if self.pytest and not self.autoload else None
            before = sandbox.read_files()
            try:
                self.put_tests(sandbox)
            except OSError as error:
                if is_of_machine(error):
                    raise
                raise Rejected("reference_fails", f"the suite's tests cannot be put into its tree: {error}") from error
            after = sandbox.read_files()
            paths = frozenset(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
            files = {path: after[path] for path in sorted(paths) if path in after}
            rest = ""
            if self.patches:
                files = {path: text for path, text in files.items() if path.endswith(".py") and TEST_FILE.search(path)}
                unstaged = f"git reset -q -- {shlex.join(files)} &&" if files else ""
                written = f"git diff --cached --binary | base64 -w 0 > {INBOX}/rest"
                must(sandbox, f"{unstaged} mkdir -p {INBOX} && {written}")
                rest = sandbox.read_files().get(f"{INBOX}/rest", "")
        return Tests(files, before, paths, rest, plugins)

    def changes(self, solve: Callable[[Sandbox], None], sandboxes: SandboxFactory) -> Changes:
        """Return what counts of a solution."""
        with self.tree(sandboxes) as sandbox:
            before = sandbox.read_files()
            solve(sandbox)
            return counted_changes(before, sandbox.read_files())

    def reference(self, sandboxes: SandboxFactory) -> Changes:
        if changes := self.changes(self.solve, sandboxes):
            return changes
        raise Rejected("no_reference", "the reference solution changes no file that counts")

    def shown(self, sandboxes: SandboxFactory) -> Changes:
        return self.changes(self.downloads_for or self.solve, sandboxes)

    def run(
        self, work: Changes, tests: Tests, sandboxes: SandboxFactory, *, recorded: bool, downloads: bool = False
    ) -> GradedRun:
        counted = {path: text for path, text in work.items() if path not in tests.paths}
        with self.tree(sandboxes, record=downloads) as sandbox:
            command = self.start(sandbox, counted, tests)
            if recorded:
                return run_graded(sandbox, command, roots=self.roots, plugins=tests.plugins)
            done = sandbox.run(command)
        return GradedRun(done.output, done.exit_code, done.timed_out)

    def passes(self, test: TestRun) -> tuple[float, Mapping[str, Any]]:
        passed, details = self.outcome(test)
        return float(passed), details


Merge = Callable[[list[Changes], Mapping[str, str]], tuple[str, Changes]]
"""(each agent's changes, the tree before) -> (clean, identical or conflicts; the changes to test, if there are any)."""


def judge_patches(
    task: Task,
    trials: Sequence[PatchTrial],
    final: Mapping[str, Mapping[str, str]],
    sandboxes: SandboxFactory,
    merge: Merge | None = None,
) -> Verdict:
    """Judge the agents' final files: passed (reward 1); failed_tests, cheated, merge_conflict, no_patch (no agent
    changed a counted file), all 0.

    `details` of one agent: `changed` and `refused` paths, the results of the tests and their trust. Of two:
    `patched` and `refused` {agent: paths}, `merge`, `strategy`, `features` {trial: report}, and their trust.
    """
    tests = [read_tests(trial, sandboxes) for trial in trials]
    before, hidden = tests[0].visible, [path for each in tests for path in each.paths]
    work = {agent: counted_changes(before, files, hidden) for agent, files in final.items()}
    refused = {agent: refused_changes(before, files, hidden) for agent, files in final.items()}
    details: dict[str, Any] = {"patched": {agent: sorted(changes) for agent, changes in work.items()}}
    details["refused"] = refused
    if merge is None:
        details = {"changed": sorted(*work.values()), "refused": [*refused.values()][0]}
    if not any(work.values()):
        return Verdict(0.0, "no_patch", details)
    for trial in trials:
        trial.record(sandboxes)
    merged, conflict = [*work.values()][0], False
    if merge is not None:
        kind, merged = merge(list(work.values()), before)
        conflict = kind == "conflicts"
        details |= {"merge": kind, "strategy": "naive" if kind == "clean" else kind}
        if not merged:
            return Verdict(0.0, "merge_conflict", details)
    reports: dict[str, Any] = {}
    for trial in trials:
        passed, report = judge_trial(trial, task.payload, merged, sandboxes)
        reports[trial.key] = {"passed": passed, **report}
    solved = all(report["passed"] for report in reports.values())
    cheated = any(CHEATED in report for report in reports.values())
    code = "passed" if solved else CHEATED if cheated else "merge_conflict" if conflict else "failed_tests"
    if conflict:
        details["strategy"] = "solo-agent1" if solved else "none"
    if merge is None:
        details |= {key: value for report in reports.values() for key, value in report.items() if key != "passed"}
    else:
        trusts = [report["verdict_trust"] for report in reports.values()]
        details |= {"features": reports, "verdict_trust": weakest(trusts)}
    return Verdict(float(solved), code, details)


def put_tests(sandbox: Sandbox, tests: Tests) -> None:
    """Write the tests into a tree, without compiled copies of other versions beside the Python files."""
    if tests.rest:
        sandbox.write_files({f"{INBOX}/rest": tests.rest})
        must(sandbox, f"base64 -d {INBOX}/rest | git apply --whitespace=nowarn - && rm -r {INBOX}")
    stems = [path.rpartition("/") for path in tests.files if path.endswith(".py")]
    caches = " ".join(f"{shlex.quote(a + b)}__pycache__/{shlex.quote(c.removesuffix('.py'))}.*" for a, b, c in stems)
    sandbox.run(f"rm -f -- {caches}")
    sandbox.write_files(tests.files)


def start_tests(place: Mapping[str, Any], command: str, sandbox: Sandbox, changes: Changes, tests: Tests) -> str:
    """Put changes and tests into a tree, and return the command that runs them."""
    put_changes(sandbox, changes)
    put_tests(sandbox, tests)
    return downloads.command_with_downloads(place, command)


def apply_command(patch: str, *, index: bool = False) -> str:
    """Return the command that applies a unified diff to the repository in the working directory, and to its index."""
    return f"printf %s {shlex.quote(patch)} | git apply {'--index ' if index else ''}--whitespace=nowarn -"


def apply_patch(sandbox: Sandbox, patch: str, *, index: bool = False) -> None:
    """Apply a patch to a tree. Raises OSError if it does not apply."""
    must(sandbox, apply_command(patch, index=index))


def must(sandbox: Sandbox, command: str) -> str:
    """Run a command and return its output; raise OSError if it fails, which is an infrastructure error."""
    done = sandbox.run(command)
    if done.exit_code:
        raise OSError(f"in the judge's sandbox, {command[:100]!r} failed: {done.output[-500:]}")
    return done.output
