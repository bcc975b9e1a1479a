"""Tasks of each family, proofs of tasks, and verdicts on right, wrong and empty work, in bubblewrap."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from etpi_assets.planning.versions import WORLDS
from etpi_assets.tasks import cooperbench, r2e, swe_bench
from etpi_assets.tasks.answers import maths, programs
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import ANSWER, Family, RejectedInput, Task, Verdict
from etpi_assets.tasks.frozen import counted_changes
from etpi_assets.tasks.grading import grade
from etpi_assets.tasks.holes import dig
from etpi_assets.tasks.reports import counts, unittest_outcomes
from etpi_assets.tasks.table import rejected_table, task_table
from etpi_assets.tasks.task_checks import check_tasks
from etpi_assets.worlds.repo_fix_tiny import solution
from etpi_assets.worlds.terminal_tiny import judge, wanted
from etpi_resources.sandboxes import Limits
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory
from tests.goldens.folders import new_folder
from tests.goldens.golden import OF_LAB, case
from tests.support.harbor import make_folder
from tests.support.repositories import FILES, OFFLINE, Repository, solved

BOX = BubblewrapFactory()
SMALL = {"memory_gib": 0.5, "disk_gib": 0.0625, "test_seconds": 60}
TEXTS = ("output", "log", "error", "message", "not_believed", "problem")
"""Keys of a verdict's details whose values are sentences or other programs' words."""


def tasks_of(family: Any, **params: Any) -> list[Task]:
    return [item for item in family.load("golden", 0, params) if isinstance(item, Task)]


@cache
def world(name: str) -> list[Task]:
    return tasks_of(load_family(name), train=3, heldout=2)


def shown_tasks(family: Family, tasks: list[Task]) -> dict[str, Any]:
    """Return tasks as rows, their roles, what they name and their solutions."""
    roles = [(task, role) for task in tasks for role in family.roles(task)]
    return {
        "tasks": task_table(tasks),
        "roles": [vars(role) for _, role in roles],
        "workspaces": [family.workspace(task, role) for task, role in roles],
        "solutions": [list(family.solve(task, role)) for task, role in roles],
        "entities": [list(family.entities(task)) for task in tasks],
    }


def without_texts(details: Any) -> Any:
    if isinstance(details, Mapping):
        return {key: without_texts(value) for key, value in details.items() if key not in TEXTS}
    return details


def verdicts(**results: Verdict) -> dict[str, Any]:
    """Return verdicts by name, without texts."""
    return {
        name: {
            "reward": verdict.reward,
            "verdict": verdict.verdict,
            "details": [json.dumps(without_texts(verdict.details))],
        }
        for name, verdict in results.items()
    }


for world_name in (*WORLDS, *OF_LAB):

    @case(f"family.{world_name}", "tasks")
    def _(name: str = world_name) -> dict[str, Any]:
        return shown_tasks(load_family(name), world(name))


# --- proofs and checks ------------------------------------------------------------------------------------------------


@case("tasks", "proofs")
def proofs() -> dict[str, Any]:
    family = load_family("repo_fix_tiny")
    task, other, *_ = world("repo_fix_tiny")
    broken = replace(task, task_id="broken", payload={**task.payload, "value": task.payload["value"] + 1})
    idle = replace(other, task_id="idle", payload={**other.payload, "files": solution(other)})
    outcomes = list(family.validate([task, broken, idle], BOX))
    accepted = [item for item in outcomes if isinstance(item, Task)]
    rejected = [item for item in outcomes if isinstance(item, RejectedInput)]
    checks = check_tasks(len(outcomes), accepted, rejected, family)
    return {
        "tasks": task_table(accepted),
        "rejected": rejected_table(rejected).drop_columns(["detail"]),
        "checks": [{"name": c.name, "passed": c.passed, "blocking": c.blocking, **c.figures} for c in checks],
    }


# --- judges of the embedded worlds ------------------------------------------------------------------------------------


@case("judge.arithmetic_tiny", "answers")
def arithmetic() -> dict[str, Any]:
    family, task = load_family("arithmetic_tiny"), world("arithmetic_tiny")[0]
    texts = {"right": maths.as_answer(task.payload["answer"]), "wrong": "\\boxed{11}", "silent": "I cannot tell."}
    return verdicts(**{name: family.judge(task, {"agent1": {ANSWER: text}}, BOX) for name, text in texts.items()})


@case("judge.running_sum", "sums")
def running_sum() -> dict[str, Any]:
    family, task = load_family("running_sum"), world("running_sum")[2]
    total, lines = 0, []
    for number in task.payload["numbers"]:
        total += number
        lines.append(str(total))
    texts = {"right": "\n".join(lines) + "\n", "short": "\n".join(lines[:-1]) + "\n", "wrong": "1\n" * len(lines)}
    return verdicts(**{name: family.judge(task, {"agent1": {"sums": text}}, BOX) for name, text in texts.items()})


@case("judge.repo_fix_tiny", "patches")
def repo_fix_tiny() -> dict[str, Any]:
    family, task = load_family("repo_fix_tiny"), world("repo_fix_tiny")[0]
    module = task.payload["module"]
    off = f"def {module}(x):\n    return int(x) + {task.payload['value'] + 1}\n"
    work = {
        "solved": {},
        "off": {f"{module}.py": off},
        "gone": {f"{module}.py": None},
        "exits": {f"{module}.py": "raise SystemExit"},
        "forged": {f"{module}.py": off, "conftest.py": "raise SystemExit", "sitecustomize.py": "raise SystemExit"},
    }
    results = {"idle": family.judge(task, {"agent1": dict(task.payload["files"])}, BOX)}
    for name, changes in work.items():
        files = {path: text for path, text in {**solution(task), **changes}.items() if text is not None}
        results[name] = family.judge(task, {"agent1": files}, BOX)
    return verdicts(**results)


@case("judge.terminal_tiny", "workspaces")
def terminal_tiny() -> dict[str, Any]:
    family: Any = load_family("terminal_tiny")
    task = next(task for task in world("terminal_tiny") if task.payload["slots"].get("source"))
    (role,) = family.roles(task)
    results = {}
    commands = {
        "idle": "true", "solved": task.payload["command"], "more": f"{task.payload['command']}; touch more",
        "modes": f"{task.payload['command']}; chmod 700 *", "wiped": "rm -rf *",
    }  # fmt: skip
    for name, command in commands.items():
        with BOX.create(family.workspace(task, role)) as sandbox:
            sandbox.run(command)
            results[name] = family.judge_in_place(task, {"agent1": sandbox}, BOX)
    results["text"] = judge(task, wanted(task))
    return verdicts(**results)


@case("judge.coop_tiny_shared", "merges")
def coop_tiny_shared() -> dict[str, Any]:
    family = load_family("coop_tiny_shared")
    task = world("coop_tiny_shared")[0]
    roles = family.roles(task)
    start = {role.agent_id: family.workspace(task, role) for role in roles}
    done = {}
    for role in roles:
        with BOX.create(family.workspace(task, role)) as sandbox:
            for command in family.solve(task, role):
                sandbox.run(command)
            done[role.agent_id] = sandbox.read_files()
    one, two = (role.agent_id for role in roles)
    clash = {**done[one], task.payload["shared"]: "x = 1\n"}
    return verdicts(
        idle=family.judge(task, start, BOX),
        solved=family.judge(task, done, BOX),
        half=family.judge(task, {one: done[one], two: start[two]}, BOX),
        conflict=family.judge(task, {one: clash, two: done[two]}, BOX),
        broken=family.judge(task, {one: dict.fromkeys(start[one], "("), two: start[two]}, BOX),
    )


# --- answers ----------------------------------------------------------------------------------------------------------

ROWS: list[dict[str, Any]] = [
    {"question": "What is 3+4?", "answer": "7", "source": "maths", "license": "mit"},
    {"question": "Half of 7?", "answer": "\\frac{7}{2}", "source": "maths", "license": "mit"},
    {
        "question": "Double a number.",
        "tests": {"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10\n"]},
        "solution": "print(int(input()) * 2)",
        "source": "programs",
        "license": "apache-2.0",
    },
    {"question": "Nothing to compare.", "source": "maths", "license": "mit"},
    {"answer": "7", "source": "maths", "license": "mit"},
]


@case("family.answers", "rows")
def answers() -> dict[str, Any]:
    path = new_folder() / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    items = list(load_family("answers").load("golden", 0, {"path": str(path)}))
    rejected = [item for item in items if isinstance(item, RejectedInput)]
    return {
        "tasks": task_table([item for item in items if isinstance(item, Task)]),
        "rejected": rejected_table(rejected).drop_columns(["detail"]),
    }


ANSWERS = {
    "7": ("7", "7.0", "8", "\\frac{14}{2}", "7 \\text{ or } 8", "3+4", "", "x=7", "7\\%", "\\infty"),
    "\\frac{1}{2}": ("0.5", "1/2", "\\dfrac12", "50\\%", "0.51", "\\frac{2}{4}"),
    "2\\sqrt{2}": ("\\sqrt{8}", "2.828", "2\\sqrt2", "\\sqrt{2}"),
    "(1, 2)": ("(1,2)", "(2,1)", "[1,2]", "1,2"),
    "25": ("25 \\text{ cm}^2", "25\\mbox{ m}^3", "$25$", "5^2"),
    "x^2-1": ("(x-1)(x+1)", "x^2 - 1", "x^2+1"),
}


@case("judge.answers", "maths")
def answers_maths() -> dict[str, list[str]]:
    return {
        f"{grader}.{wanted}": [maths.judge(wanted, f"so \\boxed{{{text}}}", grader).verdict for text in texts]
        for grader in maths.GRADERS
        for wanted, texts in ANSWERS.items()
    }


@case("judge.answers", "programs")
def answers_programs() -> dict[str, Any]:
    check = {
        "test": "def check(candidate):\n    assert candidate(n=3) == 6\n", "entry_point": "double",
        "prompt": "import math\n",
    }  # fmt: skip
    forms: dict[str, Any] = {
        "lines": ({"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10\n"]}, "print(int(input()) * {n})"),
        "function": ({"fn_name": "f", "inputs": [[2], [5]], "outputs": [4, [10]]}, "def f(n):\n    return n * {n}"),
        "check": (check, "def double(n):\n    return n * {n}"),
    }
    results = {}
    for name, (tests, program) in forms.items():
        for factor in (2, 3):
            text = f"```python\n{program.replace('{n}', str(factor))}\n```"
            results[f"{name}_{factor}"] = programs.judge(programs.read_tests(tests), text, Limits(), BOX)
        results[f"{name}_exits"] = programs.judge(programs.read_tests(tests), "import sys; sys.exit(0)", Limits(), BOX)
    return verdicts(**results)


# --- repositories -----------------------------------------------------------------------------------------------------


@cache
def repository() -> Repository:
    return Repository(new_folder())


def rows_file(*rows: Mapping[str, Any]) -> str:
    path = new_folder() / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@cache
def harbor_task() -> Task:
    root = new_folder()
    make_folder(root / "tasks")
    repo = root / "checkouts" / "lines" / "repo"
    repo.mkdir(parents=True)
    (repo / "start.txt").write_text("start\n")
    params = {"path": str(root / "tasks"), "checkouts": str(root / "checkouts"), "sandbox": "bubblewrap", **OFFLINE}
    (task,) = tasks_of(load_family("harbor"), **params)
    return task


@cache
def cooperbench_task() -> Task:
    source = repository()
    params = {"path": str(source.cooperbench()), "checkouts": str(source.checkouts("moor_task/task7"))}
    (task,) = tasks_of(cooperbench.FAMILY, **params, **SMALL, sandbox="bubblewrap", images="build", **OFFLINE)
    return task


@cache
def r2e_task() -> Task:
    source = repository()
    checkouts = source.checkouts(f"moor/{source.commit}")
    path = rows_file(source.r2e_row())
    (task,) = tasks_of(r2e.FAMILY, path=path, checkouts=str(checkouts), sandbox="bubblewrap", **SMALL)
    return task


@cache
def swe_bench_task() -> Task:
    source = repository()
    checkouts = source.checkouts("moor__moor-7")
    path = rows_file(source.swe_row())
    (task,) = tasks_of(swe_bench.FAMILY, path=path, checkouts=str(checkouts), sandbox="bubblewrap", **SMALL)
    return task


def of_repository(family: Family, task: Task) -> dict[str, Any]:
    """Return what a task of a repository is, without the places of this machine and the commit."""
    payload = {
        key: value for key, value in task.payload.items() if key not in ("place", "live", "commit", "base_commit")
    }
    return {
        "task": {
            "task_id": task.task_id.replace(repository().commit[:12], "COMMIT"),
            "repo": task.repo,
            "split": task.split,
        },
        "instruction": task.instruction,
        "payload": payload,
        "roles": [vars(role) for role in family.roles(task)],
        "entities": list(family.entities(task)),
    }


for family_name, family_module, make_task in (
    ("cooperbench", cooperbench, cooperbench_task),
    ("r2e", r2e, r2e_task),
    ("swe_bench", swe_bench, swe_bench_task),
):

    @case(f"family.{family_name}", "task")
    def _(family: Any = family_module.FAMILY, make: Any = make_task) -> dict[str, Any]:
        return of_repository(family, make())


TEST_PATCH = r"""diff --git a/my t/x.py b/my t/y.py
similarity index 100%
rename from my t/x.py
rename to my t/y.py
diff --git a/t/x.py "b/t/gr\303\266\303\237e \"z.py"
similarity index 100%
copy from t/x.py
copy to "t/gr\303\266\303\237e \"z.py"
diff --git "a/e \303\251.py" "b/e \303\251.py"
new file mode 100644
diff --git a/gone b.py b/gone b.py
deleted file mode 100644
diff --git t/a.py t/a.py
new file mode 100644
"""


@case("family.swe_bench", "test files")
def swe_bench_test_files() -> dict[str, Any]:
    """Paths of a test patch: renames, copies, blanks, quotes, no prefixes."""
    (task,) = tasks_of(swe_bench.FAMILY, path=rows_file(repository().swe_row(test_patch=TEST_PATCH)))
    return {"test_files": task.payload["test_files"], "command": swe_bench.FAMILY.trials(task)[0].command}


@case("family.harbor", "task")
def harbor() -> dict[str, Any]:
    shown = of_repository(load_family("harbor"), harbor_task())
    needs = load_family("harbor").needs(harbor_task())
    return {**shown, "limits": needs.limits, "workdir": needs.environment and needs.environment.workdir}


def without(path: str, files: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in files.items() if name != path}


HOOKS = dict.fromkeys(("conftest.py", "tests/test_moor.py", "r2e_tests/test_1.py", "pytest.ini"), "raise SystemExit\n")


@case("judge.harbor", "answers")
def judge_harbor() -> dict[str, Any]:
    family: Any = load_family("harbor")
    task = harbor_task()
    (role,) = family.roles(task)
    needs = family.needs(task)
    forged = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt"
    work = {
        "idle": ["true"],
        "solved": list(family.solve(task, role)),
        "forged": [forged],
        "link": ["ln -s /etc/passwd x"],
    }
    results = {"text": family.judge(task, {"agent1": {"out.txt": "1\n2\n3\n"}}, BOX)}
    for name, commands in work.items():
        with BOX.create(family.workspace(task, role), needs.limits, needs.environment) as sandbox:
            for command in [*([needs.prepare] if needs.prepare else []), *commands]:
                sandbox.run(command)
            results[name] = family.judge_in_place(task, {"agent1": sandbox}, BOX)
    return verdicts(**results)


@case("judge.cooperbench", "pairs")
def judge_cooperbench() -> dict[str, Any]:
    clash = {
        **FILES,
        "moor.py": FILES["moor.py"].replace("def rope(n):\n    return n\n", "def rope(n):\n    return 7\n"),
    }
    work = {
        "solved": (solved("1"), solved("2")),
        "conflict": (solved("1"), clash),
        "hooks": ({**FILES, **HOOKS}, FILES),
    }
    task = cooperbench_task()
    return verdicts(
        **{n: cooperbench.FAMILY.judge(task, {"agent1": one, "agent2": two}, BOX) for n, (one, two) in work.items()}
    )


@case("judge.r2e", "patches")
def judge_r2e() -> dict[str, Any]:
    work = {
        "solved": {**solved("1", "2"), **HOOKS},
        "half": solved("1"),
        "hooks": {**FILES, **HOOKS},
        "gone": without("moor.py", FILES),
    }
    return verdicts(**{name: r2e.FAMILY.judge(r2e_task(), {"agent1": files}, BOX) for name, files in work.items()})


@case("judge.swe_bench", "patches")
def judge_swe_bench() -> dict[str, Any]:
    work = {
        "solved": {**solved("1"), **HOOKS},
        "breaks": {**FILES, "moor.py": "def rope(n):\n    return n * 2\n"},
        "hooks": {**FILES, **HOOKS},
        "idle": FILES,
    }
    task = swe_bench_task()
    return verdicts(**{name: swe_bench.FAMILY.judge(task, {"agent1": files}, BOX) for name, files in work.items()})


# --- parts that judges share ------------------------------------------------------------------------------------------


@case("judge", "printed outcomes")
def printed_outcomes() -> dict[str, Any]:
    pytest_text = (
        "=== short test summary info ===\nXFAIL t.py::a[1 - 2] - known\nPASSED t.py::b[x y]\n"
        "FAILED t.py::c - assert 1\nERROR t.py::d\n=== 1 failed, 2 passed, 1 error in 0.1s ===\n"
    )
    unittest_text = (
        "test_a (m.C) ... ok\ntest_b (m.C) ... noise ... FAIL\ntest_c (m.C) ... text\n  more\nskipped 'no'\n"
    )
    jest = "Tests:       1 failed, 12 passed, 13 total"
    return {
        "unittest": unittest_outcomes(unittest_text),
        "counts": [counts(text) for text in (pytest_text, jest, "--- PASS: TestA\n--- FAIL: TestB\n", "ok moor")],
    }


TESTS = """
import pytest
LIMIT = 5

