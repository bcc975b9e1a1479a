"""Tasks of real repositories with one agent and hidden tests: the base class of `r2e` and `swe_bench`.

Subclasses define a data set's fields, its tests and which of their outcomes pass; `patches` judges.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from etpi_assets.tasks import downloads, places
from etpi_assets.tasks.family import EXCLUDED, RejectedInput, SandboxNeeds, Task, require_heldout
from etpi_assets.tasks.patches import PatchFamily
from etpi_assets.tasks.rows import tasks_of
from etpi_resources.hashes import json_hash

PARAMS: Mapping[str, Any] = {
    **places.PARAMS,
    "sandbox": "docker",
    "path": None,
    "repos": (),
    "exclude_repos": (),
    "heldout_repos": (),
    "heldout_tasks": (),
    "rows": None,
}
"""Besides those of `places`. path: the rows, a .jsonl, .json or .parquet file, or a folder of them. repos: only these.
exclude_repos: not these; their rows are quarantined as `excluded`, which is no fault of the suite. heldout_repos,
heldout_tasks: these are the split heldout, all others train. rows: take only this many, from the first on."""


NAMED = re.compile(r"`([^`\n]{3,80})`")
"""A name that an issue quotes."""


class RepositoryFamily(PatchFamily):
    """Base class; a subclass reads its data set's rows, and has the run of their tests."""

    params: Mapping[str, Any] = PARAMS
    data = "the data set's rows (.jsonl, .json, .parquet)"
    feature_id = "issue"
    hides: str = "true"
    """Bash command that removes hidden tests from an agent's workspace."""

    @abstractmethod
    def read(self, suite: str, row: Mapping[str, Any], chosen: Mapping[str, Any]) -> Task:
        """Return the task of a row. KeyError, TypeError and ValueError reject the row."""

    def repo_of(self, row: Mapping[str, Any]) -> str:
        """Return the repository that a row is of, for `exclude_repos`."""
        return str(row.get("repo", ""))

    def read_path(self, suite: str, seed: int, path: Path, chosen: Mapping[str, Any]) -> Iterator[Task | RejectedInput]:
        """Yield a task or a rejection for each row, in order.

        Raises ValueError for a misspelt held-out repository."""
        repos: set[str] = set()

        def read(source: str, row: Mapping[str, Any]) -> Task | RejectedInput | None:
            if (repo := self.repo_of(row)) in chosen["exclude_repos"]:
                return RejectedInput(source, EXCLUDED, f"params.exclude_repos names {repo}")
            task = self.read(suite, row, chosen)
            repos.add(task.repo)
            return task if not chosen["repos"] or task.repo in chosen["repos"] else None

        taken = 0
        for item in tasks_of(path, read):
            yield item
            taken += isinstance(item, Task) or item.reason == "repeated_task"
            if taken == chosen["rows"]:
                return
        require_heldout(suite, chosen["heldout_repos"], repos)

    def needs(self, task: Task) -> SandboxNeeds:
        return places.needs(task.payload["place"], f"{self.hides}; {places.FORGET_HISTORY}")


def make_task(
    suite: str,
    task_id: str,
    repo: str,
    instruction: str,
    chosen: Mapping[str, Any],
    *,
    payload: Mapping[str, Any],
    place: Mapping[str, Any],
) -> Task:
    """Return a task whose content hash is independent of where this machine keeps its checkout."""
    held_out = repo in chosen["heldout_repos"] or task_id in chosen["heldout_tasks"]
    split = "heldout" if held_out else "train"
    identity = {key: place[key] for key in ("image", "workdir")}
    digest = json_hash([payload, instruction, identity, *downloads.identity(place)])
    return Task(task_id, suite, repo, split, instruction, {**payload, "place": dict(place)}, digest)
