"""CooperBench: task folders `<repo>/task<id>/feature<n>/{feature.md, feature.patch, tests.patch}`, and their verdict.

A task is a pair of features of one task folder, named as CooperBench names the folder of its run:
`<repo>/<id>/f<a>_f<b>` with a < b. If params.sandbox is set, the tasks can be run and judged, each in its image or a
checkout; else imported runs can only be compared with them.

The verdict is CooperBench's: test files are removed from both patches; git merges them, equal ones need no merge; a
clean merge is tested with each feature's tests; if the merge conflicts, the first agent's patch alone is tested with
both; there is no union merge. The runner of the task's folder or image (`runner.sh <tests> <work>`, patches in
/patches) runs the tests. A feature passes if the runner exits with 0 and at least one test passed. Each feature's tests
are one `PatchTrial`.
"""

from __future__ import annotations

import builtins
import hashlib
import keyword
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from etpi_assets.tasks import downloads, places
from etpi_assets.tasks.calibration import TestRun
from etpi_assets.tasks.family import RejectedInput, Role, SandboxNeeds, Task, require_heldout
from etpi_assets.tasks.frozen import Changes
from etpi_assets.tasks.patches import (
    INBOX,
    PatchFamily,
    PatchTrial,
    apply_command,
    apply_patch,
    merge,
    must,
    put_tests,
    stage_changes,
)
from etpi_assets.tasks.proof import Tests
from etpi_assets.tasks.reports import counts
from etpi_resources.hashes import json_hash
from etpi_resources.inside import is_file_inside, read_inside
from etpi_resources.outside import read_object
from etpi_resources.sandboxes import Sandbox

WORKDIR = "/workspace/repo"
PATCHES = "/patches"
PARAMS: Mapping[str, Any] = {
    **places.PARAMS,
    "grading": {"network": "index"},
    "path": None,
    "subset": None,
    "pairs": (),
    "pairs_per_task": None,
    "repos": (),
    "heldout_repos": (),
    "images": "akhatua/cooperbench-{repo}:task{task}",
}
"""A suite's params and their defaults.

path: the folder of repositories. subset: a file below it that lists pairs
({"tasks": [{"repo", "task_id", "pairs"}]}). pairs: task ids. Neither: every combination, or the first
`pairs_per_task` of each folder. repos: only these. heldout_repos: their tasks are the split heldout, all others train.
images: the name of a task's image, {repo} without `_task` and with hyphens; or "build": from the Dockerfile in the
task's folder. The key of a checkout is `<repo>/task<id>`.
"""

_TASK = re.compile(r"task(\d+)")
_FEATURE = re.compile(r"feature(\d+)")
_PAIR = re.compile(r"(?P<repo>[^/]+)/(?P<task>\d+)/f(?P<a>\d+)_f(?P<b>\d+)")
_QUOTED = re.compile(r"`([^`\n]{3,120})`")
_PATH = re.compile(r"(?:[\w.-]+/)*[\w-]+\.[A-Za-z]{1,5}")
_CHANGED = re.compile(r"^(?:\+\+\+ b|--- a)/(\S+)\s*$", re.MULTILINE)
_DEFINED = re.compile(
    r"^(?:\+|@@.*@@)\s*(?:async\s+|pub\s+|export\s+)*(?:def|fn|func(?:\s+\([^)]*\))?|function|class)\s+([A-Za-z_]\w{2,})",
    re.MULTILINE,
)
_LANGUAGE = frozenset({*dir(builtins), *keyword.kwlist, "self", "null", "undefined", "func", "string", "number"})

_PYTHON_FILE = re.compile(r"^\+\+\+ b/\S+\.py\s*$", re.MULTILINE)
_CLEAN = "git reset -q --hard && git clean -fdq"

_Place = tuple[str, str]
"""(repository, task id): one folder of features."""


class FeatureTrial(PatchTrial):
    """The run of one feature's tests, on the work of both agents."""

    prepare = f"rm -f .git/index.lock; {_CLEAN} && {places.FORGET_HISTORY}"
    folders = (PATCHES,)
    autoload = True

    @property
    def live(self) -> Mapping[str, Any]:
        return _live_payload(self.task)

    @property
    def place(self) -> Mapping[str, Any]:
        return self.live["place"]

    @property
    def needs(self) -> object:
        live = self.live
        return [live["place"]["image"], live["runner"], self.hidden, live["patches"][self.key]]

    def solve(self, sandbox: Sandbox) -> None:
        """Apply the task's combined patch (upstream's also changes tests), or merge those of the features."""
        if self.live["combined"]:
            return apply_patch(sandbox, self.live["combined"])
        if problem := merge(
            sandbox, [partial(apply_patch, patch=patch, index=True) for patch in self.live["patches"].values()]
        ):
            raise OSError(f"the features' own patches conflict: {problem}")
        return None

    def start(self, sandbox: Sandbox, changes: Changes, tests: Tests) -> str:
        """Write the patches of the work and of the tests, and return the runner's command on the clean base."""
        stage_changes(sandbox, changes)
        must(sandbox, f"git add -A && git diff --cached --binary > {PATCHES}/work.patch && {_CLEAN}")
        put_tests(sandbox, tests)
        names = " ".join(map(shlex.quote, sorted(tests.paths)))
        ignored = f'for file in {names}; do [ ! -e "$file" ] || git add -f -- "$file"; done'
        must(
            sandbox,
            f"git add -A && {ignored} && git diff --cached --binary > {PATCHES}/tests{self.key}.patch && {_CLEAN}",
        )
        if self.live["runner"]:
            sandbox.write_files({f"{INBOX}/runner.sh": self.live["runner"]})
            must(sandbox, f"mv -f {INBOX}/runner.sh {PATCHES}/ && rmdir {INBOX}")
        return f"{self.command} work.patch" if changes else self.command

    def passes(self, test: TestRun) -> tuple[float, Mapping[str, Any]]:
        passed, failed = counts(test.run.output)
        passed, failed = passed + len(test.turned_over), failed - len(test.turned_over)
        report = {"exit_code": test.exit_code, "tests_passed": passed, "tests_failed": failed}
        return test.exit_code == 0 and passed > 0 and test.agrees, report


