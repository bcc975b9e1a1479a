"""The commands of docs/real_suite.md, on small repositories in CooperBench's form: proved, graded, and graded again
without network."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from etpi import cli
from etpi.init import tasks
from etpi_assets.specs.load import SpecError
from etpi_resources.lake.lake import Lake, Ref
from tests.support.docs_pages import run_blocks, shell_blocks
from tests.support.repositories import Repository

PAGE = (Path(__file__).parents[2] / "docs/real_suite.md").read_text(encoding="utf-8")
HELD_OUT, TRAINED = "samuelcolvin_dirty_equals_task", "pallets_jinja_task"
URL = "https://github.com/moor/moor.git"
DOCKERFILE = f"FROM python\nRUN git clone {URL} repo && \\\n    cd repo && \\\n    git checkout {{}}\n"


def make_folder(root: Path) -> Repository:
    """Make `cooperbench` below a folder, with three repositories that Dockerfiles name."""
    moor = Repository(root / "moor")
    source = moor.cooperbench() / "moor_task"
    (source / "task7/Dockerfile").write_text(DOCKERFILE.format(moor.commit))
    for name in (TRAINED, HELD_OUT, "other_task"):
        shutil.copytree(source, root / "work/cooperbench" / name)
    return moor


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, mitmproxy: Path) -> Path:
    try:
        socket.getaddrinfo("pypi.org", 443)
    except OSError as error:
        pytest.skip(f"the package index is not to be had: {error}")
    root = tmp_path_factory.mktemp("real")
    for folder in (root, *root.parents):
        if folder.owner() == root.owner() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    (root / "moor").mkdir()
    moor = make_folder(root)
    git = root / "gitconfig"
    git.write_text(f'[url "{moor.repo}"]\n insteadOf = {URL}\n[safe]\n directory = *\n')
    run_blocks(shell_blocks(PAGE), root / "work", GIT_CONFIG_GLOBAL=str(git))
    return root / "work"


@pytest.mark.long
def test_named_repositories_are_proved_and_the_smallest_is_held_out(work: Path) -> None:
    rows = Lake(work / "data").read(Ref("tasks", "suite", "pairs"), "tasks").to_pylist()
    assert {row["task_id"]: row["split"] for row in rows} == {
        f"{TRAINED}/7/f1_f2": "train", f"{HELD_OUT}/7/f1_f2": "heldout",
    }  # fmt: skip
    assert not (work / "specs/experiments").exists(), "no student was named"


@pytest.mark.long
def test_both_lakes_grade_the_reference_as_solved(work: Path) -> None:
    for lake in (Lake(work / "data"), Lake(work / "offline")):
        rows = lake.read(Ref("raw_rollouts", "rollout_set", "pairs"), "rollouts").to_pylist()
        assert [(row["task_id"], json.loads(row["outcome"])["reward"]) for row in rows] == [(f"{TRAINED}/7/f1_f2", 1.0)]


@pytest.mark.slow
def test_repository_that_the_folder_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "moor").mkdir()
    make_folder(tmp_path)
    monkeypatch.chdir(tmp_path / "work")
    folder = tmp_path / "work/cooperbench"
    with pytest.raises(SpecError, match="absent_task"):
        tasks.from_cooperbench(folder, ["absent_task", TRAINED], None)
    assert tasks.kind_of(folder) == "cooperbench"
    params = "\n".join(tasks.from_cooperbench(folder, [], None).params)
    assert 'images = "build"' in params and 'sandbox = "docker"' in params
    (folder / TRAINED / "task7/Dockerfile").unlink()
    assert "images" not in "\n".join(tasks.from_cooperbench(folder, [], None).params)
    assert cli.main(["init", "--tasks", "cooperbench", "--repos", "absent_task", "--yes"]) != 0
