"""Suites of real repositories, live: proven, rolled out and judged in both kinds of sandbox."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etpi_assets.resources import Resources
from etpi_assets.rollouts.assets import raw_rollouts
from etpi_assets.tasks import cooperbench, places, r2e, swe_bench
from etpi_assets.tasks.assets import tasks as tasks_asset
from etpi_assets.tasks.calibration import TestRun
from etpi_assets.tasks.family import CALIBRATIONS, RejectedInput, Task
from etpi_assets.tasks.frozen import counted_changes, refused_changes
from etpi_assets.tasks.graded_run import GradedRun
from etpi_assets.tasks.task_checks import check_tasks
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.sandboxes import Environment, SandboxFactory
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory
from etpi_resources.sandboxes.docker import DockerFactory
from etpi_resources.sandboxes.docker_images import Images
from tests.support.container_engine import IMAGE
from tests.support.repositories import FILES, GIT, OFFLINE, RUNNER, Repository, solved

SMALL = {"memory_gib": 0.5, "disk_gib": 0.0625, "test_seconds": 60}


@pytest.fixture(scope="module")
def repository():
    with tempfile.TemporaryDirectory() as folder:
        yield Repository(Path(folder))


@pytest.fixture(scope="module")
def testbed(request, factory, repository) -> str:
    """The name of an image with the repository at /testbed, where there is an engine."""
    if factory.name == "bubblewrap":
        return "absent/moor:1"

    build = repository.context(IMAGE, "/testbed")
    with DockerFactory().create({}, environment=Environment("/testbed", build=build)) as box:
        images: Images = box._engine.images
        (name,) = images._images
        return name


def write_rows(folder: Path, *rows: dict[str, Any]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def load(family: Any, **params: Any) -> list[Task | RejectedInput]:
    return list(family.load("suite", 0, {**SMALL, **params}))


def one(family: Any, **params: Any) -> Task:
    (task,) = load(family, **params)
    assert isinstance(task, Task), task
    return task


def outcome(family: Any, task: Task, factory: SandboxFactory) -> Task | RejectedInput:
    (result,) = family.validate([task], factory)
    return result


def proves(family: Any, task: Task, factory: SandboxFactory) -> bool:
    """Whether the family proves the task, and finds its tests blind."""
    result = outcome(family, task, factory)
    assert isinstance(result, Task), result
    trusts = [trust for each in result.payload[CALIBRATIONS].values() for trust in each["trust"].values()]
    return result.content_hash == task.content_hash and set(trusts) == {"blind"}


def bench(repository: Repository, factory: SandboxFactory, root: Path) -> dict[str, Any]:
    context = repository.context(IMAGE, "/workspace/repo")
    for folder in root.glob("*/task*"):
        for part in context.iterdir():
            if not (folder / part.name).exists():
                (folder / part.name).symlink_to(part) if part.is_file() else _link(part, folder / part.name)
    checkouts = repository.checkouts("moor_task/task7")
    return {"path": str(root), "sandbox": factory.name, "checkouts": str(checkouts), "images": "build", **OFFLINE}


def _link(source: Path, target: Path) -> None:
    import shutil

    shutil.copytree(source, target, symlinks=True)


# --- CooperBench ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(repository, factory) -> Task:
    folder = repository.folder / f"of-{factory.name}"
    folder.mkdir()
    root = repository.cooperbench().rename(folder / "bench")
    return one(cooperbench.FAMILY, **bench(repository, factory, root))


@pytest.fixture(scope="module")
def conflicting(repository, factory) -> Task:
    folder = repository.folder / f"conflict-of-{factory.name}"
    folder.mkdir()
    root = repository.cooperbench(conflict=True).rename(folder / "bench")
    return one(cooperbench.FAMILY, **bench(repository, factory, root))


def test_cooperbench_tasks_are_proven(factory, pair, conflicting):
    assert proves(cooperbench.FAMILY, pair, factory)
    assert proves(cooperbench.FAMILY, conflicting, factory)


def test_cooperbench_verdicts(factory, pair):
    def judge(one: dict[str, str], two: dict[str, str]) -> tuple[str, Any, Any]:
        verdict = cooperbench.FAMILY.judge(pair, {"agent1": one, "agent2": two}, factory)
        return verdict.verdict, verdict.reward, verdict.details.get("merge")

    assert judge(solved("1"), solved("2")) == ("passed", 1.0, "clean")
    assert judge(FILES, FILES) == ("no_patch", 0.0, None)
    assert judge(solved("1"), FILES) == ("failed_tests", 0.0, "clean")
    assert judge(solved("1", "2"), solved("1", "2")) == ("passed", 1.0, "identical")
    clash = {
        **FILES,
        "moor.py": FILES["moor.py"].replace("def rope(n):\n    return n\n", "def rope(n):\n    return 7\n"),
    }
    assert judge(solved("1"), clash) == ("merge_conflict", 0.0, "conflicts")
    # The first agent's work alone is tested where the merge conflicts.
    assert judge(solved("1", "2"), clash) == ("passed", 1.0, "conflicts")
    # Tests, settings and hooks are no work.
    edited = {
        **FILES,
        "tests/test_feature1.py": "",
        "conftest.py": "import os; os._exit(0)\n",
        "pytest.ini": "[pytest]\n",
    }
    assert judge(edited, edited) == ("no_patch", 0.0, None)


def test_a_task_whose_reference_fails_is_refused(factory, pair):
    live = {**pair.payload["live"], "combined": "", "patches": {"1": "nonsense", "2": "nonsense"}}
    wrong = Task(**{**vars(pair), "payload": {**pair.payload, "live": live}})
    refusal = outcome(cooperbench.FAMILY, wrong, factory)
    assert isinstance(refusal, RejectedInput) and refusal.reason == "no_reference"
    tests = dict.fromkeys(("1", "2"), "diff --git a/x b/x\n")
    broken = Task(**{**vars(pair), "payload": {**pair.payload, "live": {**pair.payload["live"], "tests": tests}}})
    refusal = outcome(cooperbench.FAMILY, broken, factory)
    assert isinstance(refusal, RejectedInput) and refusal.reason == "reference_fails"


def test_full_disk_or_too_many_files_of_the_machine_refuse_no_task(repository, factory, testbed, tmp_path, pair):
    row = r2e_task(repository, factory, testbed, tmp_path)
    with patch.object(type(factory), "create", side_effect=OSError(errno.EMFILE, "too many open files")):
        for family, task in ((cooperbench.FAMILY, pair), (r2e.FAMILY, row)):
            with pytest.raises(OSError, match="too many"):
                outcome(family, task, factory)


def test_a_task_whose_tests_need_the_history_is_refused(factory, pair):
    runner = RUNNER.replace("/repo\n", "/repo\n[ $(git log -1 --format=%an) = a ] || exit 1\n")
    live = {**pair.payload["live"], "runner": runner}
    task = Task(**{**vars(pair), "payload": {**pair.payload, "live": live}})
    refusal = outcome(cooperbench.FAMILY, task, factory)
    assert isinstance(refusal, RejectedInput) and refusal.reason == "reference_fails"


# --- R2E-Gym -------------------------------------------------------------------------------------------------------


def r2e_task(repository: Repository, factory: SandboxFactory, testbed: str, tmp_path: Path, **changes: Any) -> Task:
    rows = write_rows(tmp_path, repository.r2e_row(testbed, **changes))
    checkouts = repository.checkouts(f"moor/{repository.commit}")
    return one(r2e.FAMILY, path=str(rows), sandbox=factory.name, checkouts=str(checkouts))


def test_r2e_tasks_are_proven_and_judged(repository, factory, testbed, tmp_path):
    task = r2e_task(repository, factory, testbed, tmp_path)
    assert task.instruction.startswith("`rope` should") and r2e.FAMILY.entities(task) == ["knot", "moor.py", "rope"]
    assert proves(r2e.FAMILY, task, factory)

    def judge(files: dict[str, str]) -> tuple[str, float]:
        verdict = r2e.FAMILY.judge(task, {"agent1": files}, factory)
        return verdict.verdict, verdict.reward

    assert judge(FILES) == judge({}) == ("no_patch", 0.0)
    forged = "import sys\nprint('short test summary info')\nprint('PASSED x::test_rope')\nsys.exit(0)\n"
    paths = ("conftest.py", "tests/test_moor.py", "r2e_tests/test_1.py", "pytest.ini", "sitecustomize.py")
    hooks = dict.fromkeys(paths, forged)
    assert judge({**FILES, **hooks}) == ("no_patch", 0.0)
    assert judge({**solved("1"), **hooks}) == ("failed_tests", 0.0)
    assert judge({**solved("1", "2"), "conftest.py": "raise SystemExit\n"}) == ("passed", 1.0)
    assert judge({path: text for path, text in FILES.items() if path != "moor.py"}) == ("failed_tests", 0.0)


def test_an_agent_finds_no_tests_and_no_later_commits(repository, factory, testbed, tmp_path):
    task = r2e_task(repository, factory, testbed, tmp_path)
    needs = r2e.FAMILY.needs(task)
    assert needs.prepare
    with factory.create({}, needs.limits, needs.environment) as box:
        prepared = box.run(needs.prepare)
        assert prepared.exit_code == 0, prepared.output
        assert box.run("git log --all --oneline | wc -l; git branch -a | wc -l").output.split() == ["1", "1"]
        assert "return n * 2" not in box.run("git log --all -p").output
        assert box.run(f"ls r2e_tests; git cat-file -e {repository.commit}").exit_code != 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"expected_output_json": json.dumps({"test_rope": "PASSED"})}, "reference_fails"),
        (
            {"expected_output_json": json.dumps({"test_rope": "FAILED", "TestKnot.test_knot": "FAILED"})},
            "reference_fails",
        ),
        ({"parsed_commit_content": json.dumps({"file_diffs": []})}, "no_reference"),
    ],
)
def test_validate_rejects_broken_r2e_tasks(repository, factory, testbed, tmp_path, changes, reason):
    task = r2e_task(repository, factory, testbed, tmp_path, **changes)
    refusal = outcome(r2e.FAMILY, task, factory)
    assert isinstance(refusal, RejectedInput) and refusal.reason == reason, refusal


def test_tasks_without_an_environment_are_refused_by_name(repository, tmp_path):
    rows = write_rows(tmp_path, repository.r2e_row())
    task = one(r2e.FAMILY, path=str(rows), sandbox="bubblewrap")
    refusal = outcome(r2e.FAMILY, task, BubblewrapFactory())
    assert (
        isinstance(refusal, RejectedInput)
        and refusal.reason == "no_environment"
        and "params.checkouts" in refusal.detail
    )
    task = one(r2e.FAMILY, path=str(rows), sandbox="bubblewrap", checkouts=str(tmp_path))
    refusal = outcome(r2e.FAMILY, task, BubblewrapFactory())
    assert isinstance(refusal, RejectedInput) and "is no folder" in refusal.detail


def test_rows_that_cannot_be_read_are_refused_by_place(repository, tmp_path):
    good = repository.r2e_row()
    rows = [good, {**good, "commit_hash": "b" * 40, "expected_output_json": "{}"}, {"repo_name": "x"}, good]
    file = write_rows(tmp_path, *rows)
    file.write_text(file.read_text() + "no json\n[1]\n")
    matches = load(r2e.FAMILY, path=str(file))
    assert [(f.source, f.reason) for f in matches if isinstance(f, RejectedInput)] == [
        ("rows.jsonl:2", "unreadable_row"),
        ("rows.jsonl:3", "unreadable_row"),
        ("rows.jsonl:4", "repeated_task"),
        ("rows.jsonl:5", "unreadable_row"),
        ("rows.jsonl:6", "unreadable_row"),
    ]
    table = tmp_path / "table"
    table.mkdir()
    pq.write_table(pa.Table.from_pylist([good]), table / "part.parquet")
    (task,) = load(r2e.FAMILY, path=str(table), heldout_repos=["moor"])
    assert isinstance(task, Task) and task.split == "heldout"
    (other,) = load(r2e.FAMILY, path=str(table))
    assert isinstance(other, Task) and other.content_hash == task.content_hash
    with pytest.raises(ValueError, match="'moor'"):
        load(r2e.FAMILY, path=str(table), heldout_repos=["ships/Moor"])
    assert len(load(r2e.FAMILY, path=str(table), heldout_repos=["ships/anchor"])) == 1, "of rows that are not here"
    with pytest.raises(ValueError, match=r"\['nonsense'\]"):
        load(r2e.FAMILY, path=str(table), nonsense=1)
    with pytest.raises(FileNotFoundError, match="no .jsonl"):
        load(r2e.FAMILY, path=str(tmp_path / "absent"))


def test_r2e_solution_deletes_the_files_that_its_commit_deletes(repository, tmp_path):
    headers = {"old.py": {"misc_line": "deleted file mode 100644"}, "empty.py": {"misc_line": "new file mode 100644"}}
    diffs = [
        {"header": {"file": {"path": path}, **header}, "old_file_content": "x", "new_file_content": ""}
        for path, header in headers.items()
    ]
    rows = write_rows(tmp_path, repository.r2e_row(parsed_commit_content={"file_diffs": diffs}))
    assert one(r2e.FAMILY, path=str(rows)).payload["solution"] == {"old.py": None, "empty.py": ""}


def test_excluded_repositories_are_counted_and_do_not_make_the_suite_invalid(repository, tmp_path):
    good = repository.r2e_row()
    rows = [good, *({**good, "repo_name": "quay", "commit_hash": f"{n}" * 40} for n in (1, 2, 3))]
    items = load(r2e.FAMILY, path=str(write_rows(tmp_path, *rows)), exclude_repos=["quay"])
    tasks = [item for item in items if isinstance(item, Task)]
    left_out = [item for item in items if isinstance(item, RejectedInput)]
    assert len(tasks) == 1 and {(item.reason, item.detail[-4:]) for item in left_out} == {("excluded", "quay")}
    checks = {check.name: check for check in check_tasks(4, tasks, left_out, r2e.FAMILY)}
    assert checks["tasks_valid"].passed and checks["tasks_accounted"].passed
    assert checks["tasks_valid"].figures["excluded"] == 3
    broken = RejectedInput("x", "reference_fails", "it fails")
    assert check_tasks(5, tasks, [*left_out, broken], r2e.FAMILY)[1].passed, "one bad task of a small suite only warns"
    blocked = check_tasks(6, tasks, [*left_out, broken, replace(broken, source="y")], r2e.FAMILY)[1]
    assert not blocked.passed and "x: it fails" in blocked.message and "y: it fails" in blocked.message


# --- SWE-bench -----------------------------------------------------------------------------------------------------


def test_swe_bench_lists_of_tests_are_lists_or_their_text(repository, tmp_path):
    tests = ['t.py::a["x"]', "t.py::b['y']"]
    spelled = [tests, json.dumps(tests), repr(tests), None, "t.py::a", "[1]", "{}"]
    rows = [repository.swe_row(instance_id=f"m__m-{n}", FAIL_TO_PASS=value) for n, value in enumerate(spelled)]
    items = load(swe_bench.FAMILY, path=str(write_rows(tmp_path, *rows)))
    assert [item.payload["wanted"]["FAIL_TO_PASS"] for item in items if isinstance(item, Task)] == [tests] * 3
    refused = [item for item in items if isinstance(item, RejectedInput)]
    assert [item.source for item in refused] == [f"rows.jsonl:{n}" for n in (4, 5, 6, 7)]
    assert all("FAIL_TO_PASS" in item.detail for item in refused)


def test_swe_bench_test_files_are_all_paths_that_a_patch_changes(repository, tmp_path):
    patch = r"""diff --git a/my t/x.py b/my t/y.py