class CooperBench(PatchFamily):
    """The family `cooperbench`."""

    name, data = "cooperbench", "the folder of CooperBench's repositories"
    params = PARAMS

    def read_path(self, suite: str, seed: int, path: Path, chosen: Mapping[str, Any]) -> Iterator[Task | RejectedInput]:
        """Yield tasks ordered by repository, task and features.

        An unreadable feature is rejected once, with the number of pairs it removes; each requested pair that does not
        exist is rejected by name.

        Raises ValueError for a misspelt held-out repository, FileNotFoundError if there is no such subset.
        """
        if not path.is_dir():
            raise FileNotFoundError(f"suite {suite}: params.path: {path} is no folder")
        wanted = _wanted(path, chosen)
        require_heldout(suite, chosen["heldout_repos"], {repo for repo, _ in _places(path)})
        for place in sorted(set(_places(path)) | set(wanted or ()), key=lambda p: (p[0], p[1].zfill(12))):
            if not chosen["repos"] or place[0] in chosen["repos"]:
                yield from _tasks_of(path, suite, place, None if wanted is None else wanted.get(place, []), chosen)

    def roles(self, task: Task) -> Sequence[Role]:
        first, second = task.payload["features"]
        return [
            Role("agent1", first, task.payload["texts"][first], "agent2"),
            Role("agent2", second, task.payload["texts"][second], "agent1"),
        ]

    def needs(self, task: Task) -> SandboxNeeds:
        return places.needs(_live_payload(task)["place"], places.FORGET_HISTORY)

    def solve(self, task: Task, role: Role) -> Sequence[str]:
        """Return the command that applies the folder's combined patch if it exists, else the feature's patch.

        The patches of two features often conflict."""
        live = _live_payload(task)
        return [apply_command(live["combined"] or live["patches"][role.feature_id])]

    def trials(self, task: Task) -> Sequence[PatchTrial]:
        live = _live_payload(task)
        runner = f"{PATCHES}/runner.sh" if live["runner"] else "/usr/local/bin/runner.sh"
        return [
            FeatureTrial(self, task, tests, f"bash {runner} tests{n}.patch", n, _PYTHON_FILE.search(tests) is not None)
            for n, tests in live["tests"].items()
        ]


FAMILY = CooperBench()


def _live_payload(task: Task) -> Mapping[str, Any]:
    """Return the patches, tests and environment of a task. RuntimeError if its suite sets no sandbox."""
    if "live" not in task.payload:
        raise RuntimeError(
            f"{task.task_id}: its suite gives CooperBench's tasks no environment, so they cannot be run or judged; "
            'set params.sandbox = "docker" (or "bubblewrap" and params.checkouts), or import runs as a rollout set'
        )
    return task.payload["live"]


def _places(root: Path) -> Iterator[_Place]:
    for folder in root.glob("*/task*"):
        if folder.is_dir() and (match := _TASK.fullmatch(folder.name)):
            yield folder.parent.name, match[1]


def _wanted(root: Path, chosen: Mapping[str, Any]) -> dict[_Place, list[tuple[int, int]]] | None:
    """Return the requested pairs by task folder; None if all are."""
    names = list(chosen["pairs"])
    if chosen["subset"]:
        file = root / chosen["subset"]
        if not is_file_inside(root, chosen["subset"]):
            known = ", ".join(sorted(p.relative_to(root).as_posix() for p in root.glob("subsets/*.json")))
            raise FileNotFoundError(f"params.subset: {file} does not exist; there are: {known or 'none'}")
        for entry in read_object(file)["tasks"]:
            names += [f"{entry['repo']}/{entry['task_id']}/f{a}_f{b}" for a, b in entry["pairs"]]
    if not names and not chosen["subset"]:
        return None
    wanted: dict[_Place, list[tuple[int, int]]] = {}
    for name in names:
        if (match := _PAIR.fullmatch(name)) is None:
            raise ValueError(f"params.pairs: {name!r} is no pair; write it as <repo>/<task>/f<a>_f<b>")
        a, b = sorted((int(match["a"]), int(match["b"])))
        wanted.setdefault((match["repo"], match["task"]), []).append((a, b))
    return wanted


