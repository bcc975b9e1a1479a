"""R2E-Gym: a repository before a commit, with the commit's tests hidden.

A run passes if its parsed test summary equals the expected outcomes exactly and neither is empty.

Fields: repo_name, docker_image, commit_hash, problem_statement, expected_output_json (test -> outcome),
parsed_commit_content (file_diffs with old and new contents: the reference), execution_result_content (test_file_names,
test_file_codes: the hidden tests).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from etpi_assets.tasks import places
from etpi_assets.tasks.calibration import TestRun
from etpi_assets.tasks.family import Role, Task
from etpi_assets.tasks.frozen import RUNNER_FILE, is_test, write_commands
from etpi_assets.tasks.patches import PatchTrial
from etpi_assets.tasks.reports import equal_outcomes, plain
from etpi_assets.tasks.repository import NAMED, RepositoryFamily, make_task
from etpi_resources.outside import loads

WORKDIR = "/testbed"
TESTS = "r2e_tests"
_COMMAND = (
    f"if [ -f run_tests.sh ]; then bash run_tests.sh; "
    f"elif [ -x .venv/bin/python ]; then .venv/bin/python -W ignore -m pytest -rA {TESTS}; "
    f"else python3 -W ignore -m pytest -rA {TESTS}; fi"
)
"""R2E-Gym's images contain run_tests.sh; without it pytest runs the tests."""

_COPIES = f"{TESTS} /r2e_tests /root/r2e_tests"
"""Hidden tests in R2E-Gym's images."""


class R2ETrial(PatchTrial):
    """The run of a commit's tests."""

    prepare = f"rm -rf {_COPIES} 2>/dev/null; {places.FORGET_HISTORY}"

    def passes(self, test: TestRun) -> tuple[float, Mapping[str, Any]]:
        names = {name: ".".join(name.split("::")[1:]) or name for name in test.outcomes()}
        outcomes = {names[name].split(" - ")[0]: outcome for name, outcome in test.outcomes().items()}
        wanted = {name.split(" - ")[0]: outcome for name, outcome in self.task.payload["expected"].items()}
        equal, details = equal_outcomes(outcomes, wanted)
        # Tests of one name in several files have one outcome among the expected ones.
        known, kinds = test.calibration.other, test.kinds()
        broken = [node for node, kind in kinds.items() if kind != "passed" and test.original(node) not in known]
        return equal and test.agrees and not broken, details


class R2E(RepositoryFamily):
    """The family `r2e`."""

    name = "r2e"
    hides = f"rm -rf {_COPIES} run_tests.sh /root/run_tests.sh 2>/dev/null"

    def repo_of(self, row: Mapping[str, Any]) -> str:
        return str(row.get("repo_name", ""))

    def read(self, suite: str, row: Mapping[str, Any], chosen: Mapping[str, Any]) -> Task:
        repo, commit = _text(row, "repo_name"), _text(row, "commit_hash")
        expected = {plain(k): str(v) for k, v in _mapping(row, "expected_output_json").items()}
        if not expected:
            raise ValueError("expected_output_json is empty: nothing could be told from its tests")
        execution = _mapping(row, "execution_result_content")
        tests = dict(zip(execution["test_file_names"], execution["test_file_codes"], strict=True))
        if not tests:
            raise ValueError("execution_result_content names no test file")
        solution: dict[str, str | None] = {}
        diffs = _mapping(row, "parsed_commit_content")["file_diffs"]
        folders = {str(parent) for diff in diffs for parent in PurePosixPath(diff["header"]["file"]["path"]).parents}
        for diff in diffs:
            path = diff["header"]["file"]["path"]
            if not is_test(path, tests, folders) and not RUNNER_FILE.search(path):
                deleted = "deleted file mode" in (diff["header"].get("misc_line") or "")
                solution[path] = None if deleted else diff.get("new_file_content")
        instruction = _issue(_text(row, "problem_statement"))
        payload = {
            "commit": commit,
            "expected": expected,
            "tests": tests,
            "solution": solution,
            "entities": sorted({*solution, *NAMED.findall(instruction)}),
        }
        place = places.make_place(
            suite, chosen, key=f"{repo}/{commit}", workdir=WORKDIR, image=_text(row, "docker_image")
        )
        return make_task(suite, f"{repo}/{commit[:12]}", repo, instruction, chosen, payload=payload, place=place)

    def trials(self, task: Task) -> Sequence[PatchTrial]:
        tests = {f"{TESTS}/{name}": code for name, code in task.payload["tests"].items()}
        return [R2ETrial(self, task, tests, _COMMAND)]

    def solve(self, task: Task, role: Role) -> Sequence[str]:
        after = {path: text for path, text in task.payload["solution"].items() if text is not None}
        return write_commands(dict.fromkeys(task.payload["solution"], "\0"), after)


FAMILY = R2E()


def _issue(statement: str) -> str:
    """Return the issue's text without the [ISSUE] tags around it."""
    match = re.search(r"\[ISSUE\](.*?)\[/ISSUE\]", statement, re.DOTALL)
    return (match[1] if match else statement).strip()


def _text(row: Mapping[str, Any], field: str) -> str:
    value = row[field]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{field} is empty")
    return value


def _mapping(row: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """Return a field that is a JSON object, either as text or already parsed."""
    value = row[field]
    value = loads(value) if isinstance(value, str) else value
    if not isinstance(value, Mapping):
        raise ValueError(f"{field} is no JSON object")
    return value
