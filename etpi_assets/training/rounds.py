"""Rounds of reinforcement: roll the policy out on the tasks that the trainer names, reward, store, return samples.

A round is all rollouts that are trained on together. It is one file, written when the round is complete: a header line
with the rewarded samples, then one line per rollout; a second file (`SUFFIX`) is added once it was trained on. A
resumed run drops the rounds after its checkpoint, because other weights will generate them.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from random import Random
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from etpi_assets.agent.harness import run_harness
from etpi_assets.agent.loop import Identity, RolloutJob, RolloutRuntime, run_rollout
from etpi_assets.agent.prompts import render_prompts
from etpi_assets.agent.tools import tool_schemas
from etpi_assets.rollouts.collect import MODEL_CONCURRENCY
from etpi_assets.rollouts.journal import from_line, to_line
from etpi_assets.scoring.advantage import group_advantages
from etpi_assets.scoring.rewards.functions import Score, reward_of, score_rollout
from etpi_assets.specs.training import FEW_TASKS, KEEP_GOING, RLSection
from etpi_assets.tasks.family import Family, Task
from etpi_assets.training.forests import Forest, RolloutsFailed, agents_of, as_forest
from etpi_assets.training.lock_step import map_in_step
from etpi_assets.training.served_teacher import ServedTeacher
from etpi_assets.trajectories.records import RolloutRecord
from etpi_resources.engines import Completion, Engine, EngineUnavailable, EngineView, Request
from etpi_resources.errors import ExpectedError
from etpi_resources.lake.check_outcome import BadData
from etpi_resources.lake.files import write_atomically
from etpi_resources.sandboxes import SandboxFactory
from etpi_resources.trainers.policy_link import Sample

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat


SUFFIX = ".tokens"
"""Of the file beside a round's with the trainer's figures at each token that the policy generated: two rows of
little-endian float32, log-probabilities and entropies in nats. Samples are in the order of the round, and of each its
turns' `output_ids` one after the other."""


@dataclass(frozen=True)
class RLEnvironment:
    """Environment of the policy's rollouts: tasks in the order of the trainer's rows, their family and judge,
    sandboxes, the chat format and its template's arguments; and the ids of tasks whose prompt is too long."""

    tasks: Sequence[Task]
    family: Family
    sandboxes: SandboxFactory
    chat: ChatFormat
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    left_out: Sequence[str] = ()
    judge: str = ""


CONSTANT_GROUPS = 24
"""Groups in a row without variance that end a run, unless the variable `KEEP_GOING` is 1."""


class NoVariance(ExpectedError, RuntimeError):
    """No group of the last rounds has an advantage; the message has the remedies."""


REFILL = 10**9
"""Added to the number of a sample that broke: the number of the one in its place, which no step gives."""

Reason = Literal["broken", "replaced", "constant", "truncated"]
"""Why a rollout is in no loss: it broke, as the one that it replaces; it broke and another replaces it; its group had
no variance, and another task's replaces it; it was cut at a length limit (`mask_truncated`)."""
ASIDE: frozenset[Reason | None] = frozenset({"replaced", "constant"})
"""The reasons of rollouts that have no place in the trainer's round."""


@dataclass(frozen=True)
class RewardedSample:
    """A rollout with its rewards and advantage; columns of the tables `rl_samples` and `rewards`.

    Attributes:
        step: optimiser steps done before it was trained on. place: its position in the round.
        reward: the weighted sum of `scores`. called: whether an action ran and returned an observation.
        prompt_tokens, policy_tokens, read_tokens: ids of the first prompt, ids that the policy generated, and ids of
            the observations.
        left_out: why it is in no loss; None: it is trained on.
        agents, agent_branches, agent_tokens: of several agents, or of one whose turns fork: their ids, and of each the
            branches of its turns and the ids that the policy generated; else empty.
        agent_rewards, agent_advantages: where terms are of agents; else empty.
        untrained_tokens: ids of calls of a harness that are no turns.
        version: optimiser steps done by the oldest weights that generated a turn; None: `step`.
        turn_versions: of each turn, in the order of `rl_turns`; empty where all are `version`.
    """

    rollout_id: str
    step: int
    place: int
    reward: float
    advantage: float
    parsed: bool
    solved: bool | None
    called: bool
    prompt_tokens: int
    policy_tokens: int
    read_tokens: int
    scores: Sequence[Score]
    left_out: Reason | None = None
    agents: Sequence[str] = ()
    agent_branches: Sequence[int] = ()
    agent_tokens: Sequence[int] = ()
    agent_rewards: Sequence[float] = ()
    agent_advantages: Sequence[float] = ()
    untrained_tokens: int | None = None
    version: int | None = None
    turn_versions: Sequence[int] = ()


