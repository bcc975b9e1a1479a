"""The interface of a suite family (Family) and its values: tasks, roles, verdicts, rejected inputs."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from etpi_assets.specs.paths import expand
from etpi_resources.hashes import json_hash
from etpi_resources.sandboxes import Environment, Limits, Sandbox, SandboxFactory

ANSWER = "answer.md"
"""The file of a final workspace that holds the agent's answer, where its action format has answers."""


@dataclass(frozen=True)
class Role:
    """One agent of a task: its id ("agent1"), the id of its feature, its instruction, and its partner's id or None."""

    agent_id: str
    feature_id: str
    instruction: str
    partner: str | None = None


@dataclass(frozen=True)
class Task:
    """One task. `payload` is JSON-serialisable and holds all that running and judging it needs."""

    task_id: str
    suite: str
    repo: str
    split: str
    instruction: str
    payload: Mapping[str, Any]
    content_hash: str

    @classmethod
    def hashed(
        cls, task_id: str, suite: str, repo: str, split: str, instruction: str, payload: Mapping[str, Any]
    ) -> Self:
        """Return a task whose content is its payload and its instruction."""
        return cls(task_id, suite, repo, split, instruction, payload, json_hash([payload, instruction]))


@dataclass(frozen=True)
class SandboxNeeds:
    """Requirements of an agent's sandbox besides its files: environment, limits, and `prepare`.

    `prepare` is a bash command that runs once before the agent starts; it removes hidden tests and history."""

    environment: Environment | None = None
    limits: Limits = Limits()
    prepare: str | None = None


@dataclass(frozen=True)
class Verdict:
    """The verifier's result: reward in [0, 1], a stable code (passed, failed_tests, merge_conflict, no_patch,
    infrastructure), and details. The reward of a task without a working verifier is None."""

    reward: float | None
    verdict: str
    details: Mapping[str, Any]


REFERENCE_RUNS = 3
"""Runs of a task's reference solution; all must pass."""

EXCLUDED = "excluded"
"""The reason code of an input that the suite's params leave out."""


BLIND = "blind"
"""The `verdict_trust` of a verdict whose expected values no sandbox ever had: the host compared (docs/verdicts.md)."""

REVERSED = "reversed"
"""As BLIND, but for some tests an assertion was reversed: they had to fail in one run and to pass in another."""

UNCHALLENGED = "unchallenged"
"""The `verdict_trust` of a verdict that rests, for a test at least, on the report of the process that ran the tests."""

TRUSTS = (UNCHALLENGED, REVERSED, BLIND)
"""From the weakest to the strongest."""

CHEATED = "cheated"
"""The verdict on a patch under which tests pass that a right solution fails."""


def weakest(trusts: Iterable[str]) -> str:
    """Return the weakest trust; UNCHALLENGED of none. Other words are weaker than all."""
    order = {trust: place for place, trust in enumerate(TRUSTS)}
    return min(trusts, key=lambda trust: order.get(trust, -1), default=UNCHALLENGED)


UNPROVEN = "unproven"
"""The verdict on a task without a working verifier."""

WHY_UNPROVEN = "why_unproven"
"""The key of such a task's payload: the reason code and detail."""

UNPROVEN_REASONS = ("no_reference", "reference_fails", "null_passes")
"""Reason codes of tasks that can be run, but whose verifier cannot be relied on."""


CALIBRATIONS = "calibrations"
"""The key of a proved task's payload: trial -> its calibration (`proof`). The content hash of a task is without it."""


def is_trusted(trust: str | None, least: str | None) -> bool:
    """Return whether a verdict's trust is at least that of the spec; any if the spec names none."""
    return least is None or (trust in TRUSTS and TRUSTS.index(trust) >= TRUSTS.index(least))


@dataclass(frozen=True)
class RejectedInput:
    """A quarantined input: its source (and row, if the source has rows), a stable reason code, and the detail."""

    source: str
    reason: str
    detail: str
    row: int | None = None


