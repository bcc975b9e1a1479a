"""Templated plan-first rollouts: the agent loop plays a script, without workspaces or a judge.

So prompts, INBOX lines and observations have the form of live rollouts. Every turn of the script is parsed back by the
parser that inference uses; a turn that this parser does not understand is an error.
"""

from __future__ import annotations

import posixpath
import random
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self, cast

from etpi_assets.agent.actions import format_action, read_actions
from etpi_assets.agent.loop import SUBMIT, RolloutJob, RolloutRuntime, run_rollout
from etpi_assets.specs.rollout_set import RolloutSetSpec, TemplatedSection
from etpi_assets.tasks.family import Family, Role, SandboxNeeds, Task, Verdict
from etpi_assets.trajectories.records import RolloutRecord
from etpi_assets.worlds.text_engine import TextEngine, UntokenizedChat
from etpi_resources.engines import Engine, Request
from etpi_resources.sandboxes import CommandResult, Environment, Limits, SandboxFactory

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat

WAITING = "echo waiting"
TESTS = "pytest"


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


@dataclass(frozen=True)
class PlanFirstAgent:
    """One agent of the script: its id, its partner's, the file that each of them changes, whether it writes first."""

    agent_id: str
    partner: str
    own_file: str
    partner_file: str
    first: bool

    @property
    def words(self) -> dict[str, str]:
        """Values of the placeholders in the phrases."""
        return {"partner": self.partner, "own": self.own_file, "other": self.partner_file}


def write_turns(agent: PlanFirstAgent, section: TemplatedSection, rng: random.Random) -> list[str]:
    """Write the agent's turns in order; the last one submits. Raises ValueError if a turn does not parse back."""

    def phrase(occasion: str) -> str:
        return rng.choice(_PHRASES[occasion]).format(**agent.words)

    def message(text: str, prose: str, *, wait: bool = False) -> str:
        return _message(agent.partner, phrase(text), phrase(prose), section, wait)

    if agent.first or section.second == "plan":
        # A partner that waits first answers a round later. Bash before its answer would not be plan-first.
        opening = [message("plans", "before_plan", wait=section.second == "wait")]
    elif section.second == "acknowledge":
        opening = [message("answers", "before_acknowledgement")]
    else:
        opening = [_bash(WAITING, phrase("before_wait"), section), message("answers", "before_answer")]
    work = {
        f"cat {agent.own_file}": "before_read",
        f"sed -i 's/[[:space:]]*$//' {agent.own_file}": "before_edit",
        f"git diff --stat {agent.own_file}": "before_diff",
        **({TESTS: "before_tests"} if section.run_tests else {}),
        f"echo {SUBMIT}": "before_submit",
    }
    return opening + [_bash(command, phrase(occasion), section) for command, occasion in work.items()]


def _bash(command: str, prose: str, section: TemplatedSection) -> str:
    text = _turn(prose, command, section)
    actions, error = read_actions(text)
    if error or [(a.kind, a.command) for a in actions] != [("bash", command)]:
        raise ValueError(f"the turn {text!r} parses back as {actions or error}, not as the command {command!r}")
    return text


def _message(partner: str, message: str, prose: str, section: TemplatedSection, wait: bool) -> str:
    text = _turn(prose, f"send_message {'--wait ' * wait}{partner} <<'MSG'\n{message}\nMSG", section)
    actions, error = read_actions(text)
    parsed = [(a.kind, a.to, a.message, a.pure, a.wait) for a in actions]
    if error or parsed != [("send_message", partner, message, True, wait)]:
        raise ValueError(f"the turn {text!r} parses back as {actions or error}, not as a message to {partner}")
    return text


def _turn(prose: str, command: str, section: TemplatedSection) -> str:
    if section.calls == "runtime":
        return f"{prose}\n\n{format_action(command)}"
    return f"{prose} <tool_call><function=bash><parameter=command>\n{command}\n</parameter></function></tool_call>"


_PHRASES: Mapping[str, Sequence[str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
"""Occasion -> alternative wordings."""
