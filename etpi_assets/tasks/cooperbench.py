"""CooperBench task folders: `<repo>/task<id>/feature<n>/{feature.md, feature.patch, tests.patch}`.

A task is a pair of features of one task folder, named as CooperBench names the folder of its run:
`<repo>/<id>/f<a>_f<b>` with a < b. If params.sandbox is set, the tasks can be run and judged, each in its image or a
checkout (`cooperbench_verdict`); else imported runs can only be compared with them.
"""

from __future__ import annotations

import builtins
import hashlib
import json
import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from etpi_assets.tasks import cooperbench_verdict, downloads, places
from etpi_assets.tasks.commands import apply_command
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
from etpi_assets.tasks.proof import TestedFamily, Trial
from etpi_resources.hashes import json_hash
from etpi_resources.inside import is_file_inside, read_inside
from etpi_resources.sandboxes import SandboxFactory

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
        only = set(chosen["repos"])
        require_heldout(suite, chosen["heldout_repos"], {repo for repo, _ in _places(root)})
        for place in sorted(set(_places(root)) | set(wanted or ()), key=lambda p: (p[0], p[1].zfill(12))):
            if only and place[0] not in only:
                continue
            split = "heldout" if place[0] in chosen["heldout_repos"] else "train"
            pairs = None if wanted is None else wanted.get(place, [])
            for item in _tasks_of(root, suite, place, split, pairs, chosen["pairs_per_task"]):
                if isinstance(item, RejectedInput):
                    yield item
                    continue
                yield _with_live_payload(item, root, place, chosen) if chosen["sandbox"] else item

    def roles(self, task: Task) -> Sequence[Role]:
        first, second = task.payload["features"]
        return [
            Role("agent1", first, task.payload["texts"][first], "agent2"),
            Role("agent2", second, task.payload["texts"][second], "agent1"),
        ]

    def needs(self, task: Task) -> SandboxNeeds:
        return places.needs(_live_payload(task)["place"], places.FORGET_HISTORY)

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        return cooperbench_verdict.judge(task, _live_payload(task), final, sandboxes)

    def solve(self, task: Task, role: Role) -> Sequence[str]:
        """Return the command that applies the folder's combined patch if it exists, else the feature's patch.

        The patches of two features often conflict."""
        live = _live_payload(task)
        return [apply_command(live["combined"] or live["patches"][role.feature_id])]

    def trials(self, task: Task) -> Sequence[Trial]:
        return cooperbench_verdict.trials(task, _live_payload(task))


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
        task.suite,
        chosen,
        key=below,
        workdir=cooperbench_verdict.WORKDIR,
        image=None if build else image,
        build=folder if build else None,
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
    root: Path, suite: str, place: _Place, split: str, wanted: Sequence[tuple[int, int]] | None, most: int | None
) -> Iterator[Task | RejectedInput]:
    repo, number = place
    folder = root / repo / f"task{number}"
    numbers = sorted(
        int(match[1]) for p in folder.glob("feature*") if p.is_dir() and (match := _FEATURE.fullmatch(p.name))
    )
    pairs = list(combinations(numbers, 2))[:most] if wanted is None else sorted(set(wanted))
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
        if absent := [str(n) for n in (a, b) if n not in numbers]:
            yield RejectedInput(
                task_id,
                "missing_feature",
                f"asked for, but there is no feature {' and '.join(absent)} in {folder.name}",
            )
        elif faults := [unreadable[n] for n in (a, b) if n in unreadable]:
            yield RejectedInput(task_id, "unreadable_feature", "; ".join(faults))
        else:
            yield _task(suite, task_id, repo, split, {str(n): features[n] for n in (a, b)})


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