old mode 100644
new mode 100755
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
    task = one(swe_bench.FAMILY, path=str(write_rows(tmp_path, repository.swe_row(test_patch=patch))))
    assert task.payload["test_files"] == ["e é.py", "gone b.py", "my t/x.py", "my t/y.py", 't/größe "z.py']
    assert swe_bench.FAMILY.trials(task)[0].command.endswith("""'e é.py' 'my t/y.py' 't/größe "z.py'""")


@pytest.mark.parametrize(("last", "passed"), [("passed", True), ("failed", False)])
def test_swe_bench_name_cut_at_its_space_passes_if_all_its_tests_do(repository, tmp_path, last, passed):
    """SWE-bench's own lists cut names so: 28 of the 223 tasks of Lite outside sympy have one."""
    row = repository.swe_row(FAIL_TO_PASS='["t.py::a[x"]', PASS_TO_PASS='["t.py::b[1 2]"]')
    task = one(swe_bench.FAMILY, path=str(write_rows(tmp_path, row)))
    outcomes = {"t.py::a[x w]": "passed", "t.py::b[1 2]": "passed", "t.py::a[x y]": last}
    (trial,) = swe_bench.FAMILY.trials(task)
    assert trial.passes(TestRun(GradedRun("", 0, outcomes=outcomes)))[0] is passed


