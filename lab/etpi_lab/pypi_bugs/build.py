"""Build the rows of `pypi_bugs`: try mutations of real packages and keep those that break a test.

`etpi lab pypi-bugs FOLDER` writes FOLDER/rows.jsonl and FOLDER/tools, and keeps downloads in FOLDER/sdists. It does
nothing if the folder already holds the result of the same request. Tests run only in the sandbox.
"""

from __future__ import annotations

import json
import random
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from etpi.sandbox_python import make_tools
from etpi_assets.planning.versions import digest
from etpi_assets.tasks.frozen import TEST_FILE
from etpi_assets.tasks.reports import Outcomes, plain
from etpi_lab.pypi_bugs.mutations import Mutation, mutations
from etpi_lab.pypi_bugs.packages import PackageFiles, PinnedPackage, fetch, read
from etpi_resources.hashes import json_hash
from etpi_resources.sandboxes import CommandResult, Environment, Limits, SandboxFactory

ORIGINAL_RUNS = 3
"""Runs of the original package; their outcomes must be equal, or the package is skipped."""

PER_PACKAGE = 20
TRIES = 4
"""Mutations tried, at most, for each wanted bug."""

SLOWER = 5
"""Time limit of a bug's tests: 10 s plus this many times the original package's time."""

LIMITS = Limits(command_seconds=600.0, memory_bytes=1 << 30, processes=256, output_bytes=4 << 20)
_SHOWN_LINES = 30
_PYTEST = re.compile(r"(PASSED|FAILED|ERROR|XFAIL|XPASS)\s+(\S.*)")


def test_command(roots: Sequence[str], tests: Sequence[str], *flags: str) -> str:
    """Return the command that runs a package's tests from its root, without the project's pytest settings."""
    settings = ["-c", "/dev/null", "--rootdir", ".", "-p", "no:cacheprovider"]
    words = ["python3", "-m", "pytest", *settings, "-rA", *flags, *tests]
    return f"PYTHONPATH={shlex.quote(':'.join(roots))} {shlex.join(words)}"


def build(
    folder: Path,
    sandboxes: SandboxFactory,
    packages: Sequence[PinnedPackage],
    *,
    per_package: int = PER_PACKAGE,
    seed: int = 0,
    workers: int = 2,
    echo: Callable[[str], None] = print,
) -> Path:
    """Write the suite's rows, unless the same request has already written them.

    Returns the file of rows. Raises SuiteBuildError as `packages.fetch` and `read` do, and PytestMissing.
    """
    folder = folder.resolve()
    rows, key_file, key = folder / "rows.jsonl", folder / "built.json", _key(packages, per_package, seed)
    if rows.is_file() and key_file.is_file() and json.loads(key_file.read_text())["key"] == key:
        echo(f"{rows}: built before, nothing to do")
        return rows
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    sdists, tools = fetch(packages, folder / "sdists"), make_tools(folder / "tools")

    def build_package(package: PinnedPackage) -> tuple[list[dict[str, Any]], str]:
        began = time.monotonic()
        bug_rows, summary = bugs(package, read(package, sdists[package.name]), tools, sandboxes, per_package, seed)
        return bug_rows, f"{package.name} {package.version}: {summary}, {time.monotonic() - began:.0f} s"

    written: list[dict[str, Any]] = []
    with ThreadPoolExecutor(workers) as pool:
        for package_rows, summary in pool.map(build_package, packages):
            echo(summary)
            written += package_rows
    beside = rows.with_suffix(".new")
    beside.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in written), encoding="utf-8")
    beside.replace(rows)
    key_file.write_text(json.dumps({"key": key, "rows": len(written)}))
    return rows


