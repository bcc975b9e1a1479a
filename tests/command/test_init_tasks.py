"""`etpi init --tasks`: the commands of docs/own_tasks.md on a small repository, Harbor's folders and SWE-bench rows."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from etpi import cli
from etpi.init import tasks
from etpi_assets.specs.load import SpecError, load_specs
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import Task
from etpi_assets.tasks.swe_bench import FAMILY
from etpi_assets.tasks.task_checks import check_tasks
from etpi_resources.lake.lake import Lake, Ref
from tests.support.docs_pages import run_blocks, shell_blocks
from tests.support.harbor import make_folder
from tests.support.repositories import Repository

pytestmark = pytest.mark.slow
PAGE = (Path(__file__).parents[2] / "docs/own_tasks.md").read_text(encoding="utf-8")
KNOT = "\n\ndef knot{n}(length):\n    return length + {n}\n"
KNOT_TEST = "\n\ndef test_knot{n}():\n    assert rope.knot{n}(1) == 1 + {n}\n"


class History:
    """A repository whose package is in `src`, committed a day apart."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.day = folder, 0
        folder.mkdir()
        self.git("init", "-q")
        self.write("src/knots/__init__.py", "")
        self.write("src/knots/rope.py", "def length(n):\n    return n\n")
        self.write(
            "tests/test_rope.py", "from knots import rope\n\n\ndef test_zero():\n    assert rope.length(0) == 0\n"
        )
        self.commit("Start")

    def write(self, path: str, text: str) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as out:
            out.write(text)

    def change(self, code: str, test: str, message: str) -> None:
        self.write("src/knots/rope.py", code)
        self.write("tests/test_rope.py", test)
        self.commit(message)

    def commit(self, message: str) -> None:
        self.day += 1
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message)

    def git(self, *words: str) -> str:
        date = f"2026-01-{max(1, self.day):02d}T00:00:00Z"
        variables = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
        identity = ("-c", "user.name=a", "-c", "user.email=a@localhost")
        command = ["git", *identity, "-C", str(self.folder), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | variables).stdout


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder beside the repository `knots`, in which the page's commands were run."""
    root = tmp_path_factory.mktemp("own")
    for folder in (root, *root.parents):
        if folder.owner() == root.owner() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    history = History(root / "knots")
    for n in (1, 2, 3):
        history.change(KNOT.format(n=n), KNOT_TEST.format(n=n), f"Add knot{n}, which adds {n} to a length")
    history.write("README.md", "words\n")
    history.commit("Words")
    history.change("\n\n# a remark\n", "\n\ndef test_one():\n    assert rope.length(1) == 1\n", "Test more")
    broken = "\n\ndef test_broken():\n    assert rope.broken(1) == 2\n"
    history.change("\n\ndef broken(n):\n    return n\n", broken, "Break")
    folder = root / "work"
    folder.mkdir(mode=0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("ETPI_DATA", raising=False)
        patch.setenv("DAGSTER_HOME", str(folder / "home"))
        block = re.search(r"```sh\n(.*?)```", PAGE, re.DOTALL)
        assert block
        for line in block[1].splitlines():
            assert cli.main(shlex.split(line)[1:]) == 0, line
    return folder


def rows_of(work: Path) -> list[dict]:
    return [json.loads(line) for line in (work / "tasks/knots/tasks.jsonl").read_text().splitlines()]


def test_commits_with_tests_that_failed_before_become_proved_tasks(work: Path) -> None:
    rows = rows_of(work)
    assert [row["problem_statement"].partition(",")[0] for row in rows] == ["Add knot1", "Add knot2", "Add knot3"]
    assert [row["FAIL_TO_PASS"] for row in rows] == [[f"tests/test_rope.py::test_knot{n}"] for n in (1, 2, 3)]
    assert rows[1]["PASS_TO_PASS"] == ["tests/test_rope.py::test_knot1", "tests/test_rope.py::test_zero"]
    table = Lake(work / "data").read(Ref("tasks", "suite", "knots"), "tasks").to_pylist()
    assert {row["task_id"]: row["split"] for row in table} == {
        rows[0]["instance_id"]: "train", rows[1]["instance_id"]: "train", rows[2]["instance_id"]: "heldout",
    }  # fmt: skip


def test_agent_finds_neither_the_solution_nor_a_later_commit(work: Path) -> None:
    for row in rows_of(work):
        repo = work / "tasks/knots/checkouts" / row["instance_id"] / "repo"
        log = subprocess.run(["git", "-c", "safe.directory=*", "-C", str(repo), "log", "--all", "--format=%s"],
                             check=True, capture_output=True, text=True)  # fmt: skip
        assert log.stdout.split() == ["base"]
        number = row["problem_statement"].removeprefix("Add knot")[0]
        assert f"knot{number}" not in (repo / "src/knots/rope.py").read_text()
        assert f"knot{number}" not in (repo / "tests/test_rope.py").read_text()


def test_references_are_rolled_out_and_exported(work: Path) -> None:
    lake = Lake(work / "data")
    outcomes = lake.read(Ref("raw_rollouts", "rollout_set", "knots"), "rollouts")["outcome"].to_pylist()
    assert [json.loads(text)["verdict"] for text in outcomes] == ["passed", "passed"], (
        "the held-out task is not among them"
    )
    assert (work / "out/data/train.parquet").is_file()


@pytest.mark.long
def test_commands_of_reinforcement_measure_the_base_first_and_name_what_stops_learning(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = work.parent / "reinforced"
    folder.mkdir(mode=0o755)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("ETPI_DATA", raising=False)
    monkeypatch.setenv("DAGSTER_HOME", str(folder / "home"))
    block = next(block for block in re.findall(r"```\w*\n(.*?)```", PAGE, re.DOTALL) if "--rl" in block)
    lines = [shlex.split(line, comments=True)[1:] for line in block.splitlines()]
    init, baseline, run = [["tiny" if "$COMMIT" in word else word for word in line] for line in lines]
    assert cli.main(init) == 0 and cli.main(baseline) == 0
    assert "never solved" in capsys.readouterr().out
    assert cli.main(run) == 1
    assert "groups have equal rewards" in capsys.readouterr().err.partition("etpi: failed")[2]


@pytest.mark.long
def test_trial_on_a_cpu_ends_in_a_student_and_a_held_out_result(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == tmp_path.owner() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    (tmp_path / "trial").mkdir(mode=0o755)
    (tmp_path / "gitconfig").write_text("[user]\n name = a\n email = a@localhost\n")
    [block] = shell_blocks(PAGE, "--model tiny --rl")
    run_blocks([block], tmp_path / "trial", GIT_CONFIG_GLOBAL=str(tmp_path / "gitconfig"))
    lake = Lake(tmp_path / "trial/data")
    rewards = lake.read(Ref("rl_rewards", "experiment", "tables"), "rewards")["value"].to_pylist()
    assert {-1.0, 1.0} <= set(rewards), "some rollouts of reinforcement are solved, others are not"
    changes = lake.read(Ref("experiment_report", "experiment", "tables"), "changes").to_pylist()
    assert {(row["before"], row["after"], row["tasks"]) for row in changes if row["metric"] == "solved"} == {
        ("base", "rl", 3)
    }
    assert (tmp_path / "trial/student/model.safetensors").is_file()


def test_counts_of_commits_reconcile(work: Path, tmp_path: Path) -> None:
    from etpi.init.git_tasks import mine
    from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory

    mined = mine(work.parent / "knots", work / "again", None, 4, BubblewrapFactory())
    assert mined.looked == 4
    assert mined.passed_over == Counter({"no test file changes": 1})
    assert {reason: len(commits) for reason, commits in mined.refused.items()} == {
        "no test failed before and passes after": 2
    }
    assert len(mined.rows) == 1


def test_commits_that_add_move_or_delete_test_files_of_any_name_become_tasks(work: Path, tmp_path: Path) -> None:
    from etpi.init.git_tasks import mine
    from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory

    history = History(tmp_path / "names")
    history.write("tests/test_old.py", "def test_old():\n    assert True\n")
    history.write("tests/test_gone.py", "def test_gone():\n    assert True\n")
    history.commit("More tests")
    for n, name in enumerate(("tests/test_größe.py", "tests/test a b.py", 'tests/test_"q".py', "tests/test_new.py"), 1):
        history.write("src/knots/rope.py", KNOT.format(n=n))
        if name == "tests/test_new.py":
            history.git("mv", "tests/test_old.py", name)
            history.git("rm", "-q", "tests/test_gone.py")
        history.write(name, "from knots import rope\n" + KNOT_TEST.format(n=n))
        history.commit(f"Add knot{n}")
    history.write("src/knots/rope.py", KNOT.format(n=9))
    history.write("tests/test_rope.py", KNOT_TEST.format(n=9))
    history.git("add", "-A")
    history.git("commit", "-q", "--allow-empty-message", "-m", "")

    mined = mine(history.folder, work / "names", None, 5, BubblewrapFactory())
    assert not mined.refused
    assert [row["problem_statement"] for row in mined.rows] == [f"Add knot{n}" for n in (1, 2, 3, 4)]
    assert mined.passed_over.total() == 1, "an agent would get no text"


def test_specs_that_exist_are_refused_before_tasks_are_made(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(work)
    before = (work / "tasks/knots/tasks.jsonl").stat().st_mtime_ns
    assert cli.main(["init", "--tasks", "../knots", "--yes"]) == 1
    assert "--force" in capsys.readouterr().err
    assert (work / "tasks/knots/tasks.jsonl").stat().st_mtime_ns == before


def test_held_out_tasks_that_are_not_the_latest_are_refused(work: Path) -> None:
    rows = rows_of(work)
    chosen = {**FAMILY.params, "heldout_tasks": [rows[0]["instance_id"]]}
    read = [FAMILY.read("s", row, chosen) for row in rows]
    (check,) = [c for c in check_tasks(len(read), read, [], FAMILY) if c.name == "split_by_repo"]
    assert not check.passed
    assert "created_at" in check.message


def test_harbor_folders_and_rows_are_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "c"):
        make_folder(tmp_path / "harbor" / name)
    assert tasks.kind_of(tmp_path / "harbor") == "harbor"
    described = tasks.from_harbor(tmp_path / "harbor", str(tmp_path))
    suite, _ = tasks.new_specs("mine", described)
    (tmp_path / "specs/suites").mkdir(parents=True)
    (tmp_path / "specs/suites/mine.toml").write_text(suite.text)
    spec = load_specs().suites["mine"]
    loaded = [t for t in load_family("harbor").load("mine", 0, spec.params) if isinstance(t, Task)]
    assert Counter(task.split for task in loaded) == {"train": 2, "heldout": 1}
    folder = tmp_path / "rows"
    folder.mkdir()
    row = Repository(folder).swe_row()
    rows = [
        {**row, "instance_id": f"{repo}-{n}", "repo": repo}
        for repo, count in (("x", 4), ("y", 1))
        for n in range(count)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert tasks.kind_of(folder / "rows.jsonl") == "rows"
    assert 'heldout_repos = ["y"]' in tasks.from_rows(folder / "rows.jsonl", "repository", None).params
    assert 'sandbox = "docker"' in "".join(tasks.from_rows(folder / "rows.jsonl", "time", None).params)


def test_clone_of_tasks_is_read_and_a_repository_with_example_tasks_is_mined(tmp_path: Path) -> None:
    row = Repository(tmp_path).swe_row()
    for kind, path, text in (
        ("harbor", "task.toml", ""),
        ("harbor", "tasks/a/task.toml", ""),
        ("git", "examples/tasks/a/task.toml", ""),
        ("cooperbench", "x_task/task1/feature1/feature.md", ""),
        ("rows", "data/test.jsonl", json.dumps(row)),
        ("git", "data/other.jsonl", "{}"),
    ):
        clone = tmp_path / path.replace("/", "_")
        (clone / ".git").mkdir(parents=True)
        (clone / path).parent.mkdir(parents=True, exist_ok=True)
        (clone / path).write_text(text)
        assert tasks.kind_of(clone) == kind, path
    (tmp_path / "old/a").mkdir(parents=True)
    (tmp_path / "old/a/task.yaml").write_text("instruction: x\n")
    with pytest.raises(SpecError, match="harbor task migrate"):
        tasks.kind_of(tmp_path / "old")


def test_folders_without_tasks_and_unfit_interpreters_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nothing").mkdir()
    for words, reason in (
        (["nothing"], "neither a git repository"),
        (["absent"], "there is nothing there"),
    ):
        assert cli.main(["init", "--tasks", *words, "--yes"]) == 1
        assert reason in capsys.readouterr().err
    History(tmp_path / "repo")
    assert cli.main(["init", "--tasks", "repo", "--python", "/bin/false", "--yes"]) == 1
    assert "/bin/false" in capsys.readouterr().err
    assert cli.main(["init", "--tasks", "repo", "--yes"]) == 1
    assert "no commit makes a task" in capsys.readouterr().err
    assert not (tmp_path / "specs").exists()
