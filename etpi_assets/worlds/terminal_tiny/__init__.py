"""The family `terminal_tiny`: single-agent terminal tasks, one command each, judged by the resulting files.

It is a toy model: results on it describe the pipeline, not language models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
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
from etpi_assets.worlds.terminal_tiny import judge as verdicts
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
        return verdicts.judge(task, files)

    def judge_in_place(self, task: Task, machines: Mapping[str, Sandbox], sandboxes: SandboxFactory) -> Verdict:
        (machine,) = machines.values()
        return verdicts.judge(task, machine.read_files(), verdicts.read_tree(machine))

    def solve(self, task: Task, role: Role) -> Sequence[str]:
        if WHY_UNPROVEN in task.payload:
            return [task.payload["command"]]
        return write_commands(self.workspace(task, role), verdicts.wanted(task))

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