class Rejected(ValueError):
    """An input cannot be used; `reason` is a code of rejected inputs."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def with_defaults(suite: str, family: str, params: Mapping[str, Any], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a suite's params merged over its family's defaults. Raises ValueError for an unknown param."""
    if unknown := sorted(set(params) - set(defaults)):
        raise ValueError(f"suite {suite}: unknown params {unknown}; {family} has {sorted(defaults)}")
    return {**defaults, **params}


def named_path(suite: str, params: Mapping[str, Any], holds: str) -> Path:
    """Return the path of a suite's param `path`, which `holds` something. Raises ValueError if it names none."""
    if not params["path"]:
        raise ValueError(f"suite {suite}: params.path has to name {holds}")
    return expand(str(params["path"]))


def require_heldout(suite: str, named: Collection[str], present: Collection[str]) -> None:
    """Raise ValueError for a held-out repository that the data spell otherwise: it would be in the training split.

    "Pallets/flask", "pallets__flask" and "flask" are other spellings of "pallets/flask". A name that is like none may
    be of data that this copy lacks.
    """
    for name in sorted({*named} - {*present}):
        for other in sorted(present):
            ends = [text.rpartition("/")[2] for text in (name, other)]
            whole = ("/" in name) == ("/" in other)
            if len({_letters(text) for text in (name, other)}) == 1 or (not whole and len({*map(_letters, ends)}) == 1):
                raise ValueError(
                    f"suite {suite}: params.heldout_repos names {name!r}, which the data call {other!r}: write that"
                )


def _letters(name: str) -> str:
    return re.sub(r"[\W_]+", "", name.lower())


def proved(task: Task, failed: Sequence[object], *, null: bool) -> Task | RejectedInput:
    """Return the task, or its rejection if runs of its reference `failed`, or if an untouched workspace passes."""
    if failed:
        detail = f"{len(failed)} of {REFERENCE_RUNS} runs: {failed[0]}"
        return RejectedInput(task.task_id, "reference_fails", detail[:1500])
    return RejectedInput(task.task_id, "null_passes", "doing nothing passes") if null else task


def _below(files: Mapping[str, str], folder: str) -> dict[str, str]:
    return {path.removeprefix(folder): text for path, text in files.items() if path.startswith(folder)}


