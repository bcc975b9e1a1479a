"""What a suite family provides.

Belongs here: the values a family yields and the Protocol the rest of etpi knows it by. Does not belong here: any
family.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from etpi_resources.sandboxes import SandboxFactory


@dataclass(frozen=True)
class Role:
    """One agent's seat at a task: its id ("agent1"), feature id, the instruction it reads, its partner's id or None."""

    agent_id: str
    feature_id: str
    instruction: str
    partner: str | None = None


@dataclass(frozen=True)
class Task:
    """One task; `payload` is JSON-serialisable and enough to run and judge it again."""

    task_id: str
    suite: str
    repo: str
    split: str
    instruction: str
    payload: Mapping[str, Any]
    content_hash: str


@dataclass(frozen=True)
class Verdict:
    """What the verifier says: reward in [0, 1], a stable code (passed, failed_tests, merge_conflict, no_patch,
    infrastructure), and details."""

    reward: float
    verdict: str
    details: Mapping[str, Any]


@dataclass(frozen=True)
class Refusal:
    """An input the family could not make a task of."""

    source: str
    reason: str
    detail: str


class Family(Protocol):
    """One suite family, a module-level object `FAMILY` of `etpi_assets.tasks.<family>`."""

    runnable: bool
    """Whether its tasks can be run and judged here (an imported task set without environments cannot)."""

    def load(self, suite: str, seed: int, params: Mapping[str, Any]) -> Iterator[Task | Refusal]:
        """The suite's tasks, deterministic in (seed, params); refusals for what could not be read."""
        ...

    def roles(self, task: Task) -> Sequence[Role]:
        """The agents a task seats, in order."""
        ...

    def workspace(self, task: Task, role: Role) -> dict[str, str]:
        """The files an agent starts with, by relative path."""
        ...

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        """Judge what each agent left (agent_id -> files): freeze the patches, merge, add hidden tests, run."""
        ...

    def reference(self, task: Task, role: Role) -> dict[str, str]:
        """The files as the reference solution leaves them for this role."""
        ...

    def entities(self, task: Task) -> Sequence[str]:
        """File paths and function names that occur in the task, for the behaviours."""
        ...

    def validate(self, tasks: Sequence[Task], sandboxes: SandboxFactory) -> Iterator[Refusal | Task]:
        """Each task if its reference passes three times and the null solution fails, else the refusal; in order."""
        ...
