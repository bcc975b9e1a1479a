"""Make tasks from the history of a git repository: commits that change code and, with it, tests that failed before.

A task is a row of SWE-bench's form. Its tests run in a sandbox before and after the commit, and the judge proves it. A
checkout holds one commit without history, because later commits contain the solution.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etpi.run.console import say
from etpi.sandbox_python import PYTHON, make_tools
from etpi_assets.specs.load import SpecError
from etpi_assets.tasks.calibration import TestRun
from etpi_assets.tasks.family import Rejected, Task
from etpi_assets.tasks.frozen import METADATA_FILE, RUNNER_FILE, TEST_FILE
from etpi_assets.tasks.proof import read_tests
from etpi_assets.tasks.swe_bench import FAMILY, WORKDIR
from etpi_resources.process.progress import Progress
from etpi_resources.sandboxes import EnvironmentUnavailable, SandboxFactory

MAX_CHANGED = 20
"""A commit that changes more files than this is rarely one task."""
_SHOWN = 600
_IDENTITY = ("-c", "user.name=etpi", "-c", "user.email=etpi@localhost")
_DATE = "2000-01-01T00:00:00Z"
_LOOK = "import json, sys, sysconfig; print(json.dumps([sys.version_info[:2], sysconfig.get_paths()['purelib']]))"


_OFF = ("safe.directory=*", "core.fsmonitor=", "core.hooksPath=/dev/null", "log.showSignature=false")
_SECONDS = 20
"""The time that git has to read a foreign repository's configuration and references."""


def git(folder: Path, *words: str, seconds: float | None = None, **variables: str) -> bytes:
    """Run git in a folder without the configuration of the user and of the machine; return what it prints.

    Raises subprocess.CalledProcessError: it fails, or runs for more than `seconds`.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_NO_LAZY_FETCH": "1", **variables}
    command = ["git", *(word for setting in _OFF for word in ("-c", setting)), "-C", str(folder), *words]
    try:
        return subprocess.run(command, check=True, capture_output=True, env=environment, timeout=seconds).stdout
    except subprocess.TimeoutExpired as error:
        reason = f"git {words[0]} takes longer than {seconds} s; a file of .git may be a pipe"
        raise subprocess.CalledProcessError(124, command, stderr=reason.encode()) from error


@contextmanager
def objects_of(repository: Path) -> Iterator[Path]:
    """Yield a bare repository, with no configuration but git's own, that has a repository's objects and its HEAD.

    Raises subprocess.CalledProcessError: it is no repository, or has no commit.
    """

    def ask(*words: str) -> str:
        line = ("rev-parse", "--path-format=absolute", *words)
        return git(repository, *line, seconds=_SECONDS).decode().rstrip("\n")

    head, kind = ask("--verify", "HEAD^{commit}"), ask("--show-object-format")
    with tempfile.TemporaryDirectory(prefix="etpi-git-") as name:
        folder = Path(name)
        git(folder, "init", "-q", "--bare", "--template=", f"--object-format={kind}")
        (folder / "objects" / "info" / "alternates").write_text(f"{ask('--git-path', 'objects')}\n")
        if (shallow := Path(ask("--git-path", "shallow"))).is_file():
            shutil.copyfile(shallow, folder / "shallow")
        (folder / "HEAD").write_text(f"{head}\n")
        yield folder


@dataclass(frozen=True)
class Candidate:
    """A commit whose tests may prove it: its hash, parent and time, its message, and the two halves of its diff."""

    commit: str
    base: str
    created_at: str
    message: str
    patch: str
    test_patch: str


@dataclass
class MinedTasks:
    """The commits by outcome: tasks, refused and skipped ones.

    Attributes:
        rows: rows of SWE-bench's form, oldest first.
        passed_over: why commits are no candidates -> number.
        refused: why candidates became no task -> their commits.
        looked: number of commits.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    passed_over: Counter[str] = field(default_factory=Counter)
    refused: dict[str, list[str]] = field(default_factory=dict)
    looked: int = 0


