"""The family `terminal_tiny`: single-agent terminal tasks, one command each, judged by the resulting files.

It is a toy model: results on it describe the pipeline, not language models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import PurePosixPath
from typing import Any

from etpi_assets.tasks.family import (
    BLIND,
    WHY_UNPROVEN,
    Family,
    RejectedInput,
    Role,
    Task,
    Verdict,
    with_defaults,
)
from etpi_assets.tasks.frozen import write_commands
from etpi_assets.worlds.terminal_tiny.generate import KINDS, PUBLISHED_KINDS, generate_tasks
from etpi_resources.sandboxes import Sandbox, SandboxFactory

PARAMS: Mapping[str, Any] = {"train": 900, "heldout": 96, "requests": "files", "programs": [], "sandbox": "bubblewrap"}
"""A suite's params and their defaults: tasks of each split; the kinds of requests, `files` (eight programs) or
`published` (the five of the published reward), and of them those for these `programs` alone, empty: all; the kind of
sandbox that validates tasks."""

_KINDS = {"files": KINDS, "published": PUBLISHED_KINDS}


class TerminalTiny(Family):
    """The family `terminal_tiny`."""

    params = PARAMS
    verdict_trust = BLIND
    feature_id = "request"
    invents_names = True

    def load(self, suite: str, seed: int, params: Mapping[str, Any]) -> Iterator[Task | RejectedInput]:
        chosen = with_defaults(suite, "terminal_tiny", params, PARAMS)
        if chosen["requests"] not in _KINDS:
            raise ValueError(f"suite {suite}: params.requests is {chosen['requests']!r}; one of {', '.join(_KINDS)}")
        kinds = [k for k in _KINDS[chosen["requests"]] if k.verb in (chosen["programs"] or [k.verb])]
        if unknown := {*chosen["programs"]} - {kind.verb for kind in kinds}:
            raise ValueError(f"suite {suite}: params.programs has {min(unknown)!r}, for which there is no request")
        for split in ("train", "heldout"):
            tasks = generate_tasks(suite, seed, split, kinds=kinds)
            yield from islice(tasks, int(chosen[split]))

    def workspace(self, task: Task, role: Role) -> dict[str, str]:
        return dict(task.payload["files"])

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        (files,) = final.values()
        return judge(task, files)

    def judge_in_place(self, task: Task, machines: Mapping[str, Sandbox], sandboxes: SandboxFactory) -> Verdict:
        (machine,) = machines.values()
        return judge(task, machine.read_files(), read_tree(machine))

    def solve(self, task: Task, role: Role) -> Sequence[str]:
        if WHY_UNPROVEN in task.payload:
            return [task.payload["command"]]
        return write_commands(self.workspace(task, role), wanted(task))

    def reference_commands(self, task: Task) -> Sequence[str]:
        return [task.payload["command"]]

    def entities(self, task: Task) -> Sequence[str]:
        return task.payload["names"]

    def validate(self, tasks: Sequence[Task], sandboxes: SandboxFactory) -> Iterator[RejectedInput | Task]:
        """Yield each task that its command solves, else a rejection; one without a verdict as it is."""
        proven = super().validate([task for task in tasks if WHY_UNPROVEN not in task.payload], sandboxes)
        for task in tasks:
            yield task if WHY_UNPROVEN in task.payload else next(proven)


FAMILY = TerminalTiny()


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
