"""Rounds of reinforcement: roll the policy out on the tasks that the trainer names, reward, store, return samples.

A round is all rollouts between two updates of the generating weights. It is one file, written when the round is
complete: a header line with the rewarded samples, then one line per rollout; a second file (`SUFFIX`) is added once it
was trained on. A resumed run drops the rounds after its checkpoint, because other weights will generate them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from etpi_assets.agent.harness import run_harness
from etpi_assets.agent.loop import Identity, RolloutJob, RolloutRuntime, run_rollout
from etpi_assets.agent.prompts import render_prompts
from etpi_assets.agent.tools import tool_schemas
from etpi_assets.rollouts.collect import MODEL_CONCURRENCY
from etpi_assets.rollouts.journal import from_line, to_line
from etpi_assets.scoring.advantage import group_advantages
from etpi_assets.scoring.rewards.attempt import attempt_of
from etpi_assets.scoring.rewards.functions import Score, score_attempt
from etpi_assets.specs.training import FEW_TASKS, RLSection
from etpi_assets.tasks.family import Family, Task
from etpi_assets.training.lock_step import map_in_step
from etpi_assets.trajectories.records import RolloutRecord
from etpi_resources.engines import Engine
from etpi_resources.lake.check_outcome import BadData
from etpi_resources.lake.files import write_atomically
from etpi_resources.sandboxes import SandboxFactory
from etpi_resources.token_ids import common_prefix
from etpi_resources.trainers.policy_link import Fork, Sample, TokenStatistics

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat


SUFFIX = ".tokens"
"""Of the file beside a round's with the trainer's figures at each token that the policy generated: two rows of
little-endian float32, log-probabilities and entropies in nats. Samples are in the order of the round, and of each its
turns' `output_ids` one after the other."""


class RolloutsFailed(BadData):
    """A round cannot be trained on; the message names the rollout or task and what to do."""


@dataclass(frozen=True)
class RLEnvironment:
    """Environment of the policy's rollouts: tasks in the order of the trainer's rows, their family (which judges),
    sandboxes, the chat format and its template's arguments; and the ids of tasks whose prompt is too long."""

    tasks: Sequence[Task]
    family: Family
    sandboxes: SandboxFactory
    chat: ChatFormat
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    left_out: Sequence[str] = ()


REFILL = 10**9
"""Added to the number of a sample that broke: the number of the one in its place, which no step gives."""


@dataclass(frozen=True)
class Played:
    """The record of a place in a round. `broken`: 1 if another sample broke there before, with `error`; 2 if that broke
    too, and the record is that of the broken one."""

    record: RolloutRecord
    broken: int = 0
    error: str | None = None