@pytest.mark.parametrize("n, wanted", [(1, 2), (2, 4)])
def test_rows(n, wanted):
    assert rope(n) == wanted

def test_value():
    assert rope(4) == {'a': [1, (2.5, 'x')]}

def test_bound():
    assert rope(4) < LIMIT

def test_truth():
    assert rope(4)

def test_raises():
    with pytest.raises(ValueError, match="too long"):
        rope(-1)

def test_nothing():
    rope(4)

class TestKnot(unittest.TestCase):
    def test_in(self):
        self.assertIn(a, rope(4))
    def test_close(self):
        self.assertAlmostEqual(rope(4), 8.5)
"""


@case("judge", "holes")
def holes() -> dict[str, Any]:
    holed = dig({"test_moor.py": TESTS}, "k_")
    return {
        "text": holed.files,
        "holes": holed.holes,
        "cells": holed.cells,
        "tests": {
            name: [{**vars(each), "strong_cells": sorted(each.strong_cells)} for each in several]
            for name, several in holed.tests.items()
        },
        "reversible": sorted(holed.reversible),
        "reversed": dig({"test_moor.py": TESTS}, "k_", {}, sorted(holed.reversible)).files,
        "unread": dig({"test_x.py": "def test_x(:\n"}, "k_").files,
    }


@case("judge", "frozen files")
def frozen_files() -> dict[str, Any]:
    before = {"src/moor.py": "a", "src/__init__.py": "", "tests/test_a.py": "a", "setup.py": "a", "gone.py": "a"}
    added = (
        "src/new.py",
        "json.py",
        "src/json.py",
        "lib/pytest.py",
        "conftest.py",
        "x/conftest.py",
        "tox.ini",
        "a.pth",
    )
    named = (
        "pyproject.toml",
        "test_more.py",
        "more_test.py",
        "tests/data.json",
        "README.md",
        "sitecustomize.py",
        "a.so",
    )
    after = {"src/moor.py": "b", "src/__init__.py": "", "tests/test_a.py": "b", "setup.py": "b"}
    return {"counted": counted_changes(before, {**after, **dict.fromkeys([*added, *named], "x")})}


@case("judge", "unproven")
def unproven() -> dict[str, Any]:
    family, task = load_family("repo_fix_tiny"), world("repo_fix_tiny")[0]
    start = {"agent1": dict(task.payload["files"])}
    without_verifier = replace(task, payload={**task.payload, "why_unproven": "no_reference: none"})
    return verdicts(unproven=grade(family, without_verifier, start, start, {}, BOX))
