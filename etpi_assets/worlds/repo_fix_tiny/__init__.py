"""The family `repo_fix_tiny`: one agent fixes one number in a small repository, after a two-hop look-up.

The issue names a symptom, a table maps symptoms to modules, another maps modules to values. A tiny model can copy each
hop if it writes it down, but cannot do both in one step: removing the think block should cost reward, compressing it
should not. It is a toy model: results on it describe the pipeline, not language models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from etpi_assets.tasks.family import BLIND, Family, RejectedInput, Role, Task, Verdict, with_defaults
from etpi_assets.tasks.frozen import write_commands
from etpi_assets.worlds.repo_fix_tiny import judge as verdicts
from etpi_assets.worlds.repo_fix_tiny.generate import generate_tasks
from etpi_resources.sandboxes import SandboxFactory

PARAMS: Mapping[str, Any] = {"train": 240, "heldout": 150, "sandbox": "bubblewrap"}
"""A suite's params and their defaults: tasks of each split, and the kind of sandbox that validates them."""


class RepoFixTiny(Family):
    """The family `repo_fix_tiny`."""

    params = PARAMS
    verdict_trust = BLIND
    feature_id = "issue"
    invents_names = True

    def load(self, suite: str, seed: int, params: Mapping[str, Any]) -> Iterator[Task | RejectedInput]:
        chosen = with_defaults(suite, "repo_fix_tiny", params, PARAMS)
        for split in ("train", "heldout"):
            yield from islice(generate_tasks(suite, seed, split), int(chosen[split]))

    def workspace(self, task: Task, role: Role) -> dict[str, str]:
        return dict(task.payload["files"])

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        (left,) = final.values()
        return verdicts.judge(task, left, sandboxes)

    def solve(self, task: Task, role: Role) -> Sequence[str]:
        return write_commands(self.workspace(task, role), verdicts.solution(task))

    def entities(self, task: Task) -> Sequence[str]:
        return task.payload["names"]

    def validate(self, tasks: Sequence[Task], sandboxes: SandboxFactory) -> Iterator[RejectedInput | Task]:
        return verdicts.validate(tasks, sandboxes)


FAMILY = RepoFixTiny()
