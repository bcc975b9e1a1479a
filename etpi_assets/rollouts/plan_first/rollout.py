"""Templated plan-first rollouts: the agent loop plays the script, without workspaces or a judge.

So prompts, INBOX lines and observations have the form of live rollouts.
"""

from __future__ import annotations

import posixpath
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self, cast

from etpi_assets.agent.loop import SUBMIT, RolloutJob, RolloutRuntime, run_rollout
from etpi_assets.rollouts.plan_first.script import TESTS, PlanFirstAgent, write_turns
from etpi_assets.specs.rollout_set import RolloutSetSpec, TemplatedSection
from etpi_assets.tasks.family import Family, Role, SandboxNeeds, Task, Verdict
from etpi_assets.trajectories.records import RolloutRecord
from etpi_assets.worlds.text_engine import TextEngine, UntokenizedChat
from etpi_resources.engines import Engine, Request
from etpi_resources.sandboxes import CommandResult, Environment, Limits, SandboxFactory

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat


class PlanFirstPolicy:
    """Scripted policy: `policy(request)` is the requested turn, a function of (seed, rollout, agent, turn number)."""

    def __init__(self, family: Family, section: TemplatedSection, pattern: str, seed: int) -> None:
        self._family, self._section, self._pattern, self._seed = family, section, pattern, seed

    def __call__(self, request: Request) -> str:
        rollout, _, agent_id = request.session.rpartition("/")
        roles = self._family.roles(request.privileged["task"])
        role = next(role for role in roles if role.agent_id == agent_id)
        # The seed leaves the agent out, so both agents of a rollout name the same two files.
        files = choose(
            [r.instruction for r in roles], self._pattern, self._section.paths, random.Random(f"{self._seed}/{rollout}")
        )
        first = role.agent_id == roles[0].agent_id
        own_file, partner_file = files if first else files[::-1]
        agent = PlanFirstAgent(agent_id, role.partner or "", own_file, partner_file, first)
        turns = write_turns(agent, self._section, random.Random(f"{self._seed}/{rollout}/{agent_id}"))
        number = sum(message["role"] == "assistant" for message in request.messages)
        return turns[min(number, len(turns) - 1)]


def plan_first_engine(spec: RolloutSetSpec, family: Family) -> Engine:
    """Return the engine of a rollout set with a [templated] section."""
    assert spec.engine and spec.templated  # the spec's model requires both
    pattern = spec.scoring.path_pattern
    settings = {**spec.templated.model_dump(), "path_pattern": pattern, "seed": spec.seed}
    return TextEngine(PlanFirstPolicy(family, spec.templated, pattern, spec.seed), spec.engine.teacher, settings)


def run_plan_first(job: RolloutJob, runtime: RolloutRuntime, section: TemplatedSection) -> RolloutRecord:
    """Play one conversation; the record has no outcome, and only the proposer if `section.roles` says so.

    Args:
        runtime: its chat format is replaced by one without ids, its family by one that neither sets up nor judges.

    Raises:
        ValueError: the task is not for two agents.
        RuntimeError: a turn did not parse back, or ran a command that the script does not have.
    """
    task = job.task
    roles = runtime.family.roles(task)
    if len(roles) != 2:
        raise ValueError(f"{task.task_id} has {len(roles)} agent(s); a plan-first template is for two")
    family, chat = cast(Family, _FamilyWithoutWorkspaces(runtime.family)), cast("ChatFormat", UntokenizedChat())
    record = run_rollout(job, replace(runtime, family=family, chat=chat))
    if record.error:
        raise RuntimeError(f"templated rollout of {task.task_id}, sample {job.sample}: {record.error}")
    record.outcome = None
    if section.roles == "proposer":
        record = replace(record, agents=record.agents[:1])
    return record


def tasks_with_fixed_files(tasks: Iterable[Task], family: Family, spec: RolloutSetSpec) -> list[str]:
    """Return the ids of tasks whose texts name fewer than two files, so that their plans use the fixed list instead."""
    if spec.templated is None or spec.templated.paths == "fixed":
        return []
    pattern = spec.scoring.path_pattern
    return [task.task_id for task in tasks if falls_back([r.instruction for r in family.roles(task)], pattern)]


class _FamilyWithoutWorkspaces:
    """The roles of a suite family, with empty workspaces and no verdicts."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def roles(self, task: Task) -> Sequence[Role]:
        return self._family.roles(task)

    def needs(self, task: Task) -> SandboxNeeds:
        return SandboxNeeds()

    def workspace(self, task: Task, role: Role) -> dict[str, str]:
        return {}

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        return Verdict(0.0, "unknown", {})


class _ScriptSandbox:
    """A sandbox without files or processes that answers the script's commands alone."""

    _ANSWERS = (
        (re.compile(r"echo (waiting|" + SUBMIT + ")"), r"\1\n"),
        (re.compile(r"cat (\S+)"), r"[\1 as it stands in the repository]\n"),
        (re.compile(r"sed -i \S+ \S+"), ""),
        (re.compile(r"git diff --stat (\S+)"), r" \1 | 2 +-\n 1 file changed\n"),
        (re.compile(TESTS), "[the tests of the repository pass]\n"),
    )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """There is nothing to close."""

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


class ScriptSandboxes:
    """Factory of sandboxes that answer the script's commands."""

    name = "templated"

    def create(
        self,
        files: Mapping[str, str],
        limits: Limits | None = None,
        environment: Environment | None = None,
    ) -> _ScriptSandbox:
        return _ScriptSandbox()


FIXED: tuple[tuple[str, str], ...] = (
    ("src/cli.py", "src/config.py"),
    ("flask/json/__init__.py", "flask/app.py"),
    ("jinja2/sandbox.py", "tests/test_sandbox.py"),
    ("server/routes.py", "server/models.py"),
    ("lib/parser.py", "lib/printer.py"),
)
"""Pairs of files that no task has."""


def task_paths(texts: Sequence[str], pattern: str) -> list[list[str]]:
    """Return the relative paths in each text: normalised, distinct, in order. Raises re.error for a bad pattern."""
    paths = []
    for text in texts:
        matches = (posixpath.normpath(re.sub("/+", "/", match[0])) for match in re.finditer(pattern, text))
        paths.append([path for path in dict.fromkeys(matches) if not path.startswith(("/", ".."))])
    return paths


def falls_back(texts: Sequence[str], pattern: str) -> bool:
    """Return whether the texts name fewer than two files in all, too few for a plan."""
    return len({path for paths in task_paths(texts, pattern) for path in paths}) < 2


def choose(texts: Sequence[str], pattern: str, how: str, rng: random.Random) -> tuple[str, str]:
    """Choose two different files: (the first agent's, the second's).

    Args:
        texts: the instruction of each agent, in order.
        how: "task" prefers a file from the agent's own text, and takes a pair of the fixed list if the texts name fewer
            than two files; "fixed" always takes a pair of the list.
    """
    if how == "fixed" or falls_back(texts, pattern):
        return rng.choice(FIXED)
    by_agent = task_paths(texts, pattern)
    every = list(dict.fromkeys(path for paths in by_agent for path in paths))
    first = rng.choice(by_agent[0] or every)
    rest = [path for path in by_agent[-1] if path != first] or [path for path in every if path != first]
    return first, rng.choice(rest)