ByAgent = Mapping[str | None, float]
"""Values of a rollout (None), and of its agents where they have rewards of their own."""


@dataclass
class _Attempted:
    """A rollout of a round while it is rewarded; see `RewardedSample`.

    Attributes:
        versions: of the weights, by the ids of prompt and output of a turn.
        teacher_logprobs: see `ServedTeacher.score`; None: no teacher is served.
    """

    task: Task
    place: int
    record: RolloutRecord
    versions: Mapping[tuple[int, ...], int]
    teacher_logprobs: Sequence[float] | None = None
    left_out: Reason | None = None
    scores: Sequence[Score] = ()
    rewards: ByAgent = field(default_factory=lambda: {None: 0.0})
    advantages: ByAgent = field(default_factory=lambda: {None: 0.0})

    @property
    def varies(self) -> bool:
        return any(self.advantages.values())


def _versioned(engine: Engine) -> tuple[Engine, dict[tuple[int, ...], int]]:
    """Return the engine, and the version of the weights of each completion by its ids; of equal ones, the oldest."""
    versions: dict[tuple[int, ...], int] = {}

    def complete(requests: Sequence[Request]) -> list[Completion]:
        completions = engine.complete(requests)
        for completion in completions:
            if completion.version is not None:
                ids = (*(completion.prompt_ids or ()), *(completion.output_ids or ()))
                versions.setdefault(ids, completion.version)
        return completions

    return EngineView(engine, complete), versions


