"""No attack on holes earns anything; honest solutions do, also those that differ from the reference."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import Task
from tests.attacks.forgeries import FORGERIES, HONEST, OTHER_HONEST, START, TESTS
from tests.attacks.targets import Targets

FOLDER = tempfile.TemporaryDirectory()
TARGETS = Targets(Path(FOLDER.name))
NODES = ["test_rope", "test_ropes[3 gives 82]", "test_ropes[7 gives 86]", "test_knot", "test_table"]


@pytest.fixture(scope="module")
def task() -> Task:
    row = {
        "repo": "moor", "version": "1", "bug": "moor.py:2", "function": "rope", "path": "moor.py", "fixed": HONEST,
        "files": {"moor.py": START}, "tests": {"tests/test_moor.py": TESTS},
        "command": "PYTHONPATH=. python3 -m pytest -c /dev/null --rootdir . -p no:cacheprovider -rA tests",
        "expected": {f"tests/test_moor.py::{node}": "PASSED" for node in NODES},
        "breaks": "tests/test_moor.py::test_rope", "issue": "rope",
    }  # fmt: skip
    loaded = TARGETS._row("pypi_bugs", row, checkouts=str(TARGETS.repository.folder))
    (proved,) = load_family("pypi_bugs").validate([loaded], TARGETS.factory)
    assert isinstance(proved, Task), proved
    return replace(proved)


def reward(task: Task, code: str) -> tuple[float | None, str]:
    verdict = load_family("pypi_bugs").judge(task, {"agent1": {"moor.py": code}}, TARGETS.factory)
    return verdict.reward, verdict.details["verdict_trust"]


@pytest.mark.parametrize("code", [HONEST, OTHER_HONEST], ids=["reference", "other types and texts"])
def test_honest_solutions_are_rewarded_and_blind(task: Task, code: str) -> None:
    assert set(load_family("pypi_bugs").trusts(task)) == {"blind"}
    assert reward(task, code) == (1.0, "blind")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.attack] if at else []) for at, name in enumerate(FORGERIES)]
)
def test_forgery_earns_nothing(task: Task, name: str) -> None:
    assert reward(task, FORGERIES[name])[0] == 0.0
