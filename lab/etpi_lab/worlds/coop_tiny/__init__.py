"""The family `coop_tiny`: two agents implement two features in one small Python repository.

`generate` builds tasks from `repositories` and `texts`. Formulas, judge and merge are those of `coop_tiny_shared`.
It is a toy model: results on it describe the pipeline, not language models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from etpi_assets.tasks.family import RejectedInput, Role, Task, with_defaults
from etpi_assets.worlds.coop_tiny_shared import CoopTinyShared
from etpi_lab.worlds.coop_tiny.generate import generate_tasks, solution
from etpi_lab.worlds.coop_tiny.surveys import SurveyingPolicy, SurveyingSkill
from etpi_lab.worlds.coop_tiny.texts import REGISTERS
from etpi_resources.engines.scripted import Policy

ETPI_VERSION = 1
"""The number of this family's code: raise it where tasks, rollouts or verdicts differ."""
PARAMS: Mapping[str, Any] = {"train": 1000, "heldout": 100, "registers": tuple(REGISTERS), "sandbox": "bubblewrap"}
"""A suite's params and their defaults: tasks of each split, the registers of the instructions, and the kind of
sandbox that validates the tasks."""


class CoopTiny(CoopTinyShared):
    """The family `coop_tiny`: each feature has a reference solution of its own."""

    params = PARAMS

    def load(self, suite: str, seed: int, params: Mapping[str, Any]) -> Iterator[Task | RejectedInput]:
        chosen = with_defaults(suite, "coop_tiny", params, PARAMS)
        registers = tuple(chosen["registers"])
        if unknown := sorted(set(registers) - set(REGISTERS)):
            raise ValueError(f"suite {suite}: unknown params.registers {unknown}; there are {sorted(REGISTERS)}")
        for split in ("train", "heldout"):
            yield from islice(generate_tasks(suite, seed, split, registers), int(chosen[split]))

    def reference(self, task: Task, role: Role) -> dict[str, str]:
        """Return the files after the reference solution."""
        return solution(task, role.feature_id)

    def entities(self, task: Task) -> Sequence[str]:
        return [name for name in super().entities(task) if name != task.payload["check"]]

    def scripted_policy(self, skill: Mapping[str, float], seed: int) -> Policy:
        """Return the policy of an engine of kind "scripted"."""
        return SurveyingPolicy(SurveyingSkill.of(skill), seed)


FAMILY = CoopTiny()
