"""The family `pypi_bugs`: real packages with one wrong expression; the package's own tests are hidden.

`build` makes the rows (`etpi lab pypi-bugs`). A patch passes if every test has the same outcome as in the original
package.

Fields of a row: repo, version, bug (its place), function, path, fixed (that file's text without the bug), files and
tests (path -> text), command, expected (test -> outcome), breaks (a test the bug breaks), issue.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from etpi_assets.tasks import places
from etpi_assets.tasks.calibration import TestRun
from etpi_assets.tasks.family import Role, Task
from etpi_assets.tasks.frozen import write_commands
from etpi_assets.tasks.patches import PatchTrial
from etpi_assets.tasks.reports import equal_outcomes
from etpi_assets.tasks.repository import PARAMS, RepositoryFamily, make_task
from etpi_resources.hashes import json_hash

ETPI_VERSION = 1
"""The number of this family's code: raise it where tasks, rollouts or verdicts differ."""
WORKDIR = "/workspace"
_ROOTS = re.compile(r"PYTHONPATH=(?P<roots>\S+) ")


class BugTrial(PatchTrial):
    """The run of a package's tests."""

    def passes(self, test: TestRun) -> tuple[float, Mapping[str, Any]]:
        return equal_outcomes(test.outcomes(), self.task.payload["expected"])


class PypiBugs(RepositoryFamily):
    """The family `pypi_bugs`."""

    name = "pypi_bugs"
    params: Mapping[str, Any] = {**PARAMS, "sandbox": "bubblewrap", "test_seconds": 600, "memory_gib": 1}

    def read(self, suite: str, row: Mapping[str, Any], chosen: Mapping[str, Any]) -> Task:
        repo, path = str(row["repo"]), str(row["path"])
        files, tests, expected = (dict(row[key]) for key in ("files", "tests", "expected"))
        if expected.get(row["breaks"]) != "PASSED" or files[path] == row["fixed"]:
            raise ValueError("the row's bug breaks no test that passed without it")
        place = places.make_place(suite, chosen, key=".", workdir=WORKDIR, image=None)
        payload = {
            "bug": row["bug"],
            "path": path,
            "fixed": row["fixed"],
            "files": files,
            "tests": tests,
            "command": row["command"],
            "expected": expected,
            "entities": sorted({path, str(row["function"])}),
        }
        name = hashlib.sha256(str(row["bug"]).encode()).hexdigest()[:8]
        # The files are the task's own; of the prepared folder only the interpreter is shown.
        return make_task(
            suite, f"{repo}/{row['version']}/{name}", repo, str(row["issue"]), chosen, payload=payload,
            place={**place, "checkout": None},
        )  # fmt: skip

    def workspace(self, task: Task, role: Role) -> dict[str, str]:
        return dict(task.payload["files"])

    def trials(self, task: Task) -> Sequence[PatchTrial]:
        payload, match = task.payload, _ROOTS.match(task.payload["command"])
        files = {**payload["files"], payload["path"]: payload["fixed"]}
        fixed = json_hash([files, payload["tests"], payload["command"], payload["expected"]])
        # The recorder adds the roots once pytest is imported.
        roots, command = match["roots"].split(":") if match else (), _ROOTS.sub("", payload["command"])
        return [BugTrial(self, task, payload["tests"], command, roots=roots, fixed=fixed)]

    def solve(self, task: Task, role: Role) -> Sequence[str]:
        path = task.payload["path"]
        return write_commands({path: task.payload["files"][path]}, {path: task.payload["fixed"]})


FAMILY = PypiBugs()