def mine(repository: Path, folder: Path, python: str | None, commits: int, sandboxes: SandboxFactory) -> MinedTasks:
    """Make tasks of the newest commits, and write their checkouts and interpreter into `folder`.

    Args:
        folder: gets `checkouts/<task>/repo` and `checkouts/tools`.
        python: an interpreter whose installed packages the tests need; None: pytest alone.
        commits: the number of commits to look at.

    Raises SpecError: it has no commits, the interpreter does not fit the sandbox's, or no test can run.
    """
    try:
        with objects_of(repository) as objects:
            mined = _mine(objects, repository, folder, python, commits, sandboxes)
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode(errors="replace").strip()
        raise SpecError(f"{repository}: git fails: {reason}") from error
    return mined


def _mine(
    objects: Path, repository: Path, folder: Path, python: str | None, commits: int, sandboxes: SandboxFactory
) -> MinedTasks:
    mined = MinedTasks()
    candidates = []
    for item in _candidates(objects, commits):
        mined.looked += 1
        if isinstance(item, Candidate):
            candidates.append(item)
        else:
            mined.passed_over[item] += 1
    roots = ["src"] if any((repository / "src").glob("*/__init__.py")) else []
    _tools(folder / "checkouts" / "tools", python, roots)
    progress = Progress(f"{repository}", "commits tested", len(candidates), say)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        judged = threads.map(lambda c: _row(c, objects, repository, folder, roots, sandboxes), reversed(candidates))
        for candidate, row in zip(reversed(candidates), judged, strict=True):
            progress.advance()
            if isinstance(row, str):
                reason, _, detail = row.partition(": ")
                mined.refused.setdefault(reason, []).append(f"{candidate.commit[:10]} {detail}".strip())
                shutil.rmtree(_checkout(folder, repository, candidate), ignore_errors=True)
            else:
                mined.rows.append(row)
    assert mined.looked == sum(mined.passed_over.values()) + len(mined.rows) + sum(map(len, mined.refused.values()))
    return mined


def _candidates(objects: Path, commits: int) -> Iterator[Candidate | str]:
    """Yield each of the newest commits of the current branch as a candidate, or the reason why it is none."""
    listed = _text(objects, "log", "--first-parent", f"--max-count={commits}", "--format=%H %cI %P")
    for line in listed.splitlines():
        commit, created_at, *parents = line.split()
        if len(parents) != 1:
            yield "no single parent"
            continue
        names = _text(objects, "diff", "--name-only", "--no-renames", "-z", parents[0], commit).split("\0")
        changed = [name for name in names if name]
        tests = [name for name in changed if TEST_FILE.search(name) or RUNNER_FILE.search(name)]
        code = [name for name in changed if name not in tests and not METADATA_FILE.search(name)]
        if not any(name.endswith(".py") and TEST_FILE.search(name) for name in tests):
            yield "no test file changes"
        elif not any(name.endswith(".py") for name in code):
            yield "no code changes"
        elif len(changed) > MAX_CHANGED:
            yield f"more than {MAX_CHANGED} files change"
        elif not (message := _text(objects, "log", "-1", "--format=%B", commit).strip()):
            yield "no message, which would be the task's text"
        else:
            diff = ("diff", "--no-renames", "--no-color", "--no-ext-diff", "--no-textconv", parents[0], commit, "--")
            patch, test_patch = _text(objects, *diff, *code), _text(objects, *diff, *tests)
            yield Candidate(commit, parents[0], created_at, message, patch, test_patch)


