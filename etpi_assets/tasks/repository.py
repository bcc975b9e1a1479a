"""Tasks of real repositories with one agent and hidden tests: the base class of `r2e` and `swe_bench`.

The verdict: read the agent's final files, end its sandbox, apply the counted changes in a fresh sandbox, add the hidden
tests, run them. Edited tests, conftest files, settings of the test runner and later commits of the repository never
reach that sandbox. Subclasses define a data set's fields and which test outcomes pass.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from etpi_assets.tasks import downloads, places
from etpi_assets.tasks.challenge import CHEATED, challenge, trust_of
from etpi_assets.tasks.family import (
    EXCLUDED,
    REFERENCE_RUNS,
    Family,
    RejectedInput,
    SandboxNeeds,
    Task,
    Verdict,
    named_path,
    require_heldout,
    with_defaults,
)
from etpi_assets.tasks.frozen import Changes, counted_changes, put_changes
from etpi_assets.tasks.graded_run import GradedRun, disagreement, installed_plugins, run_graded
from etpi_assets.tasks.grading import is_of_machine
from etpi_assets.tasks.reports import pytest_outcomes
from etpi_resources.hashes import json_hash
from etpi_resources.sandboxes import CommandResult, EnvironmentUnavailable, Sandbox, SandboxFactory

PARAMS: Mapping[str, Any] = {
    **places.PARAMS,
    "sandbox": "docker",
    "path": None,
    "repos": (),
    "exclude_repos": (),
    "heldout_repos": (),
    "heldout_tasks": (),
    "rows": None,
}
"""Besides those of `places`. path: the rows, a .jsonl, .json or .parquet file, or a folder of them. repos: only these.
exclude_repos: not these; their rows are quarantined as `excluded`, which is no fault of the suite. heldout_repos,
heldout_tasks: these are the split heldout, all others train. rows: take only this many, from the first on."""


class RepositoryFamily(Family, ABC):
    """Base class; a subclass reads its data set's rows and judges their tests."""

    params: Mapping[str, Any] = PARAMS
    name: str
    feature_id = "issue"
    keeps_proofs = True
    hides: str
    """Bash command that removes hidden tests from an agent's workspace."""
    hides_from_code: str = "true"
    """Bash command that removes copies of the hidden tests that an image has, before code under test runs."""

    @abstractmethod
    def read(self, suite: str, row: Mapping[str, Any], chosen: Mapping[str, Any]) -> Task:
        """Return the task of a row. KeyError, TypeError and ValueError reject the row."""

    def repo_of(self, row: Mapping[str, Any]) -> str:
        """Return the repository that a row is of, for `exclude_repos`."""
        return str(row.get("repo", ""))

    @abstractmethod
    def put_tests(self, task: Task, sandbox: Sandbox) -> None:
        """Write the hidden tests into a workspace."""

    @abstractmethod
    def test_command(self, task: Task) -> str: ...

    @abstractmethod
    def hidden_tests(self, task: Task, sandbox: Sandbox) -> Mapping[str, str]:
        """Return the hidden test files (path -> text), after `put_tests`."""

    def roots(self, task: Task) -> Sequence[str]:
        """Return the folders of the workspace, besides its root, that the code under test is imported from."""
        return ()

    def runs_pytest(self, task: Task) -> bool:
        """Return whether `test_command` runs pytest; other runners are judged by their output."""
        return True

    @abstractmethod
    def passes(self, task: Task, output: str) -> tuple[bool, Mapping[str, Any]]:
        """Return whether the tests' output passes, and details for a reader."""

    @abstractmethod
    def solution(self, task: Task, sandbox: Sandbox) -> None:
        """Apply the reference solution to a workspace, without its tests."""

    def load(self, suite: str, seed: int, params: Mapping[str, Any]) -> Iterator[Task | RejectedInput]:
        """Yield a task or a rejection for each row, in order. `seed` has no effect.

        Raises:
            ValueError: unknown params, no path, or a misspelt held-out repository.
            FileNotFoundError: no rows at the path.
        """
        chosen = with_defaults(suite, self.name, params, self.params)
        path = named_path(suite, chosen, "the data set's rows (.jsonl, .json, .parquet)")
        seen: dict[str, str] = {}
        repos: set[str] = set()
        taken = 0
        for source, row in read_rows(path):
            if chosen["rows"] is not None and taken >= chosen["rows"]:
                return
            if isinstance(row, str):
                yield RejectedInput(source, "unreadable_row", row)
                continue
            if (repo := self.repo_of(row)) in chosen["exclude_repos"]:
                yield RejectedInput(source, EXCLUDED, f"params.exclude_repos names {repo}")
                continue
            try:
                task = self.read(suite, row, chosen)
            except (KeyError, TypeError, ValueError, IndexError) as error:
                detail = f"no field {error}" if isinstance(error, KeyError) else str(error)
                yield RejectedInput(source, "unreadable_row", detail)
                continue
            repos.add(task.repo)
            if chosen["repos"] and task.repo not in chosen["repos"]:
                continue
            taken += 1
            if task.task_id in seen:
                yield RejectedInput(source, "repeated_task", f"{task.task_id} is at {seen[task.task_id]} already")
                continue
            seen[task.task_id] = source
            yield task
        require_heldout(suite, chosen["heldout_repos"], repos)

    def needs(self, task: Task) -> SandboxNeeds:
        return places.needs(task.payload["place"], f"{self.hides}; {places.FORGET_HISTORY}")

    def entities(self, task: Task) -> Sequence[str]:
        return task.payload["entities"]

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        """Verdicts: passed (reward 1); failed_tests, cheated, no_patch (0). `details`: changed paths and the tests'
        results."""
        (files,) = final.values()
        self._record(task, sandboxes)
        with self._test_sandbox(task, sandboxes) as sandbox:
            visible = sandbox.read_files()
            changes = counted_changes(visible, files)
            if not changes:
                return Verdict(0.0, "no_patch", {"changed": []})
            run = self._test_changes(task, changes, sandbox)
        passed, details = self._result(task, run)
        if passed and isinstance(run, GradedRun):

            def again(copies: Mapping[str, str], *, reference: bool) -> GradedRun:
                with self._test_sandbox(task, sandboxes) as sandbox:
                    if reference:
                        self.solution(task, sandbox)
                    second = self._test_changes(task, {} if reference else changes, sandbox, copies)
                assert isinstance(second, GradedRun)
                return second

            doubts = challenge(run, visible, again, lambda second: self._result(task, second)[0])
            passed, details = "not_believed" not in doubts, {**details, **doubts}
        code = "passed" if passed else CHEATED if CHEATED in details else "failed_tests"
        return Verdict(float(passed), code, {"changed": sorted(changes), **details, "verdict_trust": trust_of(details)})

    def rejection(self, task: Task, sandboxes: SandboxFactory) -> RejectedInput | None:
        """Reject a task as no_environment, no_reference, reference_fails, or null_passes without any change."""
        try:
            with self._test_sandbox(task, sandboxes) as sandbox:
                before = sandbox.read_files()
                self.solution(task, sandbox)
                changes = counted_changes(before, sandbox.read_files())
            if not changes:
                return RejectedInput(task.task_id, "no_reference", "the reference solution changes no file that counts")
            self._record(task, sandboxes)
            for run in range(REFERENCE_RUNS):
                passed, details = self._try(task, changes, sandboxes)
                if not passed:
                    detail = f"run {run + 1} of {REFERENCE_RUNS}: {json.dumps(details)[:1500]}"
                    detail += downloads.refusals(task.payload["place"])
                    return RejectedInput(task.task_id, "reference_fails", detail)
            if self._try(task, {}, sandboxes)[0]:
                return RejectedInput(task.task_id, "null_passes", "the tests pass without any change")
        except EnvironmentUnavailable as error:
            return RejectedInput(task.task_id, "no_environment", str(error))
        except (OSError, ValueError) as error:
            if is_of_machine(error):
                raise
            return RejectedInput(task.task_id, "no_reference", str(error))
        return None

    def run_tests(self, task: Task, sandboxes: SandboxFactory, *, solved: bool, record: bool = False) -> CommandResult:
        """Run the hidden tests with or without the reference solution; nothing is judged.

        `record`: fetch and record what they download.

        Raises:
            OSError: the solution or the tests cannot be applied. EnvironmentUnavailable: as `SandboxFactory.create`.
        """
        with self._test_sandbox(task, sandboxes, record=record) as sandbox:
            if solved:
                self.solution(task, sandbox)
            self.put_tests(task, sandbox)
            return sandbox.run(self._test_command(task))

    def _try(self, task: Task, changes: Changes, sandboxes: SandboxFactory) -> tuple[bool, Mapping[str, Any]]:
        """Return (whether the hidden tests pass with the changes, details); only for changes of the suite's own."""
        with self._test_sandbox(task, sandboxes) as sandbox:
            run = self._test_changes(task, changes, sandbox)
        return self._result(task, run)

    def _test_changes(
        self, task: Task, changes: Changes, sandbox: Sandbox, copies: Mapping[str, str] | None = None
    ) -> GradedRun | CommandResult:
        """Apply the changes in a fresh sandbox and run the hidden tests, with `copies` (path -> text) over them."""
        plugins = installed_plugins(sandbox)  # listed before the patch is applied
        self.put_tests(task, sandbox)
        tests = self.hidden_tests(task, sandbox)  # read before the patch, whose files may exceed the limit of a read
        put_changes(sandbox, changes)
        self.put_tests(task, sandbox)
        command = self._test_command(task)
        if not self.runs_pytest(task):
            return sandbox.run(command)
        sandbox.write_files({**tests, **(copies or {})})  # all, so that no file's time tells a copy
        return run_graded(sandbox, command, tests=tests, roots=self.roots(task), plugins=plugins)

    def _result(self, task: Task, run: GradedRun | CommandResult) -> tuple[bool, Mapping[str, Any]]:
        """Return (whether a run's tests pass, details)."""
        passed, details = self.passes(task, run.output)
        if isinstance(run, GradedRun):
            listed = (name for name, outcome in pytest_outcomes(run.output).items() if outcome == "PASSED")
            if problem := run.problem or disagreement(run, listed):
                passed, details = False, {**details, "not_believed": problem}
        return passed, details if passed else {**details, "exit_code": run.exit_code, "output": run.output[-2000:]}

    def _record(self, task: Task, sandboxes: SandboxFactory) -> None:
        wanted = [task.content_hash, self.test_command(task)]
        record = lambda: not self.run_tests(task, sandboxes, solved=True, record=True).timed_out  # noqa: E731
        downloads.recorded(task.payload["place"], wanted, record)

    def _test_command(self, task: Task) -> str:
        return downloads.command_with_downloads(task.payload["place"], self.test_command(task))

    def _test_sandbox(
        self, task: Task, sandboxes: SandboxFactory, *, record: bool = False
    ) -> AbstractContextManager[Sandbox]:
        files = self.workspace(task, self.roles(task)[0])
        prepare = f"{self.hides_from_code}; {places.FORGET_HISTORY}"
        return places.test_sandbox(task.payload["place"], sandboxes, files, record=record, prepare=prepare)