@dataclass(frozen=True)
class RewardedSample:
    """A rollout with its rewards and advantage; columns of the tables `rl_samples` and `rewards`.

    Attributes:
        step: optimiser steps done when it was generated. place: its position in the round.
        reward: the weighted sum of `scores`. called: whether an action ran and returned an observation.
        prompt_tokens, policy_tokens, read_tokens: ids of the first prompt, ids that the policy generated, and ids of
            the observations.
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


class Rounds:
    """Rolls out rows for a trainer: `rounds(step, rows, engine)`; see `policy_link.RollOut`.

    Args:
        section: the spec's.
        identity: names in the rollouts' records; its spec_key covers all that they depend on except task, sample and
            weights.
        seed: of the sampler.
        folder: of the rounds' files.
    """

    def __init__(
        self, section: RLSection, environment: RLEnvironment, identity: Identity, seed: int, folder: Path
    ) -> None:
        self.section, self.environment, self.identity = section, environment, identity
        self.seed, self.folder = seed, folder
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, step: int, rows: Sequence[int], engine: Engine) -> list[Sample]:
        """Roll out, reward and store one round.

        Raises:
            RolloutsFailed: a rollout broke twice, or is no single sequence.
            BadReward: a reward has no value.
        """
        size = self.section.group_size
        for start in range(0, len(rows), size):
            if len(set(rows[start : start + size])) != 1:
                raise RolloutsFailed(
                    f"the trainer requested rows {rows[start : start + size]}, which are no group of {size}"
                )
        requested = [(self.environment.tasks[row], step * size + place % size) for place, row in enumerate(rows)]
        played = self._run_all(requested, engine)
        self._bound_broken(played, requested)
        records = [of_place.record for of_place in played]
        whole = [of_place.broken < 2 for of_place in played]
        attempts = [
            attempt_of(record, task) if kept else None
            for record, (task, _), kept in zip(records, requested, whole, strict=True)
        ]
        scores = [score_attempt(attempt, self.section.rewards) if attempt else [] for attempt in attempts]
        rewards = [sum(score.weighted for score in of_rollout) for of_rollout in scores]
        advantages = self._advantages(rewards, whole)
        by_agent = self._agent_advantages(requested, records, whole)
        samples, rewarded = [], []
        for place, record in enumerate(records):
            reward, advantage, broken = rewards[place], advantages[place], played[place].broken
            attempt, parsed, solved = attempts[place], _parsed(record), _solved(record)
            called = bool(attempt and attempt.tool_turns)
            # One id that is in no loss takes the place of a rollout that is left out, since TRL's batches have one size.
            end = sorted(self.environment.chat.end_ids)[:1]
            forest = as_forest(record) if attempt else Forest(end, end, [0], [0.0], [], [1], [0])
            mask = forest.mask
            samples.append(
                Sample(
                    forest.prompt, forest.completion, mask, forest.logprobs, reward, advantage, parsed,
                    solved or 0.0, called, forest.forks, forest.ends,
                    None if by_agent is None else [by_agent[owner][place] for owner in forest.owners],
                    broken,
                )
            )  # fmt: skip
            rewarded.append(
                RewardedSample(
                    record.rollout_id, step, place, reward, advantage, parsed, solved, called,
                    len(forest.prompt), sum(mask), len(mask) - sum(mask), scores[place],
                )
            )  # fmt: skip
        self._write(step, rewarded, records)
        return samples

    def _advantages(self, rewards: Sequence[float], whole: Sequence[bool]) -> list[float]:
        """Return the advantage of each reward in its group; 0 for rollouts that are left out, which do not count."""
        section, size, found = self.section, self.section.group_size, [0.0] * len(rewards)
        for start in range(0, len(rewards), size):
            group = [place for place in range(start, start + size) if whole[place]]
            if len(group) > 1:
                values = group_advantages(
                    [rewards[place] for place in group],
                    len(group),
                    eps=section.advantage_eps,
                    ddof=section.advantage_ddof,
                    scale=section.scale_advantage,
                )
                for place, value in zip(group, values, strict=True):
                    found[place] = value
        return found

    def _agent_advantages(
        self, requested: Sequence[tuple[Task, int]], records: Sequence[RolloutRecord], whole: Sequence[bool]
    ) -> list[list[float]] | None:
        """Return the advantages of each agent's rewards among the same agent's of the group; None where no reward is an
        agent's own."""
        own = [term for term in self.section.rewards if term.of == "agent"]
        if not own:
            return None
        shared = [term for term in self.section.rewards if term.of == "rollout"]
        found = []
        for number in range(max(len(record.agents) for record in records)):
            rewards = []
            for record, (task, _), kept in zip(records, requested, whole, strict=True):
                if not kept:
                    rewards.append(0.0)
                    continue
                alone = attempt_of(record, task, record.agents[number].agent_id)
                scored = [*score_attempt(attempt_of(record, task), shared), *score_attempt(alone, own)]
                rewards.append(sum(score.weighted for score in scored))
            found.append(self._advantages(rewards, whole))
        return found

    def _bound_broken(self, played: Sequence[Played], requested: Sequence[tuple[Task, int]]) -> None:
        """Raise RolloutsFailed if more rollouts broke than `max_broken` allows."""
        broken = [place for place, of_place in enumerate(played) if of_place.broken]
        if len(broken) <= self.section.max_broken * len(played):
            return
        task, sample = requested[broken[0]]
        raise RolloutsFailed(
            f"{len(broken)} of {len(played)} rollouts broke twice, more than rl.max_broken ({self.section.max_broken:g})"
            f" allows; first task {task.task_id} sample {sample} broke twice: {played[broken[0]].error}"
        )

    def _run_all(self, requested: Sequence[tuple[Task, int]], engine: Engine) -> list[Played]:
        """Return what was played for each (task, sample), in order."""

        def run(item: tuple[Task, int], engine: Engine = engine) -> Played:
            return self._play(*item, engine)

        if self.section.repeatable:
            return map_in_step(run, requested, engine, MODEL_CONCURRENCY)
        with ThreadPoolExecutor(min(len(requested), MODEL_CONCURRENCY), thread_name_prefix="rollout") as pool:
            return list(pool.map(run, requested))

    def _play(self, task: Task, sample: int, engine: Engine) -> Played:
        """Roll out a sample, again if it breaks (an infrastructure error may pass), and then another in its place."""
        record = self._roll_out(task, sample, engine)
        error = record.error
        if error is not None:
            record = self._roll_out(task, sample, engine)
        if record.error is None:
            return Played(record)
        refill = self._roll_out(task, sample + REFILL, engine)
        return Played(refill, 1, record.error) if refill.error is None else Played(record, 2, record.error)

    def _roll_out(self, task: Task, sample: int, engine: Engine) -> RolloutRecord:
        environment, section = self.environment, self.section
        harness = section.agent.harness is not None
        prompt = section.max_prompt_tokens if harness else len(first_prompt(section, environment, task))
        bounds = {"max_model_len": prompt + section.max_response_tokens, "steering": False}
        agent = section.agent.model_copy(update=bounds)
        runtime = RolloutRuntime(
            environment.family, engine, environment.sandboxes, environment.chat, environment.template_kwargs
        )
        job = RolloutJob(task, agent, self.identity, sample, self.seed)
        return run_harness(job, runtime) if harness else run_rollout(job, runtime)

    def record(self, step: int, statistics: TokenStatistics) -> None:
        """Store the trainer's figures at the tokens of the round generated at `step`; see `policy_link.Record`."""
        content = statistics.logprobs + statistics.entropies
        write_atomically(_path(self.folder, step).with_suffix(SUFFIX), content)

    def _write(self, step: int, samples: Sequence[RewardedSample], records: Sequence[RolloutRecord]) -> None:
        header = json.dumps({"step": step, "samples": [asdict(sample) for sample in samples]}, allow_nan=False)
        lines = (to_line(record, self.identity.spec_key) for record in records)
        write_atomically(_path(self.folder, step), b"".join([header.encode() + b"\n", *lines]))


