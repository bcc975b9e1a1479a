"""Bugs in real packages: what is mutated, what is kept, and that only the right expression passes."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from etpi_assets.specs.load import load_specs
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import RejectedInput, Task
from etpi_lab.pypi_bugs import build as builder
from etpi_lab.pypi_bugs.mutations import mutations
from etpi_lab.pypi_bugs.packages import PinnedPackage, SuiteBuildError, fetch, pinned, read
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory

FAMILY = load_family("pypi_bugs")
FILES = {
    "moor/__init__.py": "from moor.rope import longest, total\n",
    "moor/rope.py": '''"""Ropes."""


def longest(ropes):
    best = 0
    for rope in ropes:
        if rope > best:
            best = rope
    return best


def total(ropes, spare=1):
    if not ropes:
        raise ValueError(f"no ropes {1 + 1}")
    return sum(ropes) + spare
''',
    "tests/test_rope.py": """import pytest

from moor import longest, total


@pytest.mark.parametrize("ropes", [[1, 3, 2], [3]])
def test_longest(ropes):
    assert longest(ropes) == 3


def test_total():
    assert total([1, 2]) == 4
    with pytest.raises(ValueError):
        total([])
""",
    "setup.cfg": "[tool:pytest]\naddopts = --nonsense\n",
}


def make_sdist(folder: Path, files: dict[str, str]) -> PinnedPackage:
    """A source distribution `moor` in the folder, and its pin."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "moor-1.0.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        for path, text in {**files, "../escape.py": "x = 1\n"}.items():
            entry = tarfile.TarInfo(f"moor-1.0/{path}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return PinnedPackage("moor", "1.0", digest, (".",), ("tests",), ("moor",))


@pytest.fixture(scope="module")
def created() -> Iterator[tuple[Path, PinnedPackage]]:
    """A folder with the suite of one small package; sandboxes have to be able to enter it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        package = make_sdist(folder / "sdists", FILES)
        builder.build(folder, BubblewrapFactory(), [package], per_package=3)
        yield folder, package


@pytest.fixture(scope="module")
def tasks(created: tuple[Path, PinnedPackage]) -> list[Task]:
    params = {"path": str(created[0] / "rows.jsonl"), "checkouts": str(created[0]), "heldout_repos": ["moor"]}
    result = list(FAMILY.load("suite", 0, params))
    assert all(isinstance(task, Task) for task in result), result
    return [task for task in result if isinstance(task, Task)]


def verdict(task: Task, changes: dict[str, str]) -> Any:
    left = {**task.payload["files"], **changes}
    return FAMILY.judge(task, {"agent1": left}, BubblewrapFactory())


def test_a_mutation_changes_one_expression_and_leaves_messages_alone():
    source = FILES["moor/rope.py"]
    result = mutations(source)
    kinds = {(mutation.kind, mutation.function) for mutation in result}
    assert {("comparison", "longest"), ("condition", "longest"), ("result", "longest")} <= kinds
    assert {("negation", "total"), ("arithmetic", "total")} <= kinds
    for mutation in result:
        changed = mutation.apply(source)
        assert changed != source
        differing = [
            i for i, (a, b) in enumerate(zip(source.splitlines(), changed.splitlines(), strict=True), 1) if a != b
        ]
        assert differing == [mutation.line]
        assert "no ropes {1 + 1}" in changed


def test_offsets_count_bytes():
    source = 'def knot(n):\n    return "é", n + 2\n'
    texts = {mutation.apply(source) for mutation in mutations(source)}
    assert 'def knot(n):\n    return "é", (n - 2)\n' in texts and 'def knot(n):\n    return "é", n + 3\n' in texts


def test_kept_bugs_break_a_test_and_say_which(created: tuple[Path, PinnedPackage], tasks: list[Task]):
    rows = [json.loads(line) for line in (created[0] / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == len(tasks) == 3
    for row in rows:
        assert row["expected"][row["breaks"]] == "PASSED" and set(row["expected"].values()) == {"PASSED"}
        assert "tests/test_rope.py" not in row["files"] and "setup.cfg" not in row["files"]
        assert row["breaks"].split("::")[-1] in row["issue"] and "assert" in row["issue"]
    assert {task.split for task in tasks} == {"heldout"}


def test_every_task_is_proven_and_nothing_else_passes(tasks: list[Task]):
    proved = list(FAMILY.validate(tasks, BubblewrapFactory()))
    assert [each.content_hash for each in proved if isinstance(each, Task)] == [task.content_hash for task in tasks]
    task = tasks[0]
    mended = {task.payload["path"]: task.payload["fixed"]}
    assert verdict(task, mended).reward == 1.0
    assert verdict(task, {}).verdict == "no_patch"
    cheats = {"tests/test_rope.py": "def test_total(): pass\n", "conftest.py": "collect_ignore = ['tests']\n"}
    assert verdict(task, cheats).verdict == "no_patch"
    assert verdict(task, {"moor/__init__.py": "longest = total = None\n"}).verdict == "failed_tests"
    assert verdict(task, {**mended, "moor/__init__.py": "import os\nos._exit(0)\n"}).reward == 0.0


def test_validate_rejects_broken_tasks(tasks: list[Task]):
    payload = tasks[0].payload
    same = {**payload, "files": {**payload["files"], payload["path"]: payload["fixed"]}}
    idle = {**payload, "files": {**payload["files"], payload["path"]: payload["fixed"] + "# moored\n"}}
    wrong = {**payload, "expected": {**payload["expected"], "tests/test_rope.py::test_gone": "PASSED"}}
    broken = [replace(tasks[0], payload=each) for each in (same, idle, wrong)]
    reasons = [
        outcome.reason for outcome in FAMILY.validate(broken, BubblewrapFactory()) if isinstance(outcome, RejectedInput)
    ]
    assert reasons == ["no_reference", "null_passes", "reference_fails"]


def test_build_runs_once_and_without_the_network(created: tuple[Path, PinnedPackage], monkeypatch: pytest.MonkeyPatch):
    folder, package = created
    before, said = (folder / "rows.jsonl").read_bytes(), []
    monkeypatch.setattr("subprocess.run", None)  # neither pip nor an interpreter is wanted
    builder.build(folder, BubblewrapFactory(), [package], per_package=3, echo=said.append)
    assert said == [f"{folder.resolve() / 'rows.jsonl'}: built before, nothing to do"]
    assert (folder / "rows.jsonl").read_bytes() == before
    assert fetch([package], folder / "sdists") == {"moor": folder / "sdists" / "moor-1.0.tar.gz"}


def test_build_skips_package_whose_own_tests_fail(tmp_path: Path, created: tuple[Path, PinnedPackage]):
    package = make_sdist(tmp_path, {**FILES, "tests/test_rope.py": "def test_never():\n    assert False\n"})
    sources = read(package, tmp_path / "moor-1.0.tar.gz")
    rows, told = builder.bugs(package, sources, created[0] / "tools", BubblewrapFactory(), 2, 0)
    assert rows == [] and "left out" in told
    with pytest.raises(SuiteBuildError, match="0 modules"):
        read(replace(package, modules=("absent",)), tmp_path / "moor-1.0.tar.gz")


def test_pins_are_complete():
    packages = pinned()
    assert len({package.name for package in packages}) == len(packages) >= 5
    assert all(len(package.sha256) == 64 for package in packages)
    heldout = load_specs().suites["pypi_bugs"].params["heldout_repos"]
    assert set(heldout) < {package.name for package in packages}
