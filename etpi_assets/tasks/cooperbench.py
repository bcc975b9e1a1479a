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
import json
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
from etpi_assets.tasks.family import (
    RejectedInput,
    Role,
    SandboxNeeds,
    Task,
    Verdict,
    named_path,
    require_heldout,
    with_defaults,
)
from etpi_assets.tasks.frozen import Changes, counted_changes, put_changes
from etpi_assets.tasks.patches import INBOX, PatchTrial, apply_command, apply_patch, judge_patches, must, put_tests
from etpi_assets.tasks.proof import TestedFamily, Tests, identity_of
from etpi_assets.tasks.reports import counts
from etpi_resources.hashes import json_hash
from etpi_resources.inside import is_file_inside, read_inside
from etpi_resources.sandboxes import Sandbox, SandboxFactory

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
_GIT = "git -c user.name=etpi -c user.email=etpi@localhost -c core.hooksPath=/dev/null"
_CLEAN = "git reset -q --hard && git clean -fdq"
_FORGET = f"rm -f .git/index.lock; {_CLEAN} && {places.FORGET_HISTORY}"

_Place = tuple[str, str]
"""(repository, task id): one folder of features."""


class CooperBench(TestedFamily):
    """The family `cooperbench`."""

    params = PARAMS

    def load(self, suite: str, seed: int, params: Mapping[str, Any]) -> Iterator[Task | RejectedInput]:
        """Yield tasks ordered by repository, task and features. `seed` has no effect.

        An unreadable feature is rejected once, with the number of pairs it removes; each requested pair that does not
        exist is rejected by name.

        Raises:
            ValueError: unknown params, no path, or a misspelt held-out repository.
            FileNotFoundError: nothing at the path, or no such subset.
        """
        chosen = with_defaults(suite, "cooperbench", params, PARAMS)
        root = named_path(suite, chosen, "the folder of CooperBench's repositories")
        if not root.is_dir():
            raise FileNotFoundError(f"suite {suite}: params.path: {root} is no folder")
        wanted = _wanted(root, chosen)
        require_heldout(suite, chosen["heldout_repos"], {repo for repo, _ in _places(root)})
        for place in sorted(set(_places(root)) | set(wanted or ()), key=lambda p: (p[0], p[1].zfill(12))):
            if not chosen["repos"] or place[0] in chosen["repos"]:
                yield from _tasks_of(root, suite, place, None if wanted is None else wanted.get(place, []), chosen)

    def roles(self, task: Task) -> Sequence[Role]:
        first, second = task.payload["features"]
        return [
            Role("agent1", first, task.payload["texts"][first], "agent2"),
            Role("agent2", second, task.payload["texts"][second], "agent1"),
        ]

    def needs(self, task: Task) -> SandboxNeeds:
        return places.needs(_live_payload(task)["place"], places.FORGET_HISTORY)

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        """See `judge_patches`."""
        runs = self.trials(task)
        return judge_patches(task, runs, final, sandboxes, partial(_merge, runs[0], sandboxes))

    def solve(self, task: Task, role: Role) -> Sequence[str]:
        """Return the command that applies the folder's combined patch if it exists, else the feature's patch.

        The patches of two features often conflict."""
        live = _live_payload(task)
        return [apply_command(live["combined"] or live["patches"][role.feature_id])]

    def trials(self, task: Task) -> list[PatchTrial]:
        """Return the run of each feature's tests. The runner may install what it needs with the feature's own patch."""
        live = _live_payload(task)
        return [
            PatchTrial(
                number, identity_of(task), live["place"], _FORGET, folders=(PATCHES,),
                put_tests=lambda sandbox, tests=tests: apply_patch(sandbox, tests, index=True),
                solve=partial(_solve, live), start=partial(_start, live, number), outcome=_passes,
                patches=True, pytest=_PYTHON_FILE.search(tests) is not None, autoload=True,
                needs=[live["place"]["image"], live["runner"], tests, live["patches"][number]],
                downloads_for=partial(apply_patch, patch=live["patches"][number]),
            )
            for number, tests in live["tests"].items()
        ]  # fmt: skip


FAMILY = CooperBench()


