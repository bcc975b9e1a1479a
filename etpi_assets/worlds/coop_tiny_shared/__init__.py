"""The family `coop_tiny_shared`: two agents add a function each, and both functions must be exported from one file.

Each agent can do its feature alone, and then both append a line at the end of the shared file, which git cannot merge.
Agents that agree who edits that file, and keep to it, avoid the conflict. `generate` builds tasks from `texts`, and
`judge` runs the hidden tests on the merge. It is a toy model: results on it describe the pipeline, not language models.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from etpi_assets.tasks.family import BLIND, Family, RejectedInput, Role, Task, Verdict, with_defaults
from etpi_assets.tasks.frozen import write_commands
from etpi_assets.worlds.coop_tiny_shared import judge as verdicts
from etpi_assets.worlds.coop_tiny_shared.generate import divided_solution, generate_tasks
from etpi_resources.sandboxes import SandboxFactory

PARAMS: Mapping[str, Any] = {"train": 1000, "heldout": 100, "sandbox": "bubblewrap"}
"""A suite's params and their defaults: tasks of each split, and the kind of sandbox that validates the tasks."""


class CoopTinyShared(Family):
    """The family `coop_tiny_shared`."""

    params = PARAMS
    verdict_trust = BLIND
    invents_names = True

    def load(self, suite: str, seed: int, params: Mapping[str, Any]) -> Iterator[Task | RejectedInput]:
        chosen = with_defaults(suite, "coop_tiny_shared", params, PARAMS)
        for split in ("train", "heldout"):
            importable = (task for task in generate_tasks(suite, seed, split) if not _hides_python(task))
            yield from islice(importable, int(chosen[split]))

    def roles(self, task: Task) -> Sequence[Role]:
        return [
            Role(role["agent_id"], role["feature_id"], role["instruction"], role["partner"])
            for role in task.payload["roles"]
        ]

    def workspace(self, task: Task, role: Role) -> dict[str, str]:
        return dict(task.payload["files"])

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        return verdicts.judge(task, final, sandboxes)

    def reference(self, task: Task, role: Role) -> dict[str, str]:
        """Return the files after this role's share of the divided reference solution."""
        return divided_solution(task, role.feature_id)

    def solve(self, task: Task, role: Role) -> Sequence[str]:
        return write_commands(self.workspace(task, role), self.reference(task, role))

    def entities(self, task: Task) -> Sequence[str]:
        """Return the files' paths, then the features' function names, as they occur in the instructions."""
        payload = task.payload
        return [*payload["files"], *(feature["function"] for feature in payload["features"].values())]

    def validate(self, tasks: Sequence[Task], sandboxes: SandboxFactory) -> Iterator[RejectedInput | Task]:
        return verdicts.validate(
            tasks, sandboxes, lambda task: [self.reference(task, role) for role in self.roles(task)]
        )


def _hides_python(task: Task) -> bool:
    """Return whether a module has a name of Python's, such as `site`: Python's own would be imported instead."""
    return any(path.removesuffix(".py") in sys.stdlib_module_names for path in task.payload["files"])


FAMILY = CoopTinyShared()
