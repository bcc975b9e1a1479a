"""Repositories of strangers: programs that their configuration, attributes and trees name do not run here."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from etpi.init import git_tasks
from etpi.init.git_tasks import git, objects_of
from etpi_assets.specs.load import SpecError
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory

HOOKS = ("pre-commit", "commit-msg", "post-commit", "post-checkout", "post-index-change", "reference-transaction")


class Hostile:
    """A repository with one commit that changes code and a test; `ran` lists the programs that were run."""

    def __init__(self, root: Path) -> None:
        self.folder, self._log = root / "hostile", root / "ran"
        self.folder.mkdir()
        self._git("init", "-q")
        for number in (1, 2):
            for name in ("code.py", "tests/test_code.py", "data.bin"):
                file = self.folder / name
                file.parent.mkdir(exist_ok=True)
                file.write_text(f"value = {number}\n")
            (self.folder / ".gitattributes").write_text("* diff=spy filter=spy\n")
            self._git("add", "-A")
            self._git("commit", "-q", "-m", f"commit {number}")

    def _git(self, *words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@localhost")
        subprocess.run(["git", *identity, "-C", str(self.folder), *words], check=True, capture_output=True)

    def program(self, name: str) -> str:
        file = self.folder / ".git" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\necho {name} >> {self._log}\ncat\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        return str(file)

    def configure(self, key: str, value: str) -> None:
        self._git("config", key, value)

    @property
    def ran(self) -> list[str]:
        return self._log.read_text().split() if self._log.exists() else []


@pytest.fixture
def hostile(tmp_path: Path) -> Hostile:
    return Hostile(tmp_path)


def _mined(hostile: Hostile, to: Path) -> list[git_tasks.Candidate | str]:
    """What `mine` does with git, without the runs of the tests."""
    with objects_of(hostile.folder) as objects:
        items = list(git_tasks._candidates(objects, 10))
        for item in items:
            if isinstance(item, git_tasks.Candidate):
                git_tasks._snapshot(objects, item.base, to / "repo")
    return items


@pytest.mark.parametrize(
    "key",
    ["diff.spy.textconv", "diff.spy.command", "diff.external", "core.fsmonitor", "gpg.program", "filter.spy.clean",
     "filter.spy.smudge", "filter.spy.process", "core.pager", "core.sshCommand", "tar.tar.command", "core.editor"],
)  # fmt: skip
def test_program_of_the_repositorys_configuration_does_not_run(hostile: Hostile, tmp_path: Path, key: str) -> None:
    hostile.configure(key, hostile.program(key))
    for name in ("log.showSignature", "commit.gpgSign", "filter.spy.required"):
        hostile.configure(name, "true")
    (candidate, _) = _mined(hostile, tmp_path / "to")
    assert isinstance(candidate, git_tasks.Candidate) and "value = 2" in candidate.patch
    assert (tmp_path / "to" / "repo" / "code.py").read_text() == "value = 1\n"
    assert hostile.ran == []


def test_hooks_do_not_run(hostile: Hostile, tmp_path: Path) -> None:
    for name in HOOKS:
        hostile.program(f"hooks/{name}")
    hostile.configure("core.hooksPath", str(hostile.folder / ".git" / "hooks"))
    _mined(hostile, tmp_path / "to")
    assert hostile.ran == []


def test_configuration_inside_a_tree_is_not_written(hostile: Hostile, tmp_path: Path) -> None:
    program = hostile.program("filter")
    config = f'[core]\n\tfsmonitor = "{program}"\n[filter "spy"]\n\tclean = "{program}"\n'

    def stored(*words: str, text: str) -> str:
        command = ["git", "-C", str(hostile.folder), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, input=text).stdout.strip()

    blob = stored("hash-object", "-w", "--stdin", text=config)
    inner = stored("mktree", text=f"100644 blob {blob}\tconfig\n")
    tree = stored("mktree", text=f"040000 tree {inner}\t.git\n100644 blob {blob}\tcode.py\n")
    commit = stored("-c", "user.name=a", "-c", "user.email=a@b", "commit-tree", tree, "-m", "x", text="")
    with objects_of(hostile.folder) as objects, pytest.raises(subprocess.CalledProcessError, match="archive"):
        git_tasks._snapshot(objects, commit, tmp_path / "repo")
    assert not (tmp_path / "repo" / ".git").exists()


def test_users_configuration_is_not_read(hostile: Hostile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".gitconfig").write_text(f"[diff]\n\texternal = {hostile.program('own')}\n[init]\n\ttemplateDir = /x\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", hostile.program("variable"))
    _mined(hostile, tmp_path / "to")
    assert hostile.ran == []


def test_partial_clone_fetches_nothing(hostile: Hostile, tmp_path: Path) -> None:
    hostile.configure("core.repositoryFormatVersion", "1")
    hostile.configure("extensions.partialClone", "origin")
    hostile.configure("remote.origin.url", f"ext::{hostile.program('remote')}")
    hostile.configure("protocol.ext.allow", "always")
    objects = hostile.folder / ".git" / "objects"
    name = git(hostile.folder, "rev-parse", "HEAD:code.py").decode().strip()
    (objects / name[:2] / name[2:]).unlink()
    with pytest.raises(SpecError, match=name[:7]):
        git_tasks.mine(hostile.folder, tmp_path / "to", None, 10, BubblewrapFactory())
    assert hostile.ran == []


def test_shallow_clone_and_worktree_are_read(hostile: Hostile, tmp_path: Path) -> None:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null"}
    clone, tree = tmp_path / "clone", tmp_path / "tree"
    for line in (
        ["git", "clone", "-q", "--depth=1", f"file://{hostile.folder}", str(clone)],
        ["git", "-C", str(clone), "worktree", "add", "-q", str(tree)],
    ):
        subprocess.run(line, check=True, capture_output=True, env=environment)
    for folder in (clone, tree):
        with objects_of(folder) as objects:
            assert list(git_tasks._candidates(objects, 10)) == ["no single parent"]


@pytest.mark.parametrize("name", ["config", "HEAD", "shallow"])
def test_pipe_in_a_repository_is_not_waited_for(hostile: Hostile, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(git_tasks, "_SECONDS", 1)
    file = hostile.folder / ".git" / name
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    with pytest.raises(subprocess.CalledProcessError), objects_of(hostile.folder):
        pass


def test_folder_that_is_no_repository_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=str(tmp_path)):
        git_tasks.mine(tmp_path, tmp_path / "to", None, 10, BubblewrapFactory())
