"""Mutation testing: sampled mutants of etpi's code that no quick test may survive (`make mutate`).

A pytest plugin. Test modules are collected once; each mutant is then a fork of that process in which one function has
the mutated code, and which runs the quick tests of the function's module until one fails. Covered are bodies of
functions; module constants, and code that only runs in other processes, are not. `bench/mutants.json` has every
sampled mutant with the test that killed it, or with the reason why it is equivalent to the code.
"""

from __future__ import annotations

import ast
import atexit
import gc
import hashlib
import json
import math
import os
import re
import resource
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from heapq import heappop, heappush
from pathlib import Path
from types import CodeType, FunctionType

import pytest

from etpi_lab.pypi_bugs.mutations import Mutation, mutations

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "bench" / "mutants.json"
FOLDERS = [f"etpi_assets/{name}" for name in ("curation", "planning", "scoring", "tasks", "trajectories")]
FOLDERS += [f"etpi_resources/{name}" for name in ("chat", "lake", "trainers")]
ELSEWHERE = re.compile(
    r"chat/template_worker|tasks/pytest_recorder|answers/equality|trainers/(interpreter|policy_servers|trackers)|workers/(?!collate"
    r"|influence|label_head|plan|sample_trees|states|tree_attention)"
)
"""Modules that run in processes of their own, or that are tested by training."""
PACKAGES = ("etpi", "etpi_assets", "etpi_resources", "tests")
MOST_TESTS, FIRST_TESTS = 100, 12
"""Names of tests that are tried for each mutant, and of those whose files are collected for it."""
LONGEST = 10
"""CPU seconds of tests after which a mutant has survived, or a third of the seconds that pass, since sandboxes take CPU
time too; one that runs ten times as long, in a loop, is killed."""


@dataclass(frozen=True)
class Mutant:
    """A mutant, as the table names it. `tests` counts the tests that ran; `equivalent` is a reviewer's reason."""

    module: str
    function: str
    line: int
    text: str
    was: str
    becomes: str
    killed_by: str = ""
    equivalent: str = ""
    tests: int = 0

    @property
    def key(self) -> tuple[str, ...]:
        return self.module, self.function, self.text, self.was, self.becomes


PENDING: list[tuple[Mutant, str, list[str]]] = []
"""Mutants to run: mutant, mutated source, names of tests."""
DONE: dict[tuple[str, ...], Mutant] = {}
SOUND: set[str] = set()
UNSOUND: set[str] = set()
"""Tests that failed with a mutant and pass without, and those that fail without, as some do under load."""


def all_mutants() -> dict[tuple[str, ...], tuple[Mutant, Mutation]]:
    """Return every mutant by its key, in an order by hash that edits elsewhere keep."""
    everything: dict[tuple[str, ...], tuple[Mutant, Mutation]] = {}
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        module = str(path.relative_to(ROOT))
        if ELSEWHERE.search(module):
            continue
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        for change in [*mutations(source), *_dropped_calls(source)]:
            was, text = source.encode()[change.start : change.end].decode(), lines[change.line - 1].strip()
            mutant = Mutant(module, change.function, change.line, text, was, change.replacement)
            everything.setdefault(mutant.key, (mutant, change))
    order = sorted(everything, key=lambda key: hashlib.sha256("\0".join(key).encode()).digest())
    return {key: everything[key] for key in order}


def _dropped_calls(source: str) -> Iterator[Mutation]:
    """Yield a mutation for each statement of a function that is a call, without it."""
    ends = [0]
    for line in source.splitlines(keepends=True):
        ends.append(ends[-1] + len(line.encode()))
    for function in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(function):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.end_lineno:
                span = ends[node.lineno - 1] + node.col_offset, ends[node.end_lineno - 1] + (node.end_col_offset or 0)
                yield Mutation("call", function.name, node.lineno, *span, "None")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutants", type=int, default=200)
    parser.addoption("--again", default="-", help="run mutants of MODULE:FUNCTION again that match this expression")


