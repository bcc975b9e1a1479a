"""What a suite family provides.

Belongs here: the values a family yields and the Protocol the rest of etpi knows it by. Does not belong here: any
family.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from etpi_resources.sandboxes import Environment, Limits, Sandbox, SandboxFactory

ANSWER = "answer.md"
"""Where a judge finds the last words of an agent whose action format has answers, among the files it leaves."""


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
class SandboxNeeds:
    """What an agent's sandbox needs besides its files: an environment, its limits, and a bash command that is run once
    before the agent begins (it takes away what would give the solution away)."""

    environment: Environment | None = None
    limits: Limits = Limits()
    prepare: str | None = None


@dataclass(frozen=True)
class Verdict:
    """What the verifier says: reward in [0, 1], a stable code (passed, failed_tests, merge_conflict, no_patch,
    infrastructure), and details."""

    reward: float
    verdict: str
    details: Mapping[str, Any]


@dataclass(frozen=True)
class RejectedInput:
    """An input that was not taken: where it is (its row, where the source has rows), a stable code, what was found."""

    source: str
    reason: str
    detail: str
    row: int | None = None


def with_defaults(suite: str, family: str, params: Mapping[str, Any], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """A suite's params over its family's defaults.

    Raises:
        ValueError: a param that the family does not have.
    """
    if unknown := sorted(set(params) - set(defaults)):
        raise ValueError(f"suite {suite}: unknown params {unknown}; {family} has {sorted(defaults)}")
    return {**defaults, **params}


class Family(Protocol):
    """One suite family, a module-level object `FAMILY` of `etpi_assets.tasks.<family>`."""

    invents_names: bool
    """Whether it makes up the names in its tasks, so that held-out ones can be unseen in training."""

    def sandbox(self, params: Mapping[str, Any]) -> str | None:
        """The kind of sandbox that a suite with these params is proven in; None where its tasks come without
        environments, to be looked up and measured against, not run."""
        ...

    def load(self, suite: str, seed: int, params: Mapping[str, Any]) -> Iterator[Task | RejectedInput]:
        """The suite's tasks, deterministic in (seed, params); refusals for what could not be read."""
        ...

    def roles(self, task: Task) -> Sequence[Role]:
        """The agents a task seats, in order."""
        ...

    def needs(self, task: Task) -> SandboxNeeds:
        """What the sandboxes of the task's agents need."""
        ...

    def workspace(self, task: Task, role: Role) -> dict[str, str]:
        """The files an agent starts with, by relative path, over what its environment has there."""
        ...

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        """Judge what each agent left (agent_id -> files): freeze the patches, merge, add hidden tests, run."""
        ...

    def solve(self, task: Task, role: Role) -> Sequence[str]:
        """Bash commands that leave the workspace as the reference solution does for this role, one a turn."""
        ...

    def entities(self, task: Task) -> Sequence[str]:
        """File paths and function names that occur in the task, for the behaviours."""
        ...

    def validate(self, tasks: Sequence[Task], sandboxes: SandboxFactory) -> Iterator[RejectedInput | Task]:
        """Each task if its reference passes three times and the null solution fails, else the refusal; in order."""
        ...


@runtime_checkable
class JudgesInPlace(Protocol):
    """A family whose verdict is about the machines that agents leave, not about their text files alone: files of any
    kind and mode. Its `judge` is not asked after a rollout."""

    def judge_in_place(self, task: Task, machines: Mapping[str, Sandbox], sandboxes: SandboxFactory) -> Verdict:
        """Judge the sandboxes that the agents (by id) worked in; nothing of theirs runs any more. What counts is copied
        out as data and judged in a sandbox of its own: no program that an agent could write takes part."""
        ...