class Rounds:
    """Rolls out rows for a trainer: `rounds(step, rows, engine)`; see `policy_link.RollOut`.

    Args:
        section: the spec's.
        identity: names in the rollouts' records; its spec_key covers all that they depend on except task, sample and
            weights.
        seed: of the sampler.
        folder: of the rounds' files.
        teacher: scores each rollout, if it is served.
    """

    def __init__(
        self, section: RLSection, environment: RLEnvironment, identity: Identity, seed: int, folder: Path,
        teacher: ServedTeacher | None = None,
    ) -> None:  # fmt: skip
        self.section, self.environment, self.identity = section, environment, identity
        self.seed, self.folder, self.teacher = seed, folder, teacher
        self._constant, self._counting = 0, Lock()
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, step: int, rows: Sequence[int], engine: Engine) -> list[Sample]:
        """Roll out, reward and store one round.

        Raises:
            RolloutsFailed: more rollouts broke than `max_broken` allows, or one has no ids.
            BadReward: a reward has no value.
            EngineUnavailable: no server of the teacher answers, or one has other weights than in the first round.
        """
        size, tasks = self.section.group_size, self.environment.tasks
        for start in range(0, len(rows), size):
            if len(set(rows[start : start + size])) != 1:
                raise RolloutsFailed(
                    f"the trainer requested rows {rows[start : start + size]}, which are no group of {size}"
                )
        placed: dict[int, _Attempted] = {}
        groups: list[list[_Attempted]] = []
        aside: list[_Attempted] = []
        requested = {place: tasks[row] for place, row in enumerate(rows)}
        unused = [task for row, task in enumerate(tasks) if row not in set(rows)]
        for wave in range(self.section.refill + 1):
            placed |= self._roll_out_all(step, requested, aside, engine)
            self._bound_broken(aside, len(rows))
            groups = [[placed[place] for place in range(at, at + size)] for at in range(0, len(rows), size)]
            self._compare(groups)
            constant = [group for group in groups if not any(attempted.varies for attempted in group)]
            chosen = Random(f"{self.seed}/{step}/{wave}").sample(unused, min(len(unused), len(constant)))
            if wave == self.section.refill or not chosen:
                break
            unused = [task for task in unused if task not in chosen]
            requested = {a.place: task for group, task in zip(constant, chosen, strict=False) for a in group}
            for place in requested:
                placed[place].left_out = placed[place].left_out or "constant"
                aside.append(placed[place])
        if self.teacher:
            self.teacher.require_same_weights()
        kept, replaced = [*chain(*groups)], Counter(a.place for a in aside)
        trained = [self._trained(a, step, replaced[a.place]) for a in kept]
        rows_aside = [self._row(a, step, None) for a in aside]
        self._write(step, [*(row for _, row in trained), *rows_aside], [a.record for a in (*kept, *aside)])
        self._stop_without_variance(step, groups)
        return [sample for sample, _ in trained]

    def _roll_out_all(
        self, step: int, requested: Mapping[int, Task], aside: list[_Attempted], engine: Engine
    ) -> dict[int, _Attempted]:
        """Return a rewarded rollout for each place. Those that broke and were replaced are added to `aside`."""
        size = self.section.group_size

        def run(item: tuple[int, Task], engine: Engine = engine) -> list[_Attempted]:
            place, task = item
            return self._roll_out_place(place, task, step * size + place % size, engine)

        if self.section.repeatable:
            results = map_in_step(run, [*requested.items()], engine, MODEL_CONCURRENCY)
        else:
            with ThreadPoolExecutor(min(len(requested), MODEL_CONCURRENCY), thread_name_prefix="rollout") as pool:
                results = list(pool.map(run, requested.items()))
        for *broken, last in results:
            aside += broken
            if last.left_out is None:
                last.scores = score_rollout(last.record, last.task, self.section.rewards)
                reward, of_agents = reward_of(last.scores)
                last.rewards = {None: reward, **of_agents}
        return {last.place: last for *_, last in results}

    def _roll_out_place(self, place: int, task: Task, sample: int, engine: Engine) -> list[_Attempted]:
        """Roll out a sample, again if it breaks (an infrastructure error may pass), and then another in its place."""
        attempted = self._attempt(place, task, sample, engine)
        if attempted.record.error is not None:
            attempted = self._attempt(place, task, sample, engine)
        if attempted.record.error is None:
            return [attempted]
        other = self._attempt(place, task, sample + REFILL, engine)
        attempted.left_out, other.left_out = "replaced", None if other.record.error is None else "broken"
        return [attempted, other]

    def _attempt(self, place: int, task: Task, sample: int, engine: Engine) -> _Attempted:
        """Roll out a sample once; a served teacher scores it."""
        policy, versions = _versioned(engine)
        record = self._roll_out(task, sample, policy)
        attempted = _Attempted(task, place, record, versions)
        if self.teacher and record.error is None:
            try:
                attempted.teacher_logprobs = self.teacher.score(record)
            except EngineUnavailable:
                raise
            except RuntimeError as error:  # the server refuses this rollout
                record.error = f"rl.teacher_engine: {error}"
        return attempted

    def _roll_out(self, task: Task, sample: int, engine: Engine) -> RolloutRecord:
        environment, section = self.environment, self.section
        harness = section.agent.harness is not None
        prompt = section.max_prompt_tokens if harness else len(first_prompt(section, environment, task))
        bounds = {"max_model_len": prompt + section.max_response_tokens, "steering": False}
        agent = section.agent.model_copy(update=bounds)
        runtime = RolloutRuntime(
            environment.family, engine, environment.sandboxes, environment.chat, environment.template_kwargs,
            environment.judge,
        )  # fmt: skip
        job = RolloutJob(task, agent, self.identity, sample, self.seed)
        record = run_harness(job, runtime) if harness else run_rollout(job, runtime)
        if record.error is None and not agents_of(record):
            record.error = (
                "the policy generated nothing: every call was refused, or has more than "
                f"{bounds['max_model_len']} ids (rl.max_prompt_tokens + rl.max_response_tokens)"
            )
        return record

    def _stop_without_variance(self, step: int, groups: Sequence[Sequence[_Attempted]]) -> None:
        """Raise NoVariance if the last groups of the run, `CONSTANT_GROUPS` or more, had equal rewards."""
        if not self.section.learns_from_rewards:
            return
        varied = any(attempted.varies for group in groups for attempted in group)
        with self._counting:  # rounds may run beside each other
            self._constant = 0 if varied else self._constant + len(groups)
        if self._constant >= CONSTANT_GROUPS and os.environ.get(KEEP_GOING) != "1":
            rewards = sorted({round(attempted.rewards[None], 3) for group in groups for attempted in group})
            raise NoVariance(
                f"the last {self._constant} groups, until step {step}, had equal rewards ({rewards[0]:g} to "
                f"{rewards[-1]:g}), so nothing was trained: take tasks that the start checkpoint solves sometimes, "
                "larger groups (rl.group_size), or a finer reward. `etpi run NAME --keep-going` trains on all the same"
            )

    def _bound_broken(self, aside: Sequence[_Attempted], places: int) -> None:
        """Raise RolloutsFailed if more rollouts of the round broke twice than `max_broken` allows."""
        broken = [a for a in aside if a.left_out == "replaced"]
        if len(broken) > math.ceil(self.section.max_broken * places):
            first = broken[0].record
            raise RolloutsFailed(
                f"{len(broken)} rollouts of a round of {places} broke twice, more than rl.max_broken "
                f"({self.section.max_broken:g}) allows; first task {first.task_id} sample {first.sample} broke twice: "
                f"{first.error}"
            )

    def _compare(self, groups: Sequence[Sequence[_Attempted]]) -> None:
        """Set the advantages of the rollouts in their groups."""
        whole = [[a for a in group if a.left_out is None] for group in groups]
        advantages = advantages_of(self.section, [[a.rewards for a in group] for group in whole])
        for a, of_rollout in zip(chain(*whole), advantages, strict=True):
            a.advantages = of_rollout

    def _trained(self, a: _Attempted, step: int, replaced: int) -> tuple[Sample, RewardedSample]:
        """Return the trainer's sample of a rollout in its place, and its row."""
        forest, truncated = None if a.left_out else as_forest(a.record), self._truncated(a.record)
        if forest and self.section.mask_truncated and truncated:
            a.left_out = "truncated"
        row = self._row(a, step, forest)
        advantages, scores = None, iter(a.teacher_logprobs or ())
        if forest is None or a.left_out:
            # One id that is in no loss takes the place of the rollout: TRL's batches have one size.
            end = sorted(self.environment.chat.end_ids)[:1]
            forest = Forest(end, end, [0], [0.0], [], [0], [1])
        elif len(a.advantages) > 1:
            by_agent = [a.advantages[agent.agent_id] for agent in agents_of(a.record)]
            advantages = [by_agent[owner] for owner in forest.owners]
        by_teacher = [next(scores) if generated else 0.0 for generated in forest.mask] if self.teacher else None
        return Sample(
            forest.prompt, forest.completion, forest.mask, forest.logprobs, row.reward, row.advantage,
            row.parsed, row.solved or 0.0, row.called, truncated, forest.forks, advantages, a.left_out, replaced,
            row.version, by_teacher,
        ), row  # fmt: skip

    def _truncated(self, record: RolloutRecord) -> float:
        """Return the share of agents whose last turn was cut at a length limit."""
        last = [agent.turns[-1].output_ids or [None] for agent in agents_of(record)]
        return sum(ids[-1] not in self.environment.chat.end_ids for ids in last) / max(1, len(last))

    def _row(self, a: _Attempted, step: int, forest: Forest | None) -> RewardedSample:
        agents = agents_of(a.record)
        turns = [turn for agent in agents for turn in agent.turns]
        tokens = [sum(len(turn.output_ids or ()) for turn in agent.turns) for agent in agents]
        ids = [(*(turn.prompt_ids or ()), *(turn.output_ids or ())) for turn in turns]
        versions = [version for turn in ids if (version := a.versions.get(turn)) is not None]
        if forest is not None and a.versions and len(versions) < len(turns):
            raise RolloutsFailed(
                f"rollout {a.record.rollout_id}: {len(turns) - len(versions)} of {len(turns)} turns are none that the "
                "policy's engine generated; report this fault"
            )
        several = forest is not None and (len(agents) > 1 or bool(forest.forks) or len(a.rewards) > 1)
        capture = ((a.record.outcome or {}).get("details") or {}).get("capture") or {}
        return RewardedSample(
            rollout_id=a.record.rollout_id,
            step=step,
            place=a.place,
            reward=a.rewards[None],
            advantage=a.advantages[None],
            parsed=all(turn.parse_error is None for turn in turns),
            solved=_solved(a.record),
            called=any(turn.actions and turn.observation is not None for turn in turns),
            prompt_tokens=len(forest.prompt) if forest else 0,
            policy_tokens=sum(tokens),
            read_tokens=len(forest.mask) - sum(forest.mask) if forest else 0,
            scores=a.scores,
            left_out=a.left_out,
            agents=[agent.agent_id for agent in agents] if several else (),
            agent_branches=forest.branches if forest and several else (),
            agent_tokens=tokens if several else (),
            agent_rewards=[a.rewards[agent.agent_id] for agent in agents] if len(a.rewards) > 1 else (),
            agent_advantages=[a.advantages[agent.agent_id] for agent in agents] if len(a.advantages) > 1 else (),
            untrained_tokens=capture.get("untrained_tokens"),
            version=min(versions, default=None),
            turn_versions=versions if len(set(versions)) > 1 else (),
        )

    def record(self, step: int, statistics: bytes) -> None:
        """Store the trainer's figures at the tokens of the round generated at `step`; see `policy_link.Record`."""
        write_atomically(_path(self.folder, step).with_suffix(SUFFIX), statistics)

    def _write(self, step: int, samples: Sequence[RewardedSample], records: Sequence[RolloutRecord]) -> None:
        header = json.dumps({"step": step, "samples": [asdict(sample) for sample in samples]}, allow_nan=False)
        lines = (to_line(record, self.identity.spec_key) for record in records)
        write_atomically(_path(self.folder, step), b"".join([header.encode() + b"\n", *lines]))


