"""Judge changes of a repository by its hidden tests: `PatchTrial`, and the verdict on the patches of one or two agents.

Read the agents' final files, apply the counted changes in a fresh sandbox, add the hidden tests, run them (`proof`).
Edited tests, conftest files, settings of the test runner and later commits of the repository never reach that sandbox.
"""

from __future__ import annotations

import shlex
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from etpi_assets.tasks import places
from etpi_assets.tasks.downloads import command_with_downloads
from etpi_assets.tasks.family import CHEATED, Rejected, Task, Verdict, weakest
from etpi_assets.tasks.frozen import TEST_FILE, Changes, counted_changes, put_changes, refused_changes
from etpi_assets.tasks.graded_run import GradedRun, installed_plugins, run_graded
from etpi_assets.tasks.grading import is_of_machine
from etpi_assets.tasks.proof import TestedFamily, Tests, Trial, judge_trial, read_tests
from etpi_resources.sandboxes import Sandbox, SandboxFactory

INBOX = ".etpi-in"
_GIT = "git -c user.name=etpi -c user.email=etpi@localhost -c core.hooksPath=/dev/null"


@dataclass(frozen=True)
class PatchTrial(Trial):
    """A run of hidden tests on changes of a tree. A subclass says which outcomes pass.

    Attributes:
        hidden: the suite's tests: path -> text, or a patch, which may also change binary files.
        command: runs them.
        prepare: bash command that removes the history, and copies of the hidden tests that an image has.
        folders: writable folders besides the tree.
        autoload: whether pytest loads the plugins that the runner installs.
        roots: folders of the tree, besides its root, that the code under test is imported from.
    """

    family: PatchFamily
    task: Task
    hidden: str | Mapping[str, str]
    command: str
    key: str = "tests"
    pytest: bool | None = True
    roots: Sequence[str] = ()
    fixed: str = ""
    prepare: ClassVar[str] = places.FORGET_HISTORY
    folders: ClassVar[tuple[str, ...]] = ()
    autoload: ClassVar[bool] = False

    def solve(self, sandbox: Sandbox) -> None:
        """Apply the reference solution to a tree."""
        for each in self.family.solve(self.task, self.family.roles(self.task)[0]):
            must(sandbox, each)

    def start(self, sandbox: Sandbox, changes: Changes, tests: Tests) -> str:
        """Put changes and tests into a fresh tree, and return the command that runs them."""
        put_changes(sandbox, changes)
        put_tests(sandbox, tests)
        return self.command

    @property
    def nothing(self) -> Changes:
        return {}

    @property
    def needs(self) -> object:
        return [self.task.content_hash, self.command]

    def tree(self, sandboxes: SandboxFactory, *, record: bool = False) -> AbstractContextManager[Sandbox]:
        """Open a fresh sandbox with the tree and neither hidden tests nor history, recording downloads if `record`."""
        files = self.family.workspace(self.task, self.family.roles(self.task)[0])
        return places.test_sandbox(self.place, sandboxes, files, self.folders, record=record, prepare=self.prepare)

    def tests(self, sandboxes: SandboxFactory) -> Tests:
        with self.tree(sandboxes) as sandbox:
            plugins = installed_plugins(sandbox) if self.pytest and not self.autoload else None
            before = sandbox.read_files()
            try:
                if isinstance(self.hidden, str):
                    apply_patch(sandbox, self.hidden, index=True)
                else:
                    sandbox.write_files(self.hidden)
            except OSError as error:
                if is_of_machine(error):
                    raise
                raise Rejected("reference_fails", f"the suite's tests cannot be put into its tree: {error}") from error
            after = sandbox.read_files()
            paths = frozenset(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
            files = {path: after[path] for path in sorted(paths) if path in after}
            rest = ""
            if isinstance(self.hidden, str):
                files = {path: text for path, text in files.items() if path.endswith(".py") and TEST_FILE.search(path)}
                unstaged = f"git reset -q -- {shlex.join(files)} &&" if files else ""
                written = f"git diff --cached --binary | base64 -w 0 > {INBOX}/rest"
                must(sandbox, f"{unstaged} mkdir -p {INBOX} && {written}")
                rest = sandbox.read_files().get(f"{INBOX}/rest", "")
        return Tests(files, before, paths, rest, plugins)

    def reference(self, sandboxes: SandboxFactory) -> Changes:
        tests = read_tests(self, sandboxes)
        with self.tree(sandboxes) as sandbox:
            self.solve(sandbox)
            changes = counted_changes(tests.visible, sandbox.read_files(), tests.paths)
        if not changes:
            raise Rejected("no_reference", "the reference solution changes no file that counts")
        return changes

    def run(
        self, work: Changes, tests: Tests, sandboxes: SandboxFactory, *, recorded: bool, record: bool = False
    ) -> GradedRun:
        counted = {path: text for path, text in work.items() if path not in tests.paths}
        with self.tree(sandboxes, record=record) as sandbox:
            command = command_with_downloads(self.place, self.start(sandbox, counted, tests))
            return run_graded(sandbox, command, recorded=recorded, roots=self.roots, plugins=tests.plugins)


class PatchFamily(TestedFamily):
    """A family whose agents leave changes of one tree."""

    @abstractmethod
    def trials(self, task: Task) -> Sequence[PatchTrial]: ...

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        """Judge the agents' final files: passed (reward 1); failed_tests, cheated, merge_conflict, no_patch (no agent
        changed a counted file), all 0.

        `details` of one agent: `changed` and `refused` paths, the results of the tests and their trust. Of two:
        `patched` and `refused` {agent: paths}, `merge`, `strategy`, `features` {trial: report}, and their trust.
        """
        trials = self.trials(task)
        tests = [read_tests(trial, sandboxes) for trial in trials]
        before, hidden = tests[0].visible, [path for each in tests for path in each.paths]
        work = {agent: counted_changes(before, files, hidden) for agent, files in final.items()}
        refused = {agent: refused_changes(before, files, hidden) for agent, files in final.items()}
        (first, *_), alone = work.values(), len(work) == 1
        details: dict[str, Any] = {"changed": sorted(first), "refused": [*refused.values()][0]}
        if not alone:
            details = {"patched": {agent: sorted(changes) for agent, changes in work.items()}, "refused": refused}
        if not any(work.values()):
            return Verdict(0.0, "no_patch", details)
        for trial in trials:
            trial.record(sandboxes)
        kind, merged = ("alone", first) if alone else _merged(trials[0], list(work.values()), before, hidden, sandboxes)
        conflict = kind == "conflicts"
        if not alone:
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
        if alone:
            (report,) = reports.values()
            return Verdict(float(solved), code, {**details, **{k: v for k, v in report.items() if k != "passed"}})
        trust = weakest(report["verdict_trust"] for report in reports.values())
        return Verdict(float(solved), code, {**details, "features": reports, "verdict_trust": trust})


def _merged(
    trial: PatchTrial,
    work: Sequence[Changes],
    before: Mapping[str, str],
    hidden: Collection[str],
    sandboxes: SandboxFactory,
) -> tuple[str, Changes]:
    """Return (clean, identical or conflicts; the changes to test, if there are any) of two agents' changes."""
    if work[0] == work[-1]:
        return "identical", work[0]
    with trial.tree(sandboxes) as sandbox:
        if merge(sandbox, [partial(stage_changes, changes=changes) for changes in work]):
            return "conflicts", work[0]
        return "clean", counted_changes(before, sandbox.read_files(), hidden)


def merge(sandbox: Sandbox, works: Sequence[Callable[[Sandbox], None]]) -> str | None:
    """Merge both works on a tree, each on a branch of its own; return git's words if they conflict."""
    base = must(sandbox, "git rev-parse HEAD").strip()
    for number, work in enumerate(works, 1):
        must(sandbox, f"git checkout -q --force {base} && git clean -fdq && git checkout -q -b agent{number}")
        work(sandbox)
        must(sandbox, f"git add -A && {_GIT} commit -q --allow-empty --no-verify -m agent{number}")
    done = sandbox.run(f"{_GIT} merge -q --no-edit --no-ff agent1")
    return f"git merge: {done.output[-500:]}" if done.exit_code else None


def stage_changes(sandbox: Sandbox, changes: Changes) -> None:
    """Apply the changes to a tree and add them to git's index, also where `.gitignore` names their files."""
    put_changes(sandbox, changes)
    written = [path for path, text in changes.items() if text is not None]
    for at in range(0, len(written), 500):
        sandbox.run(f"git add --force -- {shlex.join(written[at : at + 500])}")


def put_tests(sandbox: Sandbox, tests: Tests) -> None:
    """Write the tests into a tree, without compiled copies of other versions beside the Python files."""
    if tests.rest:
        sandbox.write_files({f"{INBOX}/rest": tests.rest})
        must(sandbox, f"base64 -d {INBOX}/rest | git apply --whitespace=nowarn - && rm -r {INBOX}")
    stems = [path.rpartition("/") for path in tests.files if path.endswith(".py")]
    caches = " ".join(f"{shlex.quote(a + b)}__pycache__/{shlex.quote(c.removesuffix('.py'))}.*" for a, b, c in stems)
    sandbox.run(f"rm -f -- {caches}")
    sandbox.write_files(tests.files)


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