def _tasks_of(
    root: Path, suite: str, place: _Place, wanted: Sequence[tuple[int, int]] | None, chosen: Mapping[str, Any]
) -> Iterator[Task | RejectedInput]:
    repo, number = place
    below = f"{repo}/task{number}"
    folders = (path for path in (root / below).glob("feature*") if path.is_dir())
    numbers = sorted(int(match[1]) for path in folders if (match := _FEATURE.fullmatch(path.name)))
    pairs = list(combinations(numbers, 2))[: chosen["pairs_per_task"]] if wanted is None else sorted(set(wanted))
    features: dict[int, dict[str, Any]] = {}
    unreadable: dict[int, str] = {}
    for feature in numbers:
        try:
            features[feature] = _feature(root, f"{below}/feature{feature}")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            unreadable[feature] = f"feature{feature}: {error}"
    if wanted is None and len(numbers) < 2:
        yield RejectedInput(below, "too_few_features", f"{len(numbers)} feature(s); a pair needs two")
    for a, b in pairs:
        task_id = f"{repo}/{number}/f{a}_f{b}"
        if absent := " and ".join(str(n) for n in (a, b) if n not in numbers):
            yield RejectedInput(task_id, "missing_feature", f"asked for, but there is no feature {absent} in {below}")
        elif faults := [unreadable[n] for n in (a, b) if n in unreadable]:
            yield RejectedInput(task_id, "unreadable_feature", "; ".join(faults))
        else:
            try:
                yield _task(root, suite, task_id, {str(n): features[n] for n in (a, b)}, chosen)
            except (OSError, UnicodeDecodeError) as error:
                yield RejectedInput(task_id, "unreadable_patch", str(error))


def _feature(root: Path, folder: str) -> dict[str, Any]:
    """Read a feature's files. Raises OSError, UnicodeDecodeError, or ValueError if one is empty."""
    data = {name: read_inside(root, f"{folder}/{name}") for name in ("feature.md", "feature.patch", "tests.patch")}
    if empty := [name for name, content in data.items() if not content.strip()]:
        raise ValueError(f"{empty[0]} is empty")
    text = data["feature.md"].decode()
    return {
        "data": data,
        "text": text,
        "files": {
            name: {"path": f"{folder}/{name}", "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in data.items()
        },
        # Patches may touch files in any encoding; the text of a task is UTF-8.
        "entities": _entities(text, data["feature.patch"].decode(errors="replace")),
    }


def _task(
    root: Path, suite: str, task_id: str, features: Mapping[str, Mapping[str, Any]], chosen: Mapping[str, Any]
) -> Task:
    """Return the task of two features; with a sandbox also their patches, tests and environment.

    Its content hash is independent of their location."""
    repo, number, _ = task_id.split("/")
    below = f"{repo}/task{number}"
    payload = {
        "features": list(features),
        "texts": {n: feature["text"] for n, feature in features.items()},
        "files": {n: feature["files"] for n, feature in features.items()},
        "entities": sorted({entity for feature in features.values() for entity in feature["entities"]}),
    }
    instruction = "\n\n".join(f"# Feature {n}\n\n{text.strip()}" for n, text in payload["texts"].items())
    split = "heldout" if repo in chosen["heldout_repos"] else "train"
    task = Task.hashed(task_id, suite, repo, split, instruction, payload)
    if not chosen["sandbox"]:
        return task
    held = {
        name: read_inside(root, f"{below}/{name}").decode() if (root / below / name).is_file() else ""
        for name in ("combined.patch", "runner.sh")
    }
    live = {
        "patches": {n: feature["data"]["feature.patch"].decode() for n, feature in features.items()},
        "tests": {n: feature["data"]["tests.patch"].decode() for n, feature in features.items()},
        "combined": held["combined.patch"],
        "runner": held["runner.sh"],
    }
    image = chosen["images"].format(repo=repo.removesuffix("_task").replace("_", "-"), task=number)
    named: dict[str, Any] = {"image": None, "build": root / below} if chosen["images"] == "build" else {"image": image}
    machine = places.make_place(suite, chosen, key=below, workdir=WORKDIR, **named)
    digest = json_hash([task.content_hash, live, image, *downloads.identity(machine)])
    return replace(task, payload={**task.payload, "live": {**live, "place": machine}}, content_hash=digest)


def _entities(text: str, patch: str) -> set[str]:
    """Return the file paths and function names that the text quotes, or that the reference patch changes.

    Keywords and built-in names do not count: a plan that says `None` names nothing."""
    names = set(_CHANGED.findall(patch)) | set(_DEFINED.findall(patch))
    for quoted in _QUOTED.findall(text):
        if _PATH.fullmatch(quoted):
            names.add(quoted)
        elif re.fullmatch(r"[\w.]+(?:\(.*\))?", quoted):
            name = quoted.partition("(")[0].rpartition(".")[2]
            if len(name) > 2 and not name.isdigit():
                names.add(name)
    return {entity for entity in names if entity not in _LANGUAGE}