def test_swe_bench_tasks_are_proven_and_judged(repository, factory, testbed, tmp_path):
    rows = write_rows(
        tmp_path,
        repository.swe_row(),
        repository.swe_row(instance_id="s__s-1", repo="sympy/sympy"),
        repository.swe_row(instance_id="m__m-8", FAIL_TO_PASS="[]"),
    )
    checkouts = repository.checkouts("moor__moor-7")
    params = {"path": str(rows), "sandbox": factory.name, "checkouts": str(checkouts), "images": testbed}
    task, *refused = load(swe_bench.FAMILY, **params)
    assert isinstance(task, Task)
    assert [r.detail[:22] for r in refused if isinstance(r, RejectedInput)] == [
        "nothing reads the repo",
        "FAIL_TO_PASS is empty:",
    ]
    assert proves(swe_bench.FAMILY, task, factory)

    def judge(files: dict[str, str]) -> str:
        return swe_bench.FAMILY.judge(task, {"agent1": files}, factory).verdict

    assert judge(solved("1")) == "passed"
    assert judge(solved("2")) == "failed_tests"
    # A test that must go on passing is broken, the one that must begin to pass does.
    assert judge({**solved("1"), "moor.py": "def rope(n):\n    return n * 2\n"}) == "failed_tests"
    assert judge({**solved("1"), "tests/test_moor.py": "def test_rope(): pass\n", "conftest.py": "x"}) == "passed"
    assert judge({**FILES, "tests/test_moor.py": "def test_rope(): pass\ndef test_there(): pass\n"}) == "no_patch"