def drop_rounds_from(folder: Path, step: int) -> int:
    """Remove the rounds that a run resumed at `step` will roll out again; return how many there were."""
    late = [path for path in folder.glob("round-*") if _step(path) >= step]
    for path in (*late, *folder.glob(".round-*")):  # the second were being written when the run was killed
        path.unlink()
    return sum(path.suffix != SUFFIX for path in late)


def read_rounds(folder: Path) -> Iterator[tuple[RewardedSample, RolloutRecord, np.ndarray | None]]:
    """Return the stored rollouts, in order of steps and places, each with its statistics (`read_statistics`)."""
    for path in sorted(folder.glob("round-*.jsonl"), key=_step):
        with path.open("rb") as file:
            header = json.loads(file.readline())
            rows = header["samples"] if "samples" in header else header["lessons"]  # the key of etpi 0.1
            samples = [RewardedSample(**{**row, "scores": [Score(**score) for score in row["scores"]]}) for row in rows]
            statistics = read_statistics(path, [sample.policy_tokens for sample in samples])
            for sample, line, values in zip(samples, file, statistics, strict=True):
                yield sample, from_line(line), values


def task_hashes(folder: Path) -> set[str | None]:
    """Return the content hashes of the tasks of the stored rollouts."""
    return {record.task_hash for _, record, _ in read_rounds(folder)}


