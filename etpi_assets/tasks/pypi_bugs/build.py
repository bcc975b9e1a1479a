"""Building the suite: real packages, one bug each time, kept where a test of the package notices.

Belongs here: which bugs are tried and kept, the rows. Does not belong here: packages (`packages`), how a
bug is made (`mutations`), or what becomes of a row (`etpi_assets.tasks.pypi_bugs`).

`etpi pypi-bugs FOLDER` writes FOLDER/rows.jsonl and FOLDER/tools; what was downloaded
stays in FOLDER/sdists, and a folder that holds what would be made is left as it is. Tests run in the sandbox alone.
"""

from __future__ import annotations

import json
import random
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from etpi_assets.tasks.frozen import TEST_FILE
from etpi_assets.tasks.pypi_bugs.mutations import Mutation, mutations
from etpi_assets.tasks.pypi_bugs.packages import PackageFiles, PinnedPackage, fetch, make_tools, read
from etpi_assets.tasks.reports import Outcomes, pytest_outcomes
from etpi_assets.versioning.keys import definition_version
from etpi_resources.hashes import json_hash
from etpi_resources.sandboxes import CommandResult, Environment, Limits, SandboxFactory

ORIGINAL_RUNS = 3
"""The untouched package gives the same outcomes so many times, or none of its bugs are taken."""

PER_PACKAGE = 20
TRIES = 4
"""So many bugs are tried for each that is wanted."""

SLOWER = 5
"""A bug whose tests take so many times the untouched package's, and ten seconds more, hangs."""

LIMITS = Limits(command_seconds=600.0, memory_bytes=1 << 30, processes=256, output_bytes=4 << 20)
_SHOWN_LINES = 30


def test_command(roots: Sequence[str], tests: Sequence[str], *flags: str) -> str:
    """The command that runs a package's tests from its root, without the settings of its own project."""
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
    """Write the suite's rows, or leave them where the same request wrote them before.

    Returns the file of rows. Raises SuiteBuildError as `packages.fetch`, `read` and `make_tools` do.
    """
    folder = folder.resolve()
    rows, key_file, key = folder / "rows.jsonl", folder / "built.json", _key(packages, per_package, seed)
    if rows.is_file() and key_file.is_file() and json.loads(key_file.read_text())["key"] == key:
        echo(f"{rows}: built before, nothing to do")
        return rows
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    sdists, tools = fetch(packages, folder / "sdists"), make_tools(folder / "tools")

    def of(package: PinnedPackage) -> tuple[list[dict[str, Any]], str]:
        began = time.monotonic()
        found, told = bugs(package, read(package, sdists[package.name]), tools, sandboxes, per_package, seed)
        return found, f"{package.name} {package.version}: {told}, {time.monotonic() - began:.0f} s"

    made: list[dict[str, Any]] = []
    with ThreadPoolExecutor(workers) as pool:
        for found, told in pool.map(of, packages):
            echo(told)
            made += found
    beside = rows.with_suffix(".new")
    beside.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in made), encoding="utf-8")
    beside.replace(rows)
    key_file.write_text(json.dumps({"key": key, "rows": len(made)}))
    return rows


def bugs(
    package: PinnedPackage, sources: PackageFiles, tools: Path, sandboxes: SandboxFactory, wanted: int, seed: int
) -> tuple[list[dict[str, Any]], str]:
    """(rows of bugs that a test notices, at most `wanted` and one a line of source; how many were tried).

    None where the untouched package's outcomes differ from run to run, or where none of its tests passes.
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
            told = sandbox.run(command, timeout=patience)
            sandbox.write_files({path: sources.code[path]})
            if (broken := _broken(told, expected)) is not None:
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
                        "issue": issue(broken, told.output),
                    }
                )
    return rows, f"{len(rows)} bugs of {tried} tried"


def issue(test: str, output: str) -> str:
    """What a user would report: the failing check and what came of it, as the runner showed it."""
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
    """(path, mutation) in random order, no two in one line of a module; tests are no modules."""
    modules = [path for path in sorted(sources.code) if not TEST_FILE.search(path)]
    every = [(path, mutation) for path in modules for mutation in mutations(sources.code[path])]
    random.Random(f"{seed}/{package.name}/{package.version}").shuffle(every)
    seen: set[tuple[str, int]] = set()
    for path, mutation in every:
        if (path, mutation.line) not in seen:
            seen.add((path, mutation.line))
            yield path, mutation


def _broken(done: CommandResult, expected: Outcomes) -> str | None:
    """The first test that passed and now fails; None where none does, or the run hung, was cut or reports nothing."""
    if done.timed_out or done.truncated:
        return None
    found = pytest_outcomes(done.output)
    return next((t for t, o in found.items() if o == "FAILED" and expected.get(t) == "PASSED"), None)


def _key(packages: Sequence[PinnedPackage], per_package: int, seed: int) -> str:
    """What the rows depend on: pins, numbers, and the code that builds them."""
    code = definition_version("etpi_assets.tasks.pypi_bugs.build:build")
    return json_hash([[vars(p) for p in packages], per_package, seed, code])