class Family(Protocol):
    """One suite family, a module-level object `FAMILY` of `etpi_assets.tasks.<family>`.

    The methods with a body are defaults of a class that inherits this one: a single agent, an empty workspace, no
    commands that solve a task, nothing to name, and tasks that are proved by those commands."""

    params: Mapping[str, Any]
    """A suite's params and their defaults; `sandbox` is one of them."""
    feature_id: str = "task"
    """The feature of a task's only agent."""
    invents_names: bool = False
    """True if the family invents the names in its tasks, so that held-out names can be absent from training."""
    keeps_proofs: bool = False
    """True if proving a suite takes long: it is kept when only etpi's code was raised, until `etpi run --rebuild`."""
    repo_is_source: bool = False
    """True if the `repo` of a task is a source of questions, which one suite may train on and another hold out."""

    verdict_trust: str | None = None
    """The trust of all verdicts (TRUSTS), if they have one; else that of a proved task's `calibrations`."""

    def trusts(self, task: Task) -> Sequence[str]:
        """Return the trust of each test that has to turn, or the family's own; none if nothing is known."""
        if self.verdict_trust:
            return [self.verdict_trust]
        calibrations = task.payload.get(CALIBRATIONS, {}).values()
        return [trust for each in calibrations for trust in each.get("trust", {}).values()]

    def sandbox(self, params: Mapping[str, Any]) -> str | None:
        """Return the kind of sandbox that validates a suite with these params.

        None if its tasks have no environments: recorded runs can be compared with them, but nothing can run them."""
        return {**self.params, **params}["sandbox"]

    def load(self, suite: str, seed: int, params: Mapping[str, Any]) -> Iterator[Task | RejectedInput]:
        """Yield the suite's tasks, deterministic in (seed, params), and a RejectedInput for each unreadable input."""
        ...

    def roles(self, task: Task) -> Sequence[Role]:
        """Return the agents of a task, in order."""
        return [Role("agent1", self.feature_id, task.instruction)]

    def needs(self, task: Task) -> SandboxNeeds:
        """Return the requirements of the agents' sandboxes."""
        return SandboxNeeds()

    def workspace(self, task: Task, role: Role) -> dict[str, str]:
        """Return the files an agent starts with, by relative path; they overwrite those of its environment."""
        return {}

    def judge(self, task: Task, final: Mapping[str, Mapping[str, str]], sandboxes: SandboxFactory) -> Verdict:
        """Judge the final workspaces (agent_id -> files): take the patches, merge them, add hidden tests, run them."""
        ...

    def solve(self, task: Task, role: Role) -> Sequence[str]:
        """Return bash commands, one a turn, that apply the reference solution of this role to its workspace; none if an
        answer is text."""
        return ()

    def entities(self, task: Task) -> Sequence[str]:
        """Return the file paths and function names of the task; the behaviours look for them."""
        return ()

    def validate(self, tasks: Sequence[Task], sandboxes: SandboxFactory) -> Iterator[RejectedInput | Task]:
        """Yield each task, in order, or its rejection unless its reference passes three times and no change fails.

        This one is for single agents, small workspaces and quick references: all runs are in one sandbox."""
        roles = [self.roles(task)[0] for task in tasks]
        starts = [self.workspace(task, role) for task, role in zip(tasks, roles, strict=True)]
        files, commands = dict[str, str](), list[str]()
        for index, (task, start) in enumerate(zip(tasks, starts, strict=True)):
            solution = "\n".join(self.reference_commands(task))
            for folder in (f"{index}/{run}/" for run in range(REFERENCE_RUNS)):
                files |= {folder + path: text for path, text in start.items()}
                commands.append(f"(mkdir -p {folder} && cd {folder} && {solution})")
        with sandboxes.create(files, Limits(command_seconds=240.0)) as sandbox:
            sandbox.run("\n".join(commands))
            final = sandbox.read_files()
        for index, (task, role, start) in enumerate(zip(tasks, roles, starts, strict=True)):
            left = [_below(final, f"{index}/{run}/") for run in range(REFERENCE_RUNS)]
            null, *runs = [self.judge(task, {role.agent_id: work}, sandboxes) for work in (start, *left)]
            yield proved(task, [run for run in runs if run.verdict != "passed"], null=null.verdict == "passed")

    def reference_commands(self, task: Task) -> Sequence[str]:
        """Return bash commands that solve a task of one agent, by which it is proved."""
        return self.solve(task, self.roles(task)[0])


class FilesFamily(Family):
    """A family whose tasks are in files at `params.path`."""

    name: str
    """The family's name in errors."""
    data: str
    """A phrase for these files, in errors."""

    def load(self, suite: str, seed: int, params: Mapping[str, Any]) -> Iterator[Task | RejectedInput]:
        """Yield the suite's tasks and rejections. Raises ValueError for unknown params or no path; as `read_path`."""
        chosen = with_defaults(suite, self.name, params, self.params)
        return self.read_path(suite, seed, named_path(suite, chosen, self.data), chosen)

    @abstractmethod
    def read_path(self, suite: str, seed: int, path: Path, chosen: Mapping[str, Any]) -> Iterator[Task | RejectedInput]:
        """Yield the tasks and rejections of a path. Raises FileNotFoundError if nothing is there.

        `chosen`: the suite's params, with defaults."""


@runtime_checkable
class JudgesInPlace(Protocol):
    """A family that judges the agents' sandboxes and not only their text files: files of any kind and mode count.

    After a rollout `judge_in_place` is called instead of `judge`."""

    def judge_in_place(self, task: Task, machines: Mapping[str, Sandbox], sandboxes: SandboxFactory) -> Verdict:
        """Judge the sandboxes that the agents (by id) worked in, after all their processes have ended.

        Copy the answer out as data and judge it in a fresh sandbox, where no program of an agent runs."""
        ...
