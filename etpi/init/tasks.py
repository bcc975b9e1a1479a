"""Specs for tasks: a git repository, Harbor's or CooperBench's task folders, or rows of SWE-bench's form."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from etpi.init import git_tasks
from etpi.init.write import NewSpec, quoted, rendered
from etpi_assets.specs.load import SpecError
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import RejectedInput, Task
from etpi_assets.tasks.harbor.folder import MIGRATE, TASK_FILE
from etpi_assets.tasks.rows import read_rows
from etpi_resources.lake.lake import Lake, Ref

HELD_OUT = 0.2
"""Share of the tasks, or of the repositories, that is held out."""
Kind = Literal["git", "harbor", "cooperbench", "rows"]


@dataclass(frozen=True)
class OwnTasks:
    """Tasks that can be read, not yet proved.

    Attributes:
        family, params: of the suite; params are lines of TOML.
        lines: the report for the user.
        sandbox: the kind that the suite runs in.
        prompt: the agent's prompt templates.
    """

    family: str
    params: Sequence[str]
    lines: Sequence[str]
    sandbox: str
    prompt: str = "solo"


def kind_of(source: Path) -> Kind:
    """Return the kind of a folder or file of tasks. Raises SpecError: it is none of the four, or does not exist."""
    if not source.exists():
        raise SpecError(f"{source}: there is nothing there")
    cloned = (source / ".git").exists()
    # A repository of tasks has them near its root; a repository to make tasks from may have some among its examples.
    for below in ("", "*/", "*/*/") if cloned else ("**/",):
        if next(source.glob(f"{below}{TASK_FILE}"), None):
            return "harbor"
    if next(source.glob("*/task*/feature*/feature.md"), None):
        return "cooperbench"
    try:
        row = next(read_rows(source), None)
    except (FileNotFoundError, ValueError):
        row = None
    if row and isinstance(row[1], dict) and {"instance_id", "test_patch"} <= set(row[1]):
        return "rows"
    if cloned:
        return "git"
    raise SpecError(
        f"{source}: neither a git repository, nor a folder with {TASK_FILE} at any depth (Harbor; "
        f"{MIGRATE}) or REPO/taskN/featureM (CooperBench), nor rows with instance_id and test_patch (SWE-bench)"
    )


def from_git(source: Path, name: str, python: str | None, commits: int) -> OwnTasks:
    """Build tasks from a repository's commits; the newest are held out. Raises SpecError if there are none."""
    from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory

    folder = Path("tasks").absolute() / name
    mined = git_tasks.mine(source.resolve(), folder, python, commits, BubblewrapFactory())
    lines = [f"{source}: {mined.looked} commits, {len(mined.rows)} of them tasks"]
    lines += [f"  no candidates: {reason}: {number}" for reason, number in mined.passed_over.most_common()]
    for reason, refused in mined.refused.items():
        lines.append(f"  refused: {reason}: {len(refused)}, such as {' '.join(refused[0].split())[:160]}")
    if not mined.rows:
        raise SpecError("\n".join([*lines, "no commit makes a task; nothing was written"]))
    rows = folder / "tasks.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in mined.rows), encoding="utf-8")
    count = _held_out(len(mined.rows))
    latest = [row["instance_id"] for row in mined.rows[len(mined.rows) - count :]]
    params = [
        f"path = {quoted(str(rows))}   # the agent reads problem_statement: edit it",
        f"checkouts = {quoted(str(folder / 'checkouts'))}",
        'sandbox = "bubblewrap"',
        f"heldout_tasks = {json.dumps(latest)}   # the latest commits",
    ]
    return OwnTasks("swe_bench", params, lines, "bubblewrap")


def from_rows(source: Path, split: str, checkouts: str | None) -> OwnTasks:
    """Describe rows of SWE-bench's form; whole repositories, or the latest rows, are held out."""
    rows = [row for _, row in read_rows(source) if isinstance(row, dict) and "instance_id" in row]
    repositories = Counter(str(row.get("repo")) for row in rows)
    params = [f"path = {quoted(str(source.absolute()))}", *_place(checkouts)]
    if split == "repository" and len(repositories) > 1:
        smallest = [name for name, _ in reversed(repositories.most_common())][: _held_out(len(repositories))]
        params.append(f"heldout_repos = {json.dumps(smallest)}")
    else:
        rows.sort(key=lambda row: str(row.get("created_at", "")))
        latest = [str(row["instance_id"]) for row in rows[len(rows) - _held_out(len(rows)) :]]
        params.append(f"heldout_tasks = {json.dumps(latest)}   # the latest by created_at")
    lines = [f"{source}: {len(rows)} rows of {len(repositories)} repositories"]
    return OwnTasks("swe_bench", params, lines, "bubblewrap" if checkouts else "docker")