def test_tests_are_read_where_a_patch_fills_the_limit_of_a_read(repository, tmp_path):
    checkouts = repository.checkouts("moor__moor-7")
    params = {"checkouts": str(checkouts), "sandbox": "bubblewrap", **SMALL, "disk_gib": 1 / 1024}
    task = one(swe_bench.FAMILY, path=str(write_rows(tmp_path, repository.swe_row())), **params)
    deep = "/".join(["z" * 250] * 12)
    files = {**solved("1"), **{f"{deep}/{number}": "" for number in range(400)}}
    verdict = swe_bench.FAMILY.judge(task, {"agent1": files}, BubblewrapFactory())
    assert (verdict.verdict, verdict.details["trust"]["blind"]) == ("passed", 1)


# --- through the graph ---------------------------------------------------------------------------------------------


def test_reference_and_null_engines_run_any_suite(repository, factory, testbed, tmp_path):
    """From specs to tables, one agent and two: the reference solves every task, the null none."""
    folder = tmp_path / "specs"
    rows = {"r2e": repository.r2e_row(testbed)}
    checkouts = repository.checkouts(f"moor/{repository.commit}", "moor_task/task7")
    suites: dict[str, dict[str, Any]] = {
        name: {
            "path": str(write_rows(_made(tmp_path / name), row)),
            "checkouts": str(checkouts),
            "sandbox": factory.name,
        }
        for name, row in rows.items()
    }
    root = repository.cooperbench().rename(tmp_path / "bench")
    suites["cooperbench"] = bench(repository, factory, root)
    agent = "max_steps = 4\nmax_tokens = 4000\nmax_model_len = 16000\n"
    for family, params in suites.items():
        suite = f"own_{family}"
        lines = [f"{key} = {_toml(value)}" for key, value in {**SMALL, **params}.items()]
        text = f'title = "x"\nfamily = "{family}"\n[params]\n' + "\n".join(lines)
        _made(folder / "suites").joinpath(f"{suite}.toml").write_text(text)
        prompt = "coop" if family == "cooperbench" else "solo"
        for engine in ("reference", "null"):
            text = (
                f'title = "x"\nkind = "live"\nsuite = "{suite}"\nsandbox = "{factory.name}"\n'
                f'[engine]\nkind = "{engine}"\nteacher = "{engine}"\n[agent]\nprompt = "{prompt}"\n{agent}'
            )
            _made(folder / "rollout_sets").joinpath(f"{suite}_{engine}.toml").write_text(text)
    resources = Resources(lake=Lake(tmp_path / "lake"), specs_folder=folder, concurrency=2)
    for suite in (f"own_{family}" for family in suites):
        created = tasks_asset.execute(suite, resources).manifest
        assert not created.blocked and created.rows == {"tasks": 1, "quarantined": 0}, suite
        for engine, reward in (("reference", 1.0), ("null", 0.0)):
            manifest = raw_rollouts.execute(f"{suite}_{engine}", resources).manifest
            assert not manifest.blocked
            (row,) = resources.lake.read(
                Ref("raw_rollouts", "rollout_set", f"{suite}_{engine}"), "rollouts"
            ).to_pylist()
            verdict = json.loads(row["outcome"])
            assert (row["error"], row["exit_status"], verdict["reward"]) == (None, "Submitted", reward), (suite, row)
        agents = resources.lake.read(Ref("raw_rollouts", "rollout_set", f"{suite}_reference"), "agents").to_pylist()
        assert all("+    return n * 2" in agent["patch"] for agent in agents if agent["feature_id"] in ("1", "issue"))


