"""Judge `terminal_tiny`: compare the final workspace with the expected one.

The whole tree is compared, with types, modes and bytes, so a command that also destroys its input fails, and a file
that was made unreadable, a link or a folder is not removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from etpi_assets.tasks.family import Task, Verdict
from etpi_resources.sandboxes import Sandbox

FILE, FOLDER = "file", "folder"


def wanted(task: Task) -> dict[str, str]:
    """Return the expected files."""
    files = {**task.payload["files"], **task.payload["left"]}
    return {path: text for path, text in files.items() if text is not None}


def judge(task: Task, files: Mapping[str, str], tree: Mapping[str, str] | None = None) -> Verdict:
    """Verdicts: passed (reward 1); no_patch (nothing changed), failed_tests, both 0. `details`: `wrong`, the paths that
    are missing, unexpected, of another kind or have other content; white space at the end of changed files is ignored.

    Args:
        files: the text files, path -> text.
        tree: the result of `read_tree`, if there is a sandbox; else only `files` is compared.
    """
    tree = _tree(files) if tree is None else tree
    if dict(files) == task.payload["files"] and dict(tree) == _tree(files):
        return Verdict(0.0, "no_patch", {"wrong": sorted(task.payload["left"])})
    expected = wanted(task)
    wrong = {path for path in {*expected, *files} if not _same(task, path, expected.get(path), files.get(path))}
    wrong |= {path for path, _ in tree.items() ^ _tree(expected).items()}
    return Verdict(float(not wrong), "failed_tests" if wrong else "passed", {"wrong": sorted(wrong)})


def read_tree(machine: Sandbox) -> dict[str, str]:
    """Return the kinds of everything in a workspace by path: FILE and FOLDER with the modes that new ones have, and
    other texts for anything else."""
    done = machine.run("umask; /usr/bin/find . -mindepth 1 -printf '%y %m %P\\0'")
    umask, _, listed = done.output.partition("\n")
    if done.exit_code or done.truncated:
        return {".": "unreadable"}
    mask = int(umask, 8)
    kinds = {f"f {0o644 & ~mask:o}": FILE, f"f {0o666 & ~mask:o}": FILE, f"d {0o777 & ~mask:o}": FOLDER}
    entries = [entry.split(" ", 2) for entry in listed.split("\0") if entry]
    return {path: kinds.get(f"{kind} {mode}", f"{kind} {mode}") for kind, mode, path in entries}


def _tree(files: Iterable[str]) -> dict[str, str]:
    """Return the kinds of files and of the folders above them, by path."""
    folders = {str(folder) for path in files for folder in PurePosixPath(path).parents} - {"."}
    return {**dict.fromkeys(folders, FOLDER), **dict.fromkeys(files, FILE)}


def _same(task: Task, path: str, expected: str | None, actual: str | None) -> bool:
    if expected is None or actual is None or path not in task.payload["left"]:
        return expected == actual
    if task.payload["unordered"]:
        return sorted(expected.split("\n")) == sorted(actual.split("\n"))
    return expected.rstrip() == actual.rstrip()