def drop_rounds_from(folder: Path, step: int) -> int:
    """Remove the rounds that a run resumed at `step` will roll out again; return how many there were."""
    late = [path for path in folder.glob("round-*") if _step(path) >= step]
    for path in (*late, *folder.glob(".round-*")):  # the second were being written when the run was killed
        path.unlink()
    return sum(path.suffix == ".jsonl" for path in late)


def read_rounds(folder: Path) -> Iterator[tuple[RewardedSample, RolloutRecord, np.ndarray | None]]:
    """Return the stored rollouts, in order of steps and places, each with its statistics (`read_statistics`)."""
    for path in sorted(folder.glob("round-*.jsonl"), key=_step):
        with path.open("rb") as file:
            header = json.loads(file.readline())
            rows = header["samples"] if "samples" in header else header["lessons"]  # the key of etpi 0.1
            samples = [RewardedSample(**{**row, "scores": [Score(**score) for score in row["scores"]]}) for row in rows]
            statistics = read_statistics(path, [s.policy_tokens * (s.left_out is None) for s in samples])
            for sample, line, values in zip(samples, file, statistics, strict=True):
                yield sample, from_line(line), values


def task_hashes(folder: Path) -> set[str | None]:
    """Return the content hashes of the tasks of the stored rollouts."""
    return {record.task_hash for _, record, _ in read_rounds(folder)}