def _toml(value: Any) -> str:
    """Return a value as TOML writes it, also a table of texts."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.mark.parametrize(
    "path",
    [
        "uv.toml",
        "a/uv.lock",
        "poetry.lock",
        "requirements.txt",
        "requirements-dev.in",
        "requirements/test.txt",
        "go.mod",
    ]
    + ["constraints.txt", "Cargo.toml", "pnpm-lock.yaml", ".npmrc", ".python-version", "Pipfile", "pip.conf"],
)
def test_files_that_decide_what_a_runner_installs_do_not_count(path):
    assert counted_changes({}, {"a.py": "1", path: "index-url = 'http://evil'"}) == {"a.py": "1"}


@pytest.mark.parametrize("tag", ["", "v1.2"])
def test_forgetting_the_history_keeps_ignored_tracked_files_and_the_last_tag(tmp_path, tag):
    def bash(command: str) -> str:
        environment = os.environ | GIT
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    bash("git init -q; printf 'build\n*.dat\n' > .gitignore; touch 'a b.dat' gone.dat ':(top)*.dat' src.py")
    bash(f"git add -A -f; git commit -q -m one; {f'git tag {tag};' if tag else ''} git commit -q --allow-empty -m two")
    bash("git tag solved; git checkout -q HEAD~1; rm gone.dat; mkdir build")
    bash(f"touch build/x new.dat; {places.FORGET_HISTORY}")
    assert bash("git ls-files -z").split("\0")[:-1] == [".gitignore", ":(top)*.dat", "a b.dat", "src.py"]
    assert bash("git log --all --format=%s; git tag; git status --porcelain").split() == ["base", *filter(None, [tag])]


def test_files_with_similar_names_count():
    after = dict.fromkeys(["requirements.py", "uv.py", "docs/requirements.md", "go.py", "lock.json", "a/cargo.rs"], "1")
    assert counted_changes({}, after) == after


def test_counted_changes_excludes_tests_and_runner_files():
    before = {"a.py": "1", "tests/x.py": "1", "src/pkg/core.py": "1", "gone.py": "1"}
    after = {
        "a.py": "2", "src/pkg/core.py": "1", "tests/x.py": "2", "new/b.py": "3", "pkg/test_b.py": "1", "m_test.go": "1",
        "conftest.py": "1", "s/conftest.py": "1", "setup.cfg": "1", ".git/config": "1", "x.pth": "1", "contest.py": "4",
    }  # fmt: skip
    assert counted_changes(before, after) == {"a.py": "2", "new/b.py": "3", "contest.py": "4", "gone.py": None}
    assert counted_changes(before, {}) == {}


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        *(("pkg/new/types.py", True), ("pkg/new/io.py", True), ("pkg/plain/logging.py", True), ("new/json/a.py", True)),
        *(("pkg/json.py", True), ("json.py", False), ("src/json.py", False), ("src/types/__init__.py", False)),
        *(("checks/random.py", False), ("tokenize/x.py", False), ("pkg/vendored/copy.py", False)),
    ],
)
def test_modules_named_as_the_standard_librarys_count_where_nothing_imports_them_instead(path: str, counts: bool):
    before = {"pkg/__init__.py": "", "src/a.py": "", "pkg/vendored/x.py": ""}
    after = {**before, "pkg/new/__init__.py": "", path: "x", "src/__init__.py": "", "pkg/vendored/__init__.py": ""}
    changes = counted_changes(before, after, ["checks/test_x.py"])
    assert (path in changes) == counts
    assert (path in refused_changes(before, after, ["checks/test_x.py"])) != counts


@pytest.mark.parametrize(
    ("own", "counted"),
    [
        (["tests/test_knot.py"], ["pkg/testing/a.py", "pkg/tests.py", "src/pkg/test/client.py", "pkg/testdata/x.json"]),
        (
            ["pkg/knots/tests/test_knot.py"],
            ["pkg/testing/a.py", "pkg/tests.py", "src/pkg/test/client.py", "pkg/testdata/x.json"],
        ),
        (["tests/knots/tests.py", "testdata/x"], ["pkg/testing/a.py", "src/pkg/test/client.py"]),
        (["testing/test_knot.py", "test/data.json"], ["pkg/tests.py", "pkg/testdata/x.json", "pkg/tests/a.py"]),
        ([], []),
    ],
)
def test_sources_of_a_package_count_whatever_their_names_unless_the_tasks_own_tests_have_those(own, counted):
    always = ["tests/a.py", "testing/a.py", "tests.py", "pkg/test_a.py", "pkg/testing/test_a.py"]
    named = ["pkg/testing/a.py", "pkg/tests.py", "pkg/tests/a.py", "src/pkg/test/client.py", "pkg/testdata/x.json"]
    before = {"pkg/__init__.py": "", "src/pkg/__init__.py": "", "src/pkg/test/client.py": "1", "tests/__init__.py": ""}
    after = {**before, **dict.fromkeys([*always, *named, "plain/testing/a.py"], "2")}
    assert sorted(counted_changes(before, after, own)) == sorted(counted)


@pytest.mark.parametrize("path", ["pkg/testing/knot.py", "pkg/tests.py"])
def test_honest_work_on_a_shipped_module_named_as_tests_is_rewarded(path: str) -> None:
    module = path.removesuffix(".py").replace("/", ".")
    with tempfile.TemporaryDirectory() as folder:
        shipped = {"pkg/__init__.py": "", "pkg/testing/__init__.py": "", path: "def knot(n):\n    return n\n"}
        repository = Repository(Path(folder), shipped)
        hidden = f"from {module} import knot\n\n\ndef test_knot():\n    assert knot(4) == 47\n"
        start = {**FILES, **shipped}
        solution = {**start, path: "def knot(n):\n    return n + 43\n"}
        row = repository.swe_row(
            patch=repository.patch(start, solution),
            test_patch=repository.patch(start, {**start, "tests/test_shipped.py": hidden}),
            FAIL_TO_PASS=["tests/test_shipped.py::test_knot"],
            PASS_TO_PASS=[],
        )
        checkouts = repository.checkouts("moor__moor-7")
        params = {"sandbox": "bubblewrap", "path": str(write_rows(Path(folder), row)), "checkouts": str(checkouts)}
        (loaded,) = swe_bench.FAMILY.load("s", 0, {**SMALL, **params})
        assert isinstance(loaded, Task)
        (task,) = swe_bench.FAMILY.validate([loaded], BubblewrapFactory())
        assert isinstance(task, Task), task
        verdict = swe_bench.FAMILY.judge(task, {"agent1": solution}, BubblewrapFactory())
        assert (verdict.reward, verdict.details["refused"], verdict.details["verdict_trust"]) == (1.0, [], "blind")
