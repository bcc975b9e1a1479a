"""Tasks of real repositories with one agent and hidden tests: what R2E-Gym's and SWE-bench's kinds share.

Belongs here: reading rows, an agent's workspace, freezing its changes, the order of a verdict, and validity. Does not
belong here: a data set's fields and what outcome of its tests passes (`r2e`, `swe_bench`).

The verdict: what the agent left is read and its sandbox ended; its counted changes go into a fresh sandbox; only then
do the hidden tests come in. Edited tests, conftest files, settings of the test runner and the repository's own later
commits never reach it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from etpi_assets.specs.paths import expand
from etpi_assets.tasks import places
from etpi_assets.tasks.family import RejectedInput, Role, SandboxNeeds, Task, Verdict, with_defaults
from etpi_assets.tasks.frozen import Changes, counted_changes, put_changes
from etpi_assets.tasks.graded_run import disagreement, installed_plugins, run_graded
from etpi_assets.tasks.reports import pytest_outcomes
from etpi_resources.hashes import json_hash
from etpi_resources.sandboxes import EnvironmentUnavailable, Sandbox, SandboxFactory

PARAMS: Mapping[str, Any] = {
    **places.PARAMS,
    "sandbox": "docker",
    "path": None,
    "repos": (),
    "heldout_repos": (),
    "rows": None,
}
"""Besides those of `places`. path: the rows, a .jsonl, .json or .parquet file, or a folder of them. repos: only these.
heldout_repos: of the split heldout, all others of train. rows: the first so many alone."""

REFERENCE_RUNS = 3


class RepositoryFamily(ABC):
    """A family of such tasks; a subclass says what its rows mean."""

    invents_names = False
    params: Mapping[str, Any] = PARAMS
    name: str
    hides: str
    """A bash command that removes hidden tests from an agent's workspace."""

    @abstractmethod
    def read(self, suite: str, row: Mapping[str, Any], chosen: Mapping[str, Any]) -> Task:
        """The task of a row. KeyError, TypeError and ValueError refuse it."""

    @abstractmethod
    def put_tests(self, task: Task, sandbox: Sandbox) -> None:
        """Write the hidden tests into a workspace."""

    @abstractmethod
    def test_command(self, task: Task) -> str: ...

    @abstractmethod
    def hidden_tests(self, task: Task, sandbox: Sandbox) -> Mapping[str, str]:
        """The hidden test files (path -> text), once they are in the sandbox."""

    def roots(self, task: Task) -> Sequence[str]:
        """Folders of the workspace, beside itself, that the code under test is imported from."""
        return ()

    def runs_pytest(self, task: Task) -> bool:
        """Whether `test_command` runs pytest; other runners are judged by what they print."""
        return True

    @abstractmethod
    def passes(self, task: Task, output: str) -> tuple[bool, Mapping[str, Any]]:
        """Whether the tests' output is what the task wants, and what of it a person would look at."""

    @abstractmethod
    def solution(self, task: Task, sandbox: Sandbox) -> None:
        """Bring the reference solution into a workspace, tests excepted."""

    def load(self, suite: str, seed: int, params: Mapping[str, Any]) -> Iterator[Task | RejectedInput]:
        """A task or a refusal a row, in the rows' order. `seed` draws nothing.

        Raises:
            ValueError: unknown params, or no path. FileNotFoundError: no rows at the path.
        """
        chosen = with_defaults(suite, self.name, params, self.params)
        if not chosen["path"]:
            raise ValueError(f"suite {suite}: params.path has to name the data set's rows (.jsonl, .json, .parquet)")
        seen: dict[str, str] = {}
        taken = 0
        for source, row in read_rows(expand(str(chosen["path"]))):
            if chosen["rows"] is not None and taken >= chosen["rows"]:
                return
            if isinstance(row, str):
                yield RejectedInput(source, "unreadable_row", row)
                continue
            try:
                task = self.read(suite, row, chosen)
            except (KeyError, TypeError, ValueError, IndexError) as error:
                detail = f"no field {error}" if isinstance(error, KeyError) else str(error)
                yield RejectedInput(source, "unreadable_row", detail)
                continue
            if chosen["repos"] and task.repo not in chosen["repos"]:
                continue
            taken += 1
            if task.task_id in seen:
                yield RejectedInput(source, "repeated_task", f"{task.task_id} is at {seen[task.task_id]} already")
                continue
            seen[task.task_id] = source
            yield task

    def sandbox(self, params: Mapping[str, Any]) -> str | None:
        return {**self.params, **params}["sandbox"]

    def needs(self, task: Task) -> SandboxNeeds:
        return places.needs(task.payload["place"], f"{self.hides}; {places.FORGET_HISTORY}")

    def roles(self, task: Task) -> Sequence[Role]:
        return [Role("agent1", "issue", task.instruction)]

    def workspace(self, task: Task, role: Role) -> dict[str, str]:
        return {}

    def entities(self, task: Task) -> Sequence[str]:
        return task.payload["entities"]

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        """passed (reward 1), failed_tests or no_patch (0); `details` has the paths changed, and what the tests said."""
        (left,) = final.values()
        with self._fresh(task, sandboxes) as sandbox:
            changes = counted_changes(sandbox.read_files(), left)
            if not changes:
                return Verdict(0.0, "no_patch", {"changed": []})
            passed, details = self._patched(task, changes, sandbox)
        details = {"changed": sorted(changes), **details}
        return Verdict(float(passed), "passed" if passed else "failed_tests", details)

    def validate(self, tasks: Sequence[Task], sandboxes: SandboxFactory) -> Iterator[RejectedInput | Task]:
        """Each task whose reference passes REFERENCE_RUNS times and whose untouched repository fails; else the refusal:
        no_environment, no_reference, reference_fails or null_passes."""
        for task in tasks:
            yield self._proven(task, sandboxes) or task

    def _proven(self, task: Task, sandboxes: SandboxFactory) -> RejectedInput | None:
        try:
            with self._fresh(task, sandboxes) as sandbox:
                before = sandbox.read_files()
                self.solution(task, sandbox)
                changes = counted_changes(before, sandbox.read_files())
            if not changes:
                return RejectedInput(task.task_id, "no_reference", "the reference solution changes no file that counts")
            for run in range(REFERENCE_RUNS):
                passed, details = self._try(task, changes, sandboxes)
                if not passed:
                    detail = f"run {run + 1} of {REFERENCE_RUNS}: {json.dumps(details)[:1500]}"
                    return RejectedInput(task.task_id, "reference_fails", detail)
            if self._try(task, {}, sandboxes)[0]:
                return RejectedInput(task.task_id, "null_passes", "the tests pass without any change")
        except EnvironmentUnavailable as error:
            return RejectedInput(task.task_id, "no_environment", str(error))
        except (OSError, ValueError) as error:
            return RejectedInput(task.task_id, "no_reference", str(error))
        return None

    def _try(self, task: Task, changes: Changes, sandboxes: SandboxFactory) -> tuple[bool, Mapping[str, Any]]:
        with self._fresh(task, sandboxes) as sandbox:
            return self._patched(task, changes, sandbox)

    def _patched(self, task: Task, changes: Changes, sandbox: Sandbox) -> tuple[bool, Mapping[str, Any]]:
        """Whether the changes pass the hidden tests in a fresh sandbox, and the details."""
        plugins = installed_plugins(sandbox)  # before the patch is there
        put_changes(sandbox, changes)
        self.put_tests(task, sandbox)
        if not self.runs_pytest(task):
            done = sandbox.run(self.test_command(task))
            problem = None
        else:
            tests, roots = self.hidden_tests(task, sandbox), self.roots(task)
            done = run_graded(sandbox, self.test_command(task), tests=tests, roots=roots, plugins=plugins)
            listed = (name for name, outcome in pytest_outcomes(done.output).items() if outcome == "PASSED")
            problem = done.problem or disagreement(done, listed)
        passed, details = self.passes(task, done.output)
        passed = passed and problem is None
        tail = {} if passed else {"exit_code": done.exit_code, "output": done.output[-2000:]}
        return passed, {**details, **({} if problem is None else {"not_believed": problem}), **tail}

    def _fresh(self, task: Task, sandboxes: SandboxFactory) -> Sandbox:
        limits, environment = places.test_needs(task.payload["place"])
        return sandboxes.create(self.workspace(task, self.roles(task)[0]), limits, environment)


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
    """A task whose content hash covers what it is, and not where this machine keeps its checkout."""
    split = "heldout" if repo in chosen["heldout_repos"] else "train"
    identity = {key: place[key] for key in ("image", "workdir")}
    digest = json_hash([payload, instruction, identity])
    return Task(task_id, suite, repo, split, instruction, {**payload, "place": dict(place)}, digest)


def read_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any] | str]]:
    """(file:row, the row as a mapping, or why it cannot be read) of a file, or of a folder's files in order.

    Raises FileNotFoundError where there is no such file, ValueError for a file that is no table of rows."""
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
