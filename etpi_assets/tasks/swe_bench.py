"""SWE-bench: an issue, and the hidden tests of its fix. All tests of FAIL_TO_PASS and PASS_TO_PASS must pass.

Fields: instance_id, repo, base_commit, problem_statement, patch, test_patch, FAIL_TO_PASS, PASS_TO_PASS (lists, or
their text), and in rows made from one's own repository `roots`, the folders that its modules are imported from.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from etpi_assets.tasks import places
from etpi_assets.tasks.calibration import TestRun
from etpi_assets.tasks.family import Role, Task
from etpi_assets.tasks.patches import PatchTrial, apply_command
from etpi_assets.tasks.reports import Outcomes, unittest_outcomes
from etpi_assets.tasks.repository import NAMED, PARAMS, RepositoryFamily, make_task
from etpi_resources.outside import loads

WORKDIR = "/testbed"
_DJANGO = "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1"
"""Django's test command, followed by modules; all others have pytest, and files."""

NO_READER = frozenset({"sympy/sympy"})
"""Repositories whose test reports have a format that `reports` does not parse."""

_ACTIVATE = "[ -f /opt/miniconda3/bin/activate ] && . /opt/miniconda3/bin/activate testbed"
_PYTHON = "PYTHON=python; command -v python > /dev/null || PYTHON=python3"
_CHANGED = re.compile(r'^diff --git (?:a/(.+) b/\1|"a/(.+)" "b/\2")$(\ndeleted file mode)?', re.MULTILINE)
_MOVED = re.compile(r"^(rename|copy) from (.+)\n\1 to (.+)$", re.MULTILINE)


class SWETrial(PatchTrial):
    """The run of a fix's tests."""

    def passes(self, test: TestRun) -> tuple[float, Mapping[str, Any]]:
        outcomes = _with_cut_names(test.outcomes() if self.pytest else unittest_outcomes(test.run.output))
        wanted = self.task.payload["wanted"]
        missed = {key: [n for n in names if outcomes.get(n) != "PASSED"][:20] for key, names in wanted.items()}
        missed = {key: names for key, names in missed.items() if names}
        return bool(outcomes) and not missed, {"tests": len(outcomes), "not_passed": missed}


class SWEBench(RepositoryFamily):
    """The family `swe_bench`."""

    name = "swe_bench"
    params: Mapping[str, Any] = {**PARAMS, "images": "swebench/sweb.eval.x86_64.{instance}:latest"}
    """images: name of an instance's image; {instance} is its id in lower case with `_1776_` for `__`."""

    def read(self, suite: str, row: Mapping[str, Any], chosen: Mapping[str, Any]) -> Task:
        instance, repo = str(row["instance_id"]), str(row["repo"])
        if repo in NO_READER:
            raise ValueError(f"nothing reads the reports of {repo}'s tests: name it in params.exclude_repos")
        wanted = {key: _names(row, key) for key in ("FAIL_TO_PASS", "PASS_TO_PASS")}
        if not wanted["FAIL_TO_PASS"]:
            raise ValueError("FAIL_TO_PASS is empty: no solution could be told from none")
        if not str(row["patch"]).strip() or not str(row["test_patch"]).strip():
            raise ValueError("patch or test_patch is empty")
        files = sorted(_changed(row["test_patch"]))
        payload = {
            "base_commit": row["base_commit"],
            "patch": row["patch"],
            "test_patch": row["test_patch"],
            "test_files": files,
            "wanted": wanted,
            "entities": sorted({*_changed(row["patch"]), *NAMED.findall(row["problem_statement"])}),
            **({"roots": _names(row, "roots")} if row.get("roots") else {}),
            # A repository may be split by time; otherwise the time has no effect on the task.
            **({"created_at": _moment(row)} if chosen["heldout_tasks"] else {}),
        }
        image = chosen["images"].format(instance=instance.replace("__", "_1776_").lower())
        place = places.make_place(suite, chosen, key=instance, workdir=WORKDIR, image=image)
        instruction = str(row["problem_statement"]).strip()
        return make_task(suite, instance, repo, instruction, chosen, payload=payload, place=place)

    def trials(self, task: Task) -> Sequence[PatchTrial]:
        pytest, test_patch = task.repo != "django/django", task.payload["test_patch"]
        command = _command(test_patch, pytest=pytest)
        return [SWETrial(self, task, test_patch, command, pytest=pytest, roots=task.payload.get("roots", ()))]

    def solve(self, task: Task, role: Role) -> Sequence[str]:
        return [apply_command(task.payload["patch"])]


FAMILY = SWEBench()


def _command(test_patch: str, *, pytest: bool) -> str:
    # pytest runs nothing if one of its files does not exist.
    files = [path for path, exists in sorted(_changed(test_patch).items()) if exists and path.endswith(".py")]
    if not pytest:
        modules = [path.removeprefix("tests/").removesuffix(".py").replace("/", ".") for path in files]
        return f"{_ACTIVATE}; {_DJANGO} {' '.join(map(shlex.quote, modules))}"
    names = " ".join(map(shlex.quote, files))
    return f"{_ACTIVATE}; {_PYTHON}; $PYTHON -m pytest -rA -p no:cacheprovider {names}"


def _changed(patch: str) -> dict[str, bool]:
    """Return {path that a git diff changes: whether the file exists afterwards}. A rename changes two."""
    changed = {plain or _unquoted(f'"{quoted}"'): not gone for plain, quoted, gone in _CHANGED.findall(patch)}
    for kind, old, new in _MOVED.findall(patch):
        if kind == "rename":
            changed.setdefault(_unquoted(old), False)
        changed[_unquoted(new)] = True
    return changed


def _unquoted(path: str) -> str:
    """Return a path of a git diff, which quotes unusual ones and escapes their bytes."""
    if not path.startswith('"'):
        return path
    return path[1:-1].encode().decode("unicode_escape").encode("latin-1").decode(errors="replace")


def _moment(row: Mapping[str, Any]) -> str:
    """Return the row's `created_at` as ISO 8601. Raises ValueError for any other form."""
    return datetime.fromisoformat(str(row["created_at"])).isoformat()


def _with_cut_names(outcomes: Outcomes) -> Outcomes:
    """Return the outcomes with those of names cut at their first space, as SWE-bench's own lists have them.

    A cut name passes if all tests do whose names begin with it."""
    cut: dict[str, set[str]] = {}
    for name, outcome in outcomes.items():
        cut.setdefault(name.partition(" ")[0], set()).add(outcome)
    return {name: "PASSED" if each == {"PASSED"} else "FAILED" for name, each in cut.items()} | outcomes


def _names(row: Mapping[str, Any], key: str) -> list[str]:
    """Return a list of tests, which may be its JSON or its Python text. Raises ValueError for anything else."""
    value = row[key]
    if isinstance(value, str):
        try:
            value = loads(value)
        except ValueError:
            with suppress(SyntaxError, ValueError):
                value = ast.literal_eval(value)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{key} is no list of names: {str(value)[:80]!r}")
    return value
