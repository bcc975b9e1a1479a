"""Run pytest in a sandbox so that the code under test cannot decide its results; docs/verdicts.md has the guarantees.

A run is trusted if the recorder's results carry a valid MAC, the canaries that must fail failed and the one that must
pass passed, no function of the test runner was replaced, every collected test ran, and the exit status agrees.
"""

from __future__ import annotations

import ast
import hashlib
import hmac
import json
import random
import secrets
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from etpi_resources.sandboxes import Sandbox

MAX_MUTATED = 3
"""Tests of one run, at most, that also run with a wrong expected value."""

_INBOX = ".etpi-grading"
_RECORDER = Path(__file__).with_name("pytest_recorder.py").read_text(encoding="utf-8")
_WORDS = ("anchor", "beacon", "cable", "deck", "ferry", "gauge", "hatch", "keel", "lantern", "mast", "oar", "pier")
_PYTHONS = "for p in .venv/bin/python python python3; do command -v $p > /dev/null && break; done"
_LIST_PLUGINS = (
    "import importlib.metadata as m; e = m.entry_points(); "
    "print(*sorted({p.name for p in (e.select(group='pytest11') if hasattr(e, 'select') else e.get('pytest11', ()))}), "
    "sep='\\n')"
)


@dataclass(frozen=True)
class GradedRun:
    """A run's output and exit status, the node ids that the recorder saw pass or xfail, and why the run is not trusted
    (None: it is)."""

    output: str
    exit_code: int
    passed: frozenset[str]
    xfailed: frozenset[str]
    problem: str | None


@dataclass(frozen=True)
class Canaries:
    """Tests that the judge adds to a run.

    Attributes:
        files: canary files outside of the tree, name -> text.
        mutated: copies of hidden tests with a wrong expected value, path -> text.
        selected: path of a copy -> the names of its mutated tests.
        fail: names that must fail.
        succeed: the name that must pass.
    """

    files: Mapping[str, str]
    mutated: Mapping[str, str]
    selected: Mapping[str, Sequence[str]]
    fail: frozenset[str]
    succeed: str


def installed_plugins(sandbox: Sandbox) -> list[str] | None:
    """Return the pytest plugins of an environment before any patch; None if they cannot be listed."""
    done = sandbox.run(f"{_PYTHONS}; $p -s -c {shlex.quote(_LIST_PLUGINS)}")
    return None if done.exit_code else done.output.split()


def run_graded(
    sandbox: Sandbox,
    command: str,
    *,
    tests: Mapping[str, str],
    roots: Sequence[str] = (),
    plugins: Sequence[str] | None = None,
) -> GradedRun:
    """Run a command that starts pytest, with the recorder and canaries.

    Args:
        tests: the hidden test files, path -> text; some are copied with a wrong expected value.
        roots: folders of the workspace that the code under test is imported from.
        plugins: the only pytest plugins to load; None: all that pytest discovers.

    Raises:
        OSError: the judge's files cannot be written to the sandbox.
    """
    key, recorder = secrets.token_hex(32), f"recorder_{secrets.token_hex(6)}"
    folder = f"/tmp/{secrets.token_hex(8)}"
    canaries = make_canaries(tests)
    workspace = sandbox.run("pwd -P").output.strip()
    mutated = {f"{workspace}/{path}": [text, canaries.selected[path]] for path, text in canaries.mutated.items()}
    plan = {"key": key, "roots": list(roots), "canaries": list(canaries.files), "mutated": mutated}
    files = {**canaries.files, f"{recorder}.py": _RECORDER, "plan.json": json.dumps(plan)}
    sandbox.write_files({f"{_INBOX}/{name}": text for name, text in files.items()})
    moved = sandbox.run(f"mkdir -m 700 {folder} && mv {_INBOX}/* {folder}/ && rmdir {_INBOX}")
    if moved.exit_code:
        raise OSError(f"the judge's files could not be put into its sandbox: {moved.output[-500:]}")
    options = " ".join(["-p", recorder, *(f"-p {shlex.quote(name)}" for name in plugins or ())])
    variables = {
        "PYTHONPATH": folder,
        "PYTHONSAFEPATH": "1",
        "PYTHONNOUSERSITE": "1",
        "PYTEST_ADDOPTS": options,
        **({} if plugins is None else {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}),
    }
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    done = sandbox.run(f"export {exports}; {command}")
    results = sandbox.run(f"for file in {folder}/results-*; do cat $file; echo; done; rm -rf {folder}").output
    records = list(_records(results, key))
    passed, xfailed = (frozenset(name for record in records for name in record[key]) for key in ("passed", "xfailed"))
    problem = _problem(records, canaries, done.exit_code)
    if problem is None and xfailed and not any("xfail" in text for text in tests.values()):
        problem = f"tests that expect no failure were expected to fail: {sorted(xfailed)[:5]}"
    return GradedRun(done.output, done.exit_code, passed, xfailed, problem)