def _live_payload(task: Task) -> Mapping[str, Any]:
    """Return the patches, tests and environment of a task. RuntimeError if its suite sets no sandbox."""
    if "live" not in task.payload:
        raise RuntimeError(
            f"{task.task_id}: its suite gives CooperBench's tasks no environment, so they cannot be run or judged; "
            'set params.sandbox = "docker" (or "bubblewrap" and params.checkouts), or import runs as a rollout set'
        )
    return task.payload["live"]


def _with_live_payload(task: Task, root: Path, place: _Place, chosen: Mapping[str, Any]) -> Task | RejectedInput:
    """Return the task with its patches, tests and environment. Its content hash is independent of their location."""
    repo, number = place
    folder, below = root / repo / f"task{number}", f"{repo}/task{number}"

    def text(name: str) -> str:
        return read_inside(root, f"{below}/{name}").decode("utf-8")

    build = chosen["images"] == "build"
    image = chosen["images"].format(repo=repo.removesuffix("_task").replace("_", "-"), task=number)
    try:
        live = {
            "patches": {n: text(f"feature{n}/feature.patch") for n in task.payload["features"]},
            "tests": {n: text(f"feature{n}/tests.patch") for n in task.payload["features"]},
            "combined": text("combined.patch") if (folder / "combined.patch").is_file() else "",
            "runner": text("runner.sh") if (folder / "runner.sh").is_file() else "",
        }
    except (OSError, UnicodeDecodeError) as error:
        return RejectedInput(task.task_id, "unreadable_patch", str(error))
    machine = places.make_place(
        task.suite, chosen, key=below, workdir=WORKDIR, image=None if build else image, build=folder if build else None
    )
    digest = json_hash([task.content_hash, live, image, *downloads.identity(machine)])
    return replace(task, payload={**task.payload, "live": {**live, "place": machine}}, content_hash=digest)


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
        for entry in json.loads(file.read_text(encoding="utf-8"))["tasks"]:
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
    folder = root / repo / f"task{number}"
    split = "heldout" if repo in chosen["heldout_repos"] else "train"
    folders = (path for path in folder.glob("feature*") if path.is_dir())
    numbers = sorted(int(match[1]) for path in folders if (match := _FEATURE.fullmatch(path.name)))
    pairs = list(combinations(numbers, 2))[: chosen["pairs_per_task"]] if wanted is None else sorted(set(wanted))
    features: dict[int, dict[str, Any]] = {}
    unreadable: dict[int, str] = {}
    for feature in numbers:
        try:
            features[feature] = _feature(root, folder / f"feature{feature}")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            unreadable[feature] = f"feature{feature}: {error}"
    if wanted is None and len(numbers) < 2:
        yield RejectedInput(f"{repo}/task{number}", "too_few_features", f"{len(numbers)} feature(s); a pair needs two")
    for a, b in pairs:
        task_id = f"{repo}/{number}/f{a}_f{b}"
        if absent := " and ".join(str(n) for n in (a, b) if n not in numbers):
            detail = f"asked for, but there is no feature {absent} in {folder.name}"
            yield RejectedInput(task_id, "missing_feature", detail)
        elif faults := [unreadable[n] for n in (a, b) if n in unreadable]:
            yield RejectedInput(task_id, "unreadable_feature", "; ".join(faults))
        else:
            task = _task(suite, task_id, repo, split, {str(n): features[n] for n in (a, b)})
            yield _with_live_payload(task, root, place, chosen) if chosen["sandbox"] else task


def _feature(root: Path, folder: Path) -> dict[str, Any]:
    """Read a feature's files. Raises OSError, UnicodeDecodeError, or ValueError if one is empty."""
    contents, relative = {}, folder.relative_to(root).as_posix()
    for name in ("feature.md", "feature.patch", "tests.patch"):
        data = read_inside(root, f"{relative}/{name}")
        if not data.strip():
            raise ValueError(f"{name} is empty")
        # Patches may touch files in any encoding; the text of a task is UTF-8.
        contents[name] = data, data.decode("utf-8", "strict" if name == "feature.md" else "replace")
    return {
        "text": contents["feature.md"][1],
        "files": {
            name: {"path": f"{relative}/{name}", "sha256": hashlib.sha256(data).hexdigest()}
            for name, (data, _) in contents.items()
        },
        "entities": _entities(contents["feature.md"][1], contents["feature.patch"][1]),
    }