def bugs(
    package: PinnedPackage, sources: PackageFiles, tools: Path, sandboxes: SandboxFactory, wanted: int, seed: int
) -> tuple[list[dict[str, Any]], str]:
    """Return (rows of bugs that break a test, at most `wanted` and one a source line; a summary for the log).

    No rows if the original package's outcomes differ between runs, or none of its tests passes.
    """
    environment = Environment(tools=(tools,))
    files = {**sources.code, **sources.tests}
    with sandboxes.create(files, LIMITS, environment) as sandbox:
        command = test_command(package.roots, package.tests)
        done = [sandbox.run(command) for _ in range(ORIGINAL_RUNS)]
    runs = [pytest_outcomes(run.output) for run in done]
    expected, patience = runs[0], 10 + SLOWER * max(run.seconds for run in done)
    if any(run != expected for run in runs) or "PASSED" not in expected.values():
        return [], "left out, its own tests do not pass the same way each time"
    rows: list[dict[str, Any]] = []
    tried = 0
    with sandboxes.create(files, LIMITS, environment) as sandbox:
        command = test_command(package.roots, package.tests, "-x", "--tb=short")
        for path, mutation in _candidates(package, sources, seed):
            if len(rows) >= wanted or tried >= TRIES * wanted:
                break
            try:
                text = mutation.apply(sources.code[path])
            except SyntaxError:
                continue
            tried += 1
            sandbox.write_files({path: text})
            result = sandbox.run(command, timeout=patience)
            sandbox.write_files({path: sources.code[path]})
            if (broken := _broken(result, expected)) is not None:
                rows.append(
                    {
                        "repo": package.name,
                        "version": package.version,
                        "bug": f"{path}:{mutation.line}:{mutation.start}:{mutation.kind}",
                        "function": mutation.function,
                        "path": path,
                        "fixed": sources.code[path],
                        "files": {**sources.code, path: text},
                        "tests": dict(sources.tests),
                        "command": test_command(package.roots, package.tests),
                        "expected": expected,
                        "breaks": broken,
                        "issue": issue(broken, result.output),
                    }
                )
    return rows, f"{len(rows)} bugs of {tried} tried"


def issue(test: str, output: str) -> str:
    """Return the issue as a user would report it: the failing test and the runner's report of it."""
    name = test.split("::")[-1]
    shown: list[str] = []
    taken = False
    for line in output.splitlines():
        if line.startswith("=") and ("FAILURES" in line or "ERRORS" in line):
            taken = True
        elif line.startswith("=") and "short test summary" in line:
            break
        elif taken and not line.startswith(("_", "=", "!")):
            shown.append(line)
    body = "\n".join(shown[-_SHOWN_LINES:]).strip("\n")
    return f"`{name}` fails. It passed before, and the tests that pass now should go on passing.\n\n```\n{body}\n```"


def _candidates(package: PinnedPackage, sources: PackageFiles, seed: int) -> Iterator[tuple[str, Mutation]]:
    """Yield (path, mutation) in random order, at most one a source line; test files are excluded."""
    modules = [path for path in sorted(sources.code) if not TEST_FILE.search(path)]
    every = [(path, mutation) for path in modules for mutation in mutations(sources.code[path])]
    random.Random(f"{seed}/{package.name}/{package.version}").shuffle(every)
    seen: set[tuple[str, int]] = set()
    for path, mutation in every:
        if (path, mutation.line) not in seen:
            seen.add((path, mutation.line))
            yield path, mutation


def _broken(done: CommandResult, expected: Outcomes) -> str | None:
    """Return the first test that passed and now fails; None if there is none or the run is incomplete."""
    if done.timed_out or done.truncated:
        return None
    outcomes = pytest_outcomes(done.output)
    return next((t for t, o in outcomes.items() if o == "FAILED" and expected.get(t) == "PASSED"), None)


def pytest_outcomes(output: str) -> Outcomes:
    """Return the outcomes in the last short summary of `pytest -rA`, by node id; empty if there is no summary.

    The id keeps its parameters and loses the reason after ` - `. A failed test whose teardown errs is an ERROR."""
    head, _, summary = plain(output).rpartition("short test summary info")
    outcomes: Outcomes = {}
    if not head:
        return outcomes
    for line in summary.splitlines():
        if match := _PYTEST.match(line.strip()):
            word = {"XFAIL": "PASSED", "XPASS": "FAILED"}.get(match[1], match[1])
            outcomes[_name(match[2], match[1])] = word
    return outcomes


def _name(text: str, word: str) -> str:
    """Return the node id without the reason, which a passed test does not have; parameters may contain ` - `."""
    if word == "PASSED":
        return text.strip()
    bracket = text.find("[")
    at = text.find(" - ", text.find("]", bracket) if 0 <= bracket < text.find(" - ") else 0)
    return (text if at < 0 else text[:at]).strip()


def _key(packages: Sequence[PinnedPackage], per_package: int, seed: int) -> str:
    """Return a hash of all that the rows depend on: pins, numbers, and the code of `build`."""
    code = [digest(path) for path in sorted(Path(__file__).parent.glob("*.py"))]
    return json_hash([[vars(p) for p in packages], per_package, seed, code])