def _row(
    candidate: Candidate, objects: Path, repository: Path, folder: Path, roots: Sequence[str], sandboxes: SandboxFactory
) -> dict[str, Any] | str:
    """Return the candidate's row, or "reason: detail" if its tests do not prove it."""
    checkout = _checkout(folder, repository, candidate)
    try:
        _snapshot(objects, candidate.base, checkout / "repo")
    except subprocess.CalledProcessError as error:
        return f"its files cannot be written: {error.stderr!r}"
    row = {
        "instance_id": checkout.name,
        "repo": repository.name,
        "base_commit": candidate.base,
        "commit": candidate.commit,
        "created_at": candidate.created_at,
        "problem_statement": candidate.message,
        "patch": candidate.patch,
        "test_patch": candidate.test_patch,
        "FAIL_TO_PASS": ["unknown yet"],
        "PASS_TO_PASS": [],
        **({"roots": list(roots)} if roots else {}),
    }
    chosen = {**FAMILY.params, "sandbox": "bubblewrap", "checkouts": str(folder / "checkouts")}
    task = FAMILY.read("mined", row, chosen)
    try:
        before = _passed(task, sandboxes, solved=False)
        runs = [_passed(task, sandboxes, solved=True) for _ in range(2)]
    except (OSError, EnvironmentUnavailable, Rejected) as error:
        return f"the tests cannot be run: {error}"
    after = runs[0][0] & runs[1][0]
    if not after:
        return f"no test passes with the commit: {runs[0][1][-_SHOWN:]!r}"
    if not after - before[0]:
        return "no test failed before and passes after"
    row |= {"FAIL_TO_PASS": sorted(after - before[0]), "PASS_TO_PASS": sorted(after & before[0])}
    (proved,) = FAMILY.validate([FAMILY.read("mined", row, chosen)], sandboxes)
    return row if isinstance(proved, Task) else f"{proved.reason}: {proved.detail[:_SHOWN]}"


def _passed(task: Task, sandboxes: SandboxFactory, *, solved: bool) -> tuple[set[str], str]:
    """Return the tests that pass, and the whole output."""
    (trial,) = FAMILY.trials(task)
    work = trial.reference(sandboxes) if solved else trial.nothing
    run = trial.run(work, read_tests(trial, sandboxes), sandboxes, recorded=True)
    return {name for name, outcome in TestRun(run).outcomes().items() if outcome == "PASSED"}, run.output


def _checkout(folder: Path, repository: Path, candidate: Candidate) -> Path:
    return folder / "checkouts" / f"{repository.name}-{candidate.commit[:12]}"


def _snapshot(objects: Path, commit: str, to: Path) -> None:
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    subprocess.run(["tar", "-x", "-C", str(to)], input=git(objects, "archive", commit), check=True)
    git(to, "init", "-q", "--template=")
    git(to, "add", "-A", "-f")
    words = ("commit", "-q", "--no-verify", "--allow-empty", "-m", "base", f"--date={_DATE}")
    git(to, *_IDENTITY, *words, GIT_COMMITTER_DATE=_DATE)
    subprocess.run(["chmod", "-R", "a+rX", str(to.parent)], check=True)


def _tools(folder: Path, python: str | None, roots: Sequence[str]) -> None:
    """Make the folder of the tests' interpreter.

    Raises SpecError: `python` cannot be run, has another version than the sandbox's interpreter, or no pytest.
    """
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier look with another interpreter
    folder.parent.mkdir(parents=True, exist_ok=True)
    inside = [f"{WORKDIR}/{root}" for root in roots]
    if python is None:
        make_tools(folder, roots=inside)
        return
    version, packages = _look(python)
    inside_version, _ = _look(PYTHON)
    if version != inside_version:
        raise SpecError(
            f"--python {python} is Python {'.'.join(map(str, version))}, and sandboxes run {PYTHON}, which is "
            f"{'.'.join(map(str, inside_version))}: make the environment with it ({PYTHON} -m venv ENVIRONMENT), or "
            "use Harbor tasks with an image"
        )
    if not (Path(packages) / "pytest").is_dir():
        raise SpecError(f"--python {python} has no pytest: install it there, with what the repository's tests import")
    make_tools(folder, Path(packages), inside)


def _look(python: str) -> tuple[list[int], str]:
    """Return the version of an interpreter and the folder of its packages."""
    try:
        done = subprocess.run([python, "-I", "-c", _LOOK], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SpecError(f"--python {python} cannot be run: {error}") from error
    return tuple(json.loads(done.stdout))  # pyright: ignore[reportReturnType]


def _text(objects: Path, *words: str) -> str:
    return git(objects, *words).decode(errors="replace")