def from_cooperbench(source: Path, repos: Sequence[str], checkouts: str | None) -> OwnTasks:
    """Describe CooperBench's folder; the repositories with the fewest tasks are held out.

    Args:
        repos: only these folders of `source`; empty: all.

    Raises SpecError: `source` has none of a repository.
    """
    folders = sorted({file.parents[1] for file in source.glob("*/task*/feature*/feature.md")})
    tasks = Counter(folder.parent.name for folder in folders if not repos or folder.parent.name in repos)
    if missing := sorted(set(repos) - set(tasks)):
        known = ", ".join(sorted({folder.parent.name for folder in folders}))
        raise SpecError(f"--repos {','.join(missing)}: not in {source}, which has {known}")
    held_out = [name for name, _ in reversed(tasks.most_common())][: _held_out(len(tasks))]
    params = [
        f"path = {quoted(str(source.absolute()))}",
        "pairs_per_task = 1   # the first two features of each folder; without this line, every pair of features",
        f"heldout_repos = {json.dumps(held_out)}",
        *([f"repos = {json.dumps(sorted(tasks))}"] if repos else []),
        *_place(checkouts),
    ]
    if not checkouts and all((folder / "Dockerfile").is_file() for folder in folders if folder.parent.name in tasks):
        params.append('images = "build"   # from the Dockerfiles; without this line, published images are pulled')
    lines = [f"{source}: {tasks.total()} task folders of {len(tasks)} repositories"]
    return OwnTasks("cooperbench", params, lines, "bubblewrap" if checkouts else "docker", "coop")


def from_harbor(source: Path, checkouts: str | None) -> OwnTasks:
    """Describe task folders; the last by name are held out."""
    params = [f"path = {quoted(str(source.absolute()))}", 'split = "train"', *_place(checkouts)]
    family = load_family("harbor")
    loaded = list(family.load("own", 0, {"path": str(source), "checkouts": checkouts}))
    tasks = sorted(task.task_id for task in loaded if isinstance(task, Task))
    refused = Counter(item.reason for item in loaded if isinstance(item, RejectedInput))
    lines = [f"{source}: {len(loaded)} task folders, {len(tasks)} readable"]
    lines += [f"  refused: {reason}: {number}" for reason, number in refused.most_common()]
    params.append(f"heldout_tasks = {json.dumps(tasks[len(tasks) - _held_out(len(tasks)) :])}")
    return OwnTasks("harbor", params, lines, "bubblewrap" if checkouts else "docker")


def _place(checkouts: str | None) -> list[str]:
    if checkouts:
        return [f"checkouts = {quoted(str(Path(checkouts).absolute()))}", 'sandbox = "bubblewrap"']
    return ['sandbox = "docker"   # or prepared folders and bubblewrap: --checkouts (docs/sandboxes.md)']


def _held_out(count: int) -> int:
    """Return the held-out count of `count` tasks; a single task is not held out."""
    return 0 if count < 2 else max(1, math.floor(count * HELD_OUT))


def new_specs(name: str, tasks: OwnTasks) -> list[NewSpec]:
    """Return the suite, and a rollout set that runs each task's reference solution until an engine takes its place."""
    templates = {"suite": "suite", "rollout_set": "reference"}
    return [NewSpec(set, name, rendered(template, name=name, tasks=tasks)) for set, template in templates.items()]


def proof(name: str) -> list[str]:
    """Return the result of proving the suite's tasks, from the lake: counts by split, and refusals by reason."""
    lake, ref = Lake.open(), Ref("tasks", "suite", name)
    splits = Counter(lake.read(ref, "tasks")["split"].to_pylist())
    quarantined = lake.read(ref, "quarantined").to_pylist()
    lines = [f"proved (the reference passes three times, no change fails): {sum(splits.values())} tasks"]
    lines += [f"  {split}: {number}" for split, number in sorted(splits.items(), reverse=True)]
    for reason, number in Counter(row["reason"] for row in quarantined).most_common():
        detail = next(row["detail"] for row in quarantined if row["reason"] == reason)
        lines.append(f"  refused: {reason}: {number}; {detail[:200]}")
    return lines