def disagreement(run: GradedRun, printed: Iterable[str]) -> str | None:
    """Return a message if the output lists passed tests that the recorder did not see pass, else None."""
    listed, seen = ({_last(name) for name in names} for names in (printed, run.passed | run.xfailed))
    if listed - seen:
        return f"the output lists passed tests that did not pass: {sorted(listed - seen)[:5]}"
    return None


def make_canaries(tests: Mapping[str, str]) -> Canaries:
    """Build canaries with random names, and copies with a wrong value of tests that compare with a constant."""
    words = random.SystemRandom().sample(_WORDS, 4)
    tag = secrets.token_hex(2)
    file = f"test_{words[0]}_{words[1]}_{tag}.py"
    raises, asserts, method, passes = (f"test_{word}_{tag}" for word in words)
    text = (
        "import unittest\n\n\n"
        f"def {raises}():\n    raise ValueError({tag!r})\n\n\n"
        f"def {asserts}():\n    value = {tag!r}\n    assert value == value + 'x'\n\n\n"
        f"class Test{words[2].title()}(unittest.TestCase):\n"
        f"    def {method}(self):\n        self.assertEqual({tag!r}, 'x')\n\n\n"
        f"def {passes}():\n    assert {tag!r} == {tag!r}\n"
    )
    mutated: dict[str, str] = {}
    selected: dict[str, list[str]] = {}
    for path, source in sorted(tests.items()):
        wanted = MAX_MUTATED - sum(map(len, selected.values()))
        if wanted <= 0 or not path.endswith(".py"):
            continue
        mutated_source, names = wrong_values(source, wanted, tag)
        if names:
            name = str(PurePosixPath(path).with_name(f"{PurePosixPath(path).stem}_{words[3]}_{tag}.py"))
            mutated[name], selected[name] = mutated_source, names
    fail = {raises, asserts, method, *(name for names in selected.values() for name in names)}
    return Canaries({file: text}, mutated, selected, frozenset(fail), passes)


def wrong_values(source: str, most: int, tag: str) -> tuple[str, list[str]]:
    """Return (the test module with a wrong expected value in at most `most` of its tests, these tests' new names).

    Only undecorated tests that assert `call(...) == constant` outside of any block. The constant becomes a new
    `object()`, which equals only itself, so such a test cannot pass."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source, []
    names: list[str] = []
    for function in _tests(tree):
        if len(names) < most and not function.decorator_list and _mutate(function):
            function.name = f"{function.name}_{tag}"
            names.append(function.name)
    return ast.unparse(tree) + "\n", names


def test_names(source: str) -> list[str]:
    """Return the names of a module's tests: functions, and methods of classes."""
    try:
        return [function.name for function in _tests(ast.parse(source))]
    except SyntaxError:
        return []


def _tests(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.startswith("Test")]
    for scope in (tree, *classes):
        for node in scope.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                yield node


def _mutate(function: ast.FunctionDef) -> bool:
    for statement in function.body:
        if not isinstance(statement, ast.Assert) or not isinstance(statement.test, ast.Compare):
            continue
        compare = statement.test
        right = compare.comparators[-1]
        equality = len(compare.ops) == 1 and isinstance(compare.ops[0], ast.Eq)
        called = any(isinstance(node, ast.Call) for node in ast.walk(compare.left))
        if equality and called and isinstance(right, ast.Constant):
            compare.comparators[-1] = ast.Call(ast.Name("object"), [], [])
            return True
    return False


def _records(results: str, key: str) -> Iterable[Mapping[str, Any]]:
    for line in results.splitlines():
        mac, _, body = line.partition(" ")
        wanted = hmac.new(key.encode(), body.encode(), hashlib.sha256).hexdigest()
        if hmac.compare_digest(mac.encode(), wanted.encode()):
            yield json.loads(body)


def _problem(records: Sequence[Mapping[str, Any]], canaries: Canaries, exit_code: int) -> str | None:
    if not records:
        return "the run has no record: pytest did not reach its end"
    for record in records:
        if record["tampered"]:
            return f"functions of the test runner were replaced: {record['tampered'][:5]}"
        outcomes = {name.partition("[")[0]: outcome for name, outcome in record["canaries"].items()}
        if wrong := sorted(name for name in canaries.fail if outcomes.get(name) == "passed"):
            return f"tests that must fail passed: {wrong}"
        if outcomes.get(canaries.succeed) != "passed":
            return "the test that must pass did not"
        if missing := sorted(canaries.fail - outcomes.keys()):
            return f"canaries did not run: {missing}"
        if absent := sorted(set(record["collected"]) - set(record["ran"])):
            return f"collected tests did not run: {absent[:5]}"
    if exit_code == 0 and any(record["exit"] for record in records):
        return "the exit status is 0, the recorded one is not"
    return None


def _last(name: str) -> str:
    """Return a node id without its file's folder: summary and recorder may have different root folders."""
    path, separator, rest = name.partition("::")
    return f"{path.rpartition('/')[2]}{separator}{rest}"
