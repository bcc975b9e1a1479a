"""Playing a templated conversation through the agent loop, so that prompts, INBOX lines and observations are those of
live rollouts.

Belongs here: the policy that speaks the script, the family without workspaces and verdicts, the workspace that knows
the script's commands. Does not belong here: the script, or anything a model writes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self, cast

from etpi_assets.agent.loop import SUBMIT, Identity, run_rollout
from etpi_assets.rollouts.plan_first.paths import choose, falls_back
from etpi_assets.rollouts.plan_first.script import Seat, turns
from etpi_assets.specs.rollout_set import RolloutSetSpec, TemplatedSection
from etpi_assets.tasks.family import Family, Needs, Role, Task, Verdict
from etpi_assets.trajectories.records import RolloutRecord
from etpi_assets.worlds.words import NoTokens, Words
from etpi_resources.engines import Engine, Request
from etpi_resources.sandboxes import CommandResult, Environment, Limits, SandboxFactory

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat


class PlanFirst:
    """The policy: `policy(request)` is the turn asked for, by (seed, rollout, agent) alone."""

    def __init__(self, family: Family, section: TemplatedSection, pattern: str, seed: int) -> None:
        self._family, self._section, self._pattern, self._seed = family, section, pattern, seed

    def __call__(self, request: Request) -> str:
        rollout, _, agent_id = request.session.rpartition("/")
        roles = self._family.roles(request.privileged["task"])
        role = next(role for role in roles if role.agent_id == agent_id)
        # Both agents of a rollout name the same two files.
        chosen = choose(
            [r.instruction for r in roles], self._pattern, self._section.paths, random.Random(f"{self._seed}/{rollout}")
        )
        first = role.agent_id == roles[0].agent_id
        own, other = chosen if first else chosen[::-1]
        seat = Seat(agent_id, role.partner or "", own, other, first)
        said = turns(seat, self._section, random.Random(f"{self._seed}/{rollout}/{agent_id}"))
        turn = sum(message["role"] == "assistant" for message in request.messages)
        return said[min(turn, len(said) - 1)]


def engine(spec: RolloutSetSpec, family: Family) -> Engine:
    """The engine of a set with a [templated] section."""
    assert spec.engine and spec.templated  # as the spec's model has made sure
    pattern = spec.scoring.path_pattern
    settings = {**spec.templated.model_dump(), "path_pattern": pattern, "seed": spec.seed}
    return Words(PlanFirst(family, spec.templated, pattern, spec.seed), spec.engine.teacher, settings)


def rehearse(
    task: Task,
    sample: int,
    family: Family,
    speaker: Engine,
    sandboxes: SandboxFactory,
    spec: RolloutSetSpec,
    identity: Identity,
) -> RolloutRecord:
    """One conversation as a record, without a verdict; the proposer's alone where the template says so.

    Raises:
        ValueError: the task does not seat two agents.
        RuntimeError: a turn did not read back, or used a command that the workspace does not know.
    """
    assert spec.templated
    roles = family.roles(task)
    if len(roles) != 2:
        raise ValueError(f"{task.task_id} seats {len(roles)} agent(s); a plan-first template is for two")
    record = run_rollout(
        task,
        cast(Family, _Stage(family)),
        speaker,
        sandboxes,
        spec.agent,
        cast("ChatFormat", NoTokens()),
        identity=identity,
        sample=sample,
        sample_seed=spec.seed,
    )
    if record.error:
        raise RuntimeError(f"templated rollout of {task.task_id}, sample {sample}: {record.error}")
    record.outcome = None  # nobody judged it
    if spec.templated.roles == "proposer":
        record = replace(record, agents=record.agents[:1])
    return record


def fallbacks(tasks: Iterable[Task], family: Family, spec: RolloutSetSpec) -> list[str]:
    """The tasks, by id, whose texts name too few files, so that their plans name files of the fixed list."""
    if spec.templated is None or spec.templated.paths == "fixed":
        return []
    pattern = spec.scoring.path_pattern
    return [task.task_id for task in tasks if falls_back([r.instruction for r in family.roles(task)], pattern)]


class _Stage:
    """A suite family without workspaces and verdicts."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def roles(self, task: Task) -> Sequence[Role]:
        return self._family.roles(task)

    def needs(self, task: Task) -> Needs:
        return Needs()

    def workspace(self, task: Task, role: Role) -> dict[str, str]:
        return {}

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        return Verdict(0.0, "unknown", {})


class _Prop:
    """A workspace that answers the script's commands and no others; it holds no files and runs no process."""

    _ANSWERS = (
        (re.compile(r"echo (waiting|" + SUBMIT + ")"), r"\1\n"),
        (re.compile(r"cat (\S+)"), r"[\1 as it stands in the repository]\n"),
        (re.compile(r"sed -i \S+ \S+"), ""),
        (re.compile(r"git diff --stat (\S+)"), r" \1 | 2 +-\n 1 file changed\n"),
    )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing is held."""

    def write_files(self, files: Mapping[str, str]) -> None:
        raise ValueError("the templated workspace holds no files")

    def read_files(self) -> dict[str, str]:
        return {}

    def run(self, command: str, *, timeout: float | None = None) -> CommandResult:
        for pattern, answer in self._ANSWERS:
            if match := pattern.fullmatch(command):
                return CommandResult(match.expand(answer), 0, 0.0)
        if status := re.fullmatch(r"exit (\d+)", command):  # how grading asks whether a workspace still answers
            return CommandResult("", int(status[1]), 0.0)
        raise ValueError(f"the templated workspace does not know {command!r}; it answers the script alone")


class Props:
    """Makes workspaces that answer the script's commands."""

    name = "templated"

    def create(
        self,
        files: Mapping[str, str],
        limits: Limits | None = None,
        environment: Environment | None = None,
    ) -> _Prop:
        return _Prop()