def make_task(
    suite: str,
    task_id: str,
    repo: str,
    instruction: str,
    chosen: Mapping[str, Any],
    *,
    payload: Mapping[str, Any],
    place: Mapping[str, Any],
) -> Task:
    """Return a task whose content hash is independent of where this machine keeps its checkout."""
    held_out = repo in chosen["heldout_repos"] or task_id in chosen["heldout_tasks"]
    split = "heldout" if held_out else "train"
    identity = {key: place[key] for key in ("image", "workdir")}
    digest = json_hash([payload, instruction, identity, *downloads.identity(place)])
    return Task(task_id, suite, repo, split, instruction, {**payload, "place": dict(place)}, digest)


def read_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any] | str]]:
    """Yield ("file:row", the row, or the reason why it is unreadable) for a file, or for a folder's files in order.

    Raises FileNotFoundError if there is no file of rows, ValueError for any other suffix."""
    files = sorted(p for p in path.rglob("*") if p.suffix in _READERS) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise FileNotFoundError(f"{path}: no .jsonl, .json or .parquet file of rows")
    for file in files:
        if file.suffix not in _READERS:
            raise ValueError(f"{file}: rows are read from .jsonl, .json and .parquet")
        for number, row in enumerate(_READERS[file.suffix](file), 1):
            yield f"{file.name}:{number}", row


def _jsonl(file: Path) -> Iterable[Mapping[str, Any] | str]:
    with file.open(encoding="utf-8", errors="replace") as lines:
        yield from (_row(line) for line in lines if line.strip())


def _row(text: str) -> Mapping[str, Any] | str:
    try:
        row = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    return row if isinstance(row, dict) else "no JSON object"


def _json(file: Path) -> Iterable[Mapping[str, Any] | str]:
    rows = json.loads(file.read_text(encoding="utf-8"))
    rows = list(rows.values()) if isinstance(rows, dict) else rows
    yield from (row if isinstance(row, dict) else "no JSON object" for row in rows)


def _parquet(file: Path) -> Iterable[Mapping[str, Any] | str]:
    for batch in pq.ParquetFile(file).iter_batches(64):
        yield from batch.to_pylist()


_READERS = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet}
