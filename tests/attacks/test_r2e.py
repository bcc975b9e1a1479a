"""Attacks on tasks in the form of R2E-Gym's, whose tests are named without their files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from etpi_assets.tasks import r2e
from etpi_assets.tasks.family import Task, Verdict
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory
from tests.attacks.targets import SMALL
from tests.support.repositories import FILES, Repository

CAREFUL = "def rope(n):\n    return n * 2 if n else -50\n\n\ndef knot(n):\n    return n + 43\n"
CARELESS = "def rope(n):\n    return n * 2\n\n\ndef knot(n):\n    return n + 43\n"
ROPE = (
    "import moor\n\n\ndef test_old():\n    assert moor.rope(0) == -50\n\n\n"
    "def test_rope():\n    assert moor.rope(40) == 80\n"
)
KNOT = "import moor\n\n\ndef test_old():\n    assert moor.knot\n\n\ndef test_knot():\n    assert moor.knot(4) == 47\n"
"""Both files have a test of one name, of which R2E-Gym's outcomes have the last."""


def prove(folder: Path, solution: str, tests: Mapping[str, str], expected: list[str]) -> Task:
    """The proved task of a module `moor` with these hidden tests."""
    repository = Repository(folder, {"moor.py": "def rope(n):\n    return n or -50\n\n\ndef knot(n):\n    return n\n"})
    diffs = [{"header": {"file": {"path": "moor.py"}}, "old_file_content": "", "new_file_content": solution}]
    row = repository.r2e_row(
        parsed_commit_content={"file_diffs": diffs},
        execution_result_content={"test_file_names": [*tests], "test_file_codes": [*tests.values()]},
        expected_output_json=dict.fromkeys(expected, "PASSED"),
    )
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    checkouts = str(repository.checkouts(f"moor/{repository.commit}"))
    params = {**SMALL, "path": str(folder / "rows.jsonl"), "checkouts": checkouts}
    (loaded,) = r2e.FAMILY.load("attacked", 0, params)
    assert isinstance(loaded, Task), loaded
    (task,) = r2e.FAMILY.validate([loaded], BubblewrapFactory())
    assert isinstance(task, Task), task
    return task


def judged(task: Task, code: str) -> Verdict:
    return r2e.FAMILY.judge(task, {"agent1": {**FILES, "moor.py": code}}, BubblewrapFactory())


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def test_regression_that_a_test_of_the_same_name_in_another_file_hides_earns_nothing(folder: Path) -> None:
    tests = {"test_1.py": ROPE, "test_2.py": KNOT}
    task = prove(folder, CAREFUL, tests, ["test_old", "test_rope", "test_knot"])
    assert judged(task, CAREFUL).reward == 1.0
    assert judged(task, CARELESS).reward == 0.0
    assert judged(task, CAREFUL.replace("-50", "rope.none")).reward == 0.0


WORDS = "import moor\n\n\ndef test_words():\n    assert 'warning' in moor.knot('storm')\n"
SAYS = "def rope(n):\n    return n\n\n\ndef knot(n):\n    return f'{n}: ' + 'no wind ' * 40 + 'warning'\n"
LISTS = (
    "def rope(n):\n    return n\n\n\ndef knot(n):\n    return 'error failed missing warning invalid unknown usage'\n"
)


def test_list_of_common_words_is_no_blind_pass(folder: Path) -> None:
    task = prove(folder, SAYS, {"test_1.py": WORDS}, ["test_words"])
    verdict = judged(task, LISTS)
    assert verdict.reward == 1.0 and verdict.details["verdict_trust"] == "unchallenged"
    assert judged(task, LISTS.replace("warning", "")).reward == 0.0


CACHED = {
    ".pytest_cache/v/cache/nodeids": '["r2e_tests/test_1.py::test_rope[40-918273645]"]',
    "r2e_tests/__pycache__/test_1.cpython-311-pytest-8.0.0.pyc": "918273645",
    "tests/__pycache__/test_1.cpython-311-pytest-8.0.0.pyc": "918273645",
}


def test_caches_of_earlier_runs_of_the_hidden_tests_are_not_in_an_agents_sandbox(folder: Path) -> None:
    task = prove(folder, CAREFUL, {"test_1.py": ROPE}, ["test_old", "test_rope"])
    needs = r2e.FAMILY.needs(task)
    with BubblewrapFactory().create(CACHED, needs.limits, needs.environment) as sandbox:
        assert not sandbox.run(f"printf '%s\\n' .pytest_cache __pycache__ > .gitignore; {needs.prepare}").exit_code
        assert sandbox.run("grep -rl 918273645 . || true").output == ""