def read_statistics(round_path: Path, tokens: Sequence[int]) -> list[np.ndarray | None]:
    """Return (2, n) float32 for each sample, log-probabilities and entropies; None where they were not computed, as for
    samples that are left out of the loss, or a round from before they were kept.

    Args:
        tokens: how many tokens of the policy each sample of the round has.

    Raises:
        BadData: the file is of another round.
    """
    path = round_path.with_suffix(SUFFIX)
    if not path.exists():
        return [None] * len(tokens)
    values = np.fromfile(path, dtype="<f4")
    if len(values) != 2 * sum(tokens):
        raise BadData(
            f"{path} has {len(values)} values, its round has {sum(tokens)} tokens of the policy, two values each; "
            "remove the run's folder below checkpoints/rounds and train again"
        )
    rows = np.split(values.reshape(2, -1), np.cumsum(tokens)[:-1], axis=1)
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


@dataclass(frozen=True)
class Forest:
    """The ids of a rollout, of each branch those that no earlier one has; see `policy_link.Sample`."""

    prompt: list[int]
    completion: list[int]
    mask: list[int]
    logprobs: list[float]
    forks: list[Fork]
    ends: list[int]
    owners: list[int]


def as_forest(record: RolloutRecord) -> Forest:
    """Return the turns of all agents: one that extends an earlier branch of its agent continues it, any other begins a
    new branch where it parts from the nearest one. Every id that the policy generated has mask 1 once. `owners` has the
    number of the agent of each id of the completion.

    Raises:
        RolloutsFailed: a turn has no ids or log-probs, or there is no turn.
    """
    whole, mask, logprobs, owners = list[int](), list[int](), list[float](), list[int]()
    forks, ends = list[Fork](), list[int]()
    branches: list[np.ndarray] = []
    for number, agent in enumerate(record.agents):
        for turn in agent.turns:
            if turn.prompt_ids is None or turn.output_ids is None or turn.logprobs is None:
                raise RolloutsFailed(
                    f"rollout {record.rollout_id} of task {record.task_id}, {agent.agent_id} turn {turn.turn}: the "
                    "engine reported no ids or log-probs"
                )
            prompt = np.array(turn.prompt_ids, dtype=np.int64)
            shared = [common_prefix(branch, prompt) for branch in branches]
            parent = max(range(len(shared)), key=lambda n: (shared[n], n), default=-1)
            length = shared[parent] if shared else 0
            # Only the last branch can be continued in place: its ids are the last ones of the flat order.
            if not branches or parent != len(branches) - 1 or length < len(branches[parent]):
                if branches:
                    forks.append(Fork(len(whole), parent if length else -1, length))
                branches.append(np.empty(0, dtype=np.int64))
            branches[-1] = np.concatenate([prompt, np.array(turn.output_ids, dtype=np.int64)])
            read = turn.prompt_ids[length:]
            whole += [*read, *turn.output_ids]
            mask += [0] * len(read) + [1] * len(turn.output_ids)
            logprobs += [0.0] * len(read) + [*turn.logprobs]
            owners += [number] * (len(read) + len(turn.output_ids))
        if agent.turns:
            ends.append(len(whole) - 1)
    if not branches:
        raise RolloutsFailed(f"rollout {record.rollout_id} of task {record.task_id} has no turn")
    edge = len(next(agent for agent in record.agents if agent.turns).turns[0].prompt_ids or ())
    return Forest(whole[:edge], whole[edge:], mask[edge:], logprobs[edge:], forks, ends, owners[edge:])


def _parsed(record: RolloutRecord) -> bool:
    return all(turn.parse_error is None for agent in record.agents for turn in agent.turns)


def _solved(record: RolloutRecord) -> bool | None:
    reward = (record.outcome or {}).get("reward")
    return None if reward is None else reward == 1.0


def _path(folder: Path, step: int) -> Path:
    return folder / f"round-{step:06d}.jsonl"


def _step(path: Path) -> int:
    return int(path.stem.partition("-")[2])