def read_statistics(round_path: Path, tokens: Sequence[int]) -> list[np.ndarray | None]:
    """Return (2, n) float32 for each sample, log-probabilities and entropies, and of distillation (3, n) with the
    teacher's log-probabilities; None where they were not computed, as for samples that are left out of the loss, or a
    round from before they were kept.

    Args:
        tokens: how many tokens of the policy each sample of the round has.

    Raises:
        BadData: the file is of another round.
    """
    path = round_path.with_suffix(SUFFIX)
    if not path.exists() or not any(tokens):
        return [None] * len(tokens)
    values = np.fromfile(path, dtype="<f4")
    if len(values) not in (2 * sum(tokens), 3 * sum(tokens)):
        raise BadData(
            f"{path} has {len(values)} values, its round has {sum(tokens)} tokens of the policy, two or three each; "
            "remove the run's folder below checkpoints/rounds and train again"
        )
    rows = np.split(values.reshape(-1, sum(tokens)), np.cumsum(tokens)[:-1], axis=1)
    return [None if np.isnan(row).all() else row for row in rows]


def first_prompt(section: RLSection, environment: RLEnvironment, task: Task) -> list[int]:
    """Return the prompt ids of the first turn of the task's rollouts: of several agents, the longest."""
    tools = tool_schemas(section.agent.tools)
    prompts = (
        environment.chat.prompt_ids(
            render_prompts(section.agent, task, role), tools=tools, **environment.template_kwargs
        )
        for role in environment.family.roles(task)
    )
    return max(prompts, key=len)