def pytest_configure(config: pytest.Config) -> None:
    """Sample the mutants, and collect only the files of the tests that reach one."""
    again = re.compile(str(config.getoption("--again")))
    known = json.loads(TABLE.read_text())["mutants"] if TABLE.exists() else []
    rows = [Mutant(**row) for row in known]
    decided = [row for row in rows if row.killed_by or row.equivalent]
    done = {row.key: row for row in decided if not again.search(f"{row.module}:{row.function}")}
    mutants, callers = all_mutants(), Callers()
    DONE.update((key, replace(row, line=mutants[key][0].line)) for key, row in done.items() if key in mutants)
    for key, (mutant, change) in list(mutants.items())[: config.getoption("--mutants")]:
        if key not in DONE:
            source = change.apply((ROOT / mutant.module).read_text(encoding="utf-8"))
            PENDING.append((mutant, source, callers.tests(mutant)))
    files = {path for _, _, names in PENDING for name in names[:FIRST_TESTS] for path in callers.files[name]}
    config.args = sorted(map(str, files))
    print(f"{len(PENDING)} mutants, {len(files)} files of tests", flush=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Run each mutant that the table does not answer for; fail if one survives that is not equivalent."""
    functions = _functions()
    gc.freeze()
    for mutant, source, names in PENDING:
        order = {name: at for at, name in enumerate(names)}
        items = [item for item in session.items if isinstance(item, pytest.Function) and item.originalname in order]
        DONE[mutant.key] = _run(
            mutant, source, session, sorted(items, key=lambda item: order[item.originalname]), functions
        )
        rows = [asdict(row) for row in sorted(DONE.values(), key=lambda row: (row.module, row.line, row.becomes))]
        TABLE.write_text(json.dumps({"mutants": rows}, indent=1) + "\n")
    survivors = [row for row in DONE.values() if not (row.killed_by or row.equivalent)]
    for row in survivors:
        print(f"SURVIVED {row.module}:{row.line} {row.function}: {row.was} -> {row.becomes}")
    session.testsfailed = len(survivors)
    return True


Functions = dict[tuple[str, int, str], list[FunctionType]]


def _functions() -> Functions:
    """Return loaded functions by file, first line and name."""
    loaded: Functions = {}
    for thing in gc.get_objects():
        if type(thing) is FunctionType:
            code = thing.__code__
            loaded.setdefault((code.co_filename, code.co_firstlineno, code.co_qualname), []).append(thing)
    return loaded


def _run(
    mutant: Mutant, source: str, session: pytest.Session, items: list[pytest.Function], functions: Functions
) -> Mutant:
    """Run the tests of a mutant in a fork; return it with the test that failed."""
    path = ROOT / mutant.module
    before, after = (compile(text, str(path), "exec") for text in (path.read_text(), source))
    changed = _changed(before, after)
    live = functions.get((str(path), changed.co_firstlineno, changed.co_qualname), []) if changed else []
    if not live or not changed:
        return replace(mutant, killed_by="" if changed else "equal bytecode")
    items = [item for item in items if item.nodeid not in UNSOUND]
    killed_by, tests = _in_fork(items, session, live, changed)
    while killers := [item for item in items if item.nodeid == killed_by and killed_by not in SOUND]:
        if not _in_fork(killers, session, [], changed)[0]:
            SOUND.add(killed_by)
            break
        UNSOUND.add(killed_by)
        print(f"fails without a mutation: {killed_by}", flush=True)
        items = items[items.index(killers[0]) + 1 :]  # those before it passed
        killed_by, further = _in_fork(items, session, live, changed)
        tests += further
    where = f"{mutant.module}:{mutant.line} {mutant.function}: {mutant.was!r} -> {mutant.becomes!r}"
    print(f"{killed_by or 'SURVIVED'} | {where} | {tests} tests", flush=True)
    return replace(mutant, killed_by=killed_by, tests=tests)


def _in_fork(
    items: list[pytest.Function], session: pytest.Session, live: list[FunctionType], code: CodeType
) -> tuple[str, int]:
    """Return `_first_failure` of a fork in which the functions have the code."""
    results, answer = os.pipe()
    if not (child := os.fork()):
        try:
            os.setsid()
            for function in live:
                function.__code__ = code
            os.write(answer, json.dumps(_first_failure(items, session)).encode())
            atexit._run_exitfuncs()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(answer)
    _, status = os.waitpid(child, 0)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    text = os.read(results, 10_000).decode()
    os.close(results)
    if not text and not os.WIFSIGNALED(status):
        raise RuntimeError(f"tests did not run: {[item.nodeid for item in items]}")
    killed_by, tests = json.loads(text) if text else ("the process died, or ran too long", 0)
    return killed_by, tests


def _changed(before: CodeType, after: CodeType) -> CodeType | None:
    """Return the mutated code of the outermost function that differs."""
    for old, new in zip(before.co_consts, after.co_consts, strict=False):
        if isinstance(old, CodeType) and old != new:
            is_class = not old.co_flags & 2  # CO_NEWLOCALS: a function
            return _changed(old, new) if is_class else new
    return None


class Callers:
    """Which names the functions of the packages and of the tests mention: the way from a function to its tests."""

    def __init__(self) -> None:
        self._callers: dict[str, set[str]] = {}
        self.files: dict[str, set[Path]] = {}
        """The files of each test's name."""
        self.texts: dict[Path, str] = {}
        for path in sorted(path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if path.name.startswith("test_"):
                self.texts[path] = text
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    self._add(node, path)

    def _add(self, caller: ast.FunctionDef | ast.ClassDef, path: Path) -> None:
        if caller.name.startswith("test_"):
            self.files.setdefault(caller.name, set()).add(path)
        for node in ast.walk(caller):
            for field in ("id", "attr", "arg", "name"):  # a name, an attribute, a fixture, a definition
                if isinstance(name := getattr(node, field, None), str) and name != caller.name:
                    self._callers.setdefault(name, set()).add(caller.name)

    def tests(self, mutant: Mutant) -> list[str]:
        """Return names of tests: of the file with the module's name, of those that import it, of its folder, others.

        Of each, those with the shortest way come first; its steps are the longer the more functions mention the name.
        """
        costs, waiting = {mutant.function: 0.0}, [(0.0, mutant.function)]
        while waiting:
            cost, name = heappop(waiting)
            callers = self._callers.get(name, set()) if cost == costs[name] else set()
            further = cost + math.log2(1 + len(callers))
            for caller in callers:
                if further < costs.get(caller, math.inf):
                    costs[caller] = further
                    heappush(waiting, (further, caller))
        _, folder, *parts = mutant.module.removesuffix(".py").removesuffix("/__init__").split("/")
        package, name = ".".join([folder, *parts[:-1]]), parts[-1]
        imports = re.compile(rf"\b{package}\.{name}\b|\b{package} import .*\b{name}\b")
        of_module = {path for path in self.texts if path.name == f"test_{name}.py"}
        importing = {path for path, text in self.texts.items() if imports.search(text)}
        of_folder = {path for path in self.texts if path.parent.name == folder}
        reached = (
            (*(not paths & near for near in (of_module, importing, of_folder)), costs.get(test, math.inf), test)
            for test, paths in self.files.items()
            if test in costs or paths & (of_module | importing | of_folder)
        )
        return [test for *_, test in sorted(reached)][:MOST_TESTS]


def _first_failure(items: Sequence[pytest.Item], session: pytest.Session) -> tuple[str, int]:
    """Run tests until one fails or time is up; return its name, or an empty one, and the number of tests."""
    resource.setrlimit(resource.RLIMIT_CPU, (10 * LONGEST, resource.RLIM_INFINITY))
    failed: list[str] = []

    class Failures:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                failed.append(report.nodeid)

    session.config.pluginmanager.unregister(name="terminalreporter")
    session.config.pluginmanager.register(Failures())
    count, start = 0, time.monotonic()
    for count, item in enumerate(items, 1):
        seconds = max(time.process_time(), (time.monotonic() - start) / 3)
        last = seconds > LONGEST or item is items[-1]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None if last else items[count])
        if failed or last:
            break
    session._setupstate.teardown_exact(None)
    return (failed[0] if failed else ""), count