def _task(suite: str, task_id: str, repo: str, split: str, features: Mapping[str, Mapping[str, Any]]) -> Task:
    payload = {
        "features": list(features),
        "texts": {number: feature["text"] for number, feature in features.items()},
        "files": {number: feature["files"] for number, feature in features.items()},
        "entities": sorted({entity for feature in features.values() for entity in feature["entities"]}),
    }
    instruction = "\n\n".join(
        f"# Feature {number}\n\n{feature['text'].strip()}" for number, feature in features.items()
    )
    return Task.hashed(task_id, suite, repo, split, instruction, payload)


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


# --- the verdict ---


def _solve(live: Mapping[str, Any], sandbox: Sandbox) -> None:
    """Apply the task's combined patch (upstream's also changes tests), or merge those of the features."""
    if live["combined"]:
        return apply_patch(sandbox, live["combined"])
    base = must(sandbox, "git rev-parse HEAD").strip()
    for number, patch in live["patches"].items():
        _branch(sandbox, base, f"reference{number}")
        apply_patch(sandbox, patch)
        _commit(sandbox, number)
    first, second = live["patches"]
    merged = sandbox.run(f"git checkout -q reference{second} && {_GIT} merge -q --no-edit reference{first}")
    if merged.exit_code:
        raise OSError(f"the features' own patches conflict: {merged.output[-500:]}")
    return None


def _start(live: Mapping[str, Any], number: str, sandbox: Sandbox, changes: Changes, tests: Tests) -> str:
    """Write the patches of the work and of the tests, and return the runner's command on the clean base."""
    put_changes(sandbox, changes)
    must(sandbox, f"git add -A && git diff --cached --binary > {PATCHES}/work.patch && {_CLEAN}")
    put_tests(sandbox, tests)
    names = " ".join(map(shlex.quote, sorted(tests.paths)))
    ignored = f'for file in {names}; do [ ! -e "$file" ] || git add -f -- "$file"; done'
    must(sandbox, f"git add -A && {ignored} && git diff --cached --binary > {PATCHES}/tests{number}.patch && {_CLEAN}")
    if live["runner"]:
        sandbox.write_files({f"{INBOX}/runner.sh": live["runner"]})
        must(sandbox, f"mv -f {INBOX}/runner.sh {PATCHES}/ && rmdir {INBOX}")
    runner = f"{PATCHES}/runner.sh" if live["runner"] else "/usr/local/bin/runner.sh"
    words = [runner, f"tests{number}.patch", *(["work.patch"] if changes else [])]
    return downloads.command_with_downloads(live["place"], f"bash {shlex.join(words)}")


def _passes(test: TestRun) -> tuple[bool, Mapping[str, Any]]:
    passed, failed = counts(test.output)
    failed -= len(test.turned_over)
    report = {"exit_code": test.exit_code, "tests_passed": passed + len(test.turned_over), "tests_failed": failed}
    return test.exit_code == 0 and report["tests_passed"] > 0 and not test.failed, report


def _merge(
    trial: PatchTrial, sandboxes: SandboxFactory, work: list[Changes], before: Mapping[str, str]
) -> tuple[str, Changes]:
    if work[0] == work[-1]:
        return "identical", work[0]
    with trial.tree(sandboxes) as sandbox:
        base = must(sandbox, "git rev-parse HEAD").strip()
        for number, changes in enumerate(work, 1):
            _branch(sandbox, base, f"agent{number}")
            put_changes(sandbox, changes)
            _commit(sandbox, f"agent{number}")
        if sandbox.run(f"git checkout -q agent2 && {_GIT} merge -q --no-edit --no-ff agent1").exit_code:
            return "conflicts", work[0]
        return "clean", counted_changes(before, sandbox.read_files())


def _branch(sandbox: Sandbox, base: str, name: str) -> None:
    must(sandbox, f"git checkout -q --force {base} && git clean -fdq && git checkout -q -b {name}")


def _commit(sandbox: Sandbox, message: str) -> None:
    must(sandbox, f"git add -A && {_GIT} commit -q --allow-empty --no-verify -m {shlex.quote(message)}")