def with_prompts_that_fit(section: RLSection, environment: RLEnvironment) -> RLEnvironment:
    """Leave out the tasks whose first prompt is longer than `max_prompt_tokens`, then keep the first `section.tasks`.

    Raises:
        RolloutsFailed: a task has several agents, no prompt fits, or they are fewer than a step takes.
    """
    several = next((task for task in environment.tasks if len(environment.family.roles(task)) > 1), None)
    if several is not None and section.one_sequence:
        raise RolloutsFailed(f"{section.one_sequence}, and {several.task_id} has several")
    kept, left_out = list[Task](), list[str]()
    for task in environment.tasks:
        if len(kept) == section.tasks:
            break
        # A harness writes its prompts itself, and its calls have a budget.
        if section.agent.harness or len(first_prompt(section, environment, task)) <= section.max_prompt_tokens:
            kept.append(task)
        else:
            left_out.append(task.task_id)
    if left_out and not kept:
        raise RolloutsFailed(
            f"the prompts of all {len(left_out)} tasks are longer than rl.max_prompt_tokens "
            f"({section.max_prompt_tokens}); raise it"
        )
    if len(kept) < section.groups:
        raise RolloutsFailed(
            f"rl.suite has {len(kept)} tasks whose prompt fits, and a step takes {section.groups}; {FEW_TASKS}"
        )
    return replace(environment, tasks=kept, left_out=left_out)


def advantages_of(section: RLSection, groups: Sequence[Sequence[ByAgent]]) -> list[ByAgent]:
    """Return the advantages of all rollouts of a round's groups, from their rewards: of a rollout in its group, and of
    each agent among the same agent's in it, as the section scales them; 0 where nothing is compared."""
    eps, ddof, scale = section.advantage_eps, section.advantage_ddof, section.scale_advantage
    advantages = [[dict[str | None, float]() for _ in group] for group in groups]
    for agent in {agent for rewards in chain(*groups) for agent in rewards}:
        those = [
            [(rewards[agent], rollout) for rewards, rollout in zip(*pair, strict=True) if agent in rewards]
            for pair in zip(groups, advantages, strict=True)
        ]
        everyone = [reward for reward, _ in chain(*those)]
        spread = float(np.std(everyone, ddof=ddof)) + eps if scale == "batch" and len(everyone) > ddof else 1.0
        for group in those:
            rewards, values = [reward for reward, _ in group], [0.0] * len(group)
            if len(group) > 1:
                values = group_advantages(rewards, len(group), eps=eps, ddof=ddof, scale=scale is True)
            for (_, rollout), value in zip(group, values, strict=True):
                rollout[agent] = value / spread
    return [*chain(*advantages)]


def _solved(record: RolloutRecord) -> bool | None:
    reward = (record.outcome or {}).get("reward")
    return None if reward is None else reward == 1.0


def _path(folder: Path, step: int) -> Path:
    return folder / f"round-{step:06d}.jsonl"


def _step(path: Path) -> int:
    return int(path.stem.partition("-")[2])
