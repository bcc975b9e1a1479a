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
from etpi_resources.trainers.policy_link import Sample, TokenStatistics

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
        records = self._run_all(requested, engine)
        attempts = [attempt_of(record, task) for record, (task, _) in zip(records, requested, strict=True)]
        scores = [score_attempt(attempt, self.section.rewards) for attempt in attempts]
        rewards = [sum(score.weighted for score in of_rollout) for of_rollout in scores]
        advantages = group_advantages(
            rewards,
            size,
            eps=self.section.advantage_eps,
            ddof=self.section.advantage_ddof,
            scale=self.section.scale_advantage,
        )
        samples, rewarded = [], []
        for place, record in enumerate(records):
            prompt, completion, mask, logprobs = as_sequence(record)
            parsed, solved, called = _parsed(record), _solved(record), bool(attempts[place].tool_turns)
            reward, advantage = rewards[place], advantages[place]
            samples.append(Sample(prompt, completion, mask, logprobs, reward, advantage, parsed, solved or 0.0, called))
            rewarded.append(
                RewardedSample(
                    record.rollout_id, step, place, reward, advantage, parsed, solved, called,
                    len(prompt), sum(mask), len(mask) - sum(mask), scores[place],
                )
            )  # fmt: skip
        self._write(step, rewarded, records)
        return samples

    def _run_all(self, requested: Sequence[tuple[Task, int]], engine: Engine) -> list[RolloutRecord]:
        """Return the records of (task, sample), in order."""

        def run(item: tuple[Task, int], engine: Engine = engine) -> RolloutRecord:
            return self._roll_out(*item, engine)

        if self.section.repeatable:
            return map_in_step(run, requested, engine, MODEL_CONCURRENCY)
        with ThreadPoolExecutor(min(len(requested), MODEL_CONCURRENCY), thread_name_prefix="rollout") as pool:
            return list(pool.map(run, requested))

    def _roll_out(self, task: Task, sample: int, engine: Engine) -> RolloutRecord:
        prompt = first_prompt(self.section, self.environment, task)
        bounds = {"max_model_len": len(prompt) + self.section.max_response_tokens, "steering": False}
        agent = self.section.agent.model_copy(update=bounds)
        environment = self.environment
        runtime = RolloutRuntime(
            environment.family, engine, environment.sandboxes, environment.chat, environment.template_kwargs
        )
        job = RolloutJob(task, agent, self.identity, sample, self.seed)
        record = run_rollout(job, runtime)
        if record.error is not None:
            record = run_rollout(job, runtime)  # an infrastructure error may pass, so one retry, as in `collect`
        if record.error is not None:
            raise RolloutsFailed(f"task {task.task_id} sample {sample} broke twice: {record.error}")
        return record

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
    """Return the prompt ids of the first turn of the task's rollouts.

    Raises:
        RolloutsFailed: the task has several agents.
    """
    roles = environment.family.roles(task)
    if len(roles) != 1:
        raise RolloutsFailed(f"task {task.task_id} has {len(roles)} agents; reinforcement needs suites with one agent")
    messages = render_prompts(section.agent, task, roles[0])
    return environment.chat.prompt_ids(messages, tools=tool_schemas(section.agent.tools), **environment.template_kwargs)


def with_prompts_that_fit(section: RLSection, environment: RLEnvironment) -> RLEnvironment:
    """Leave out the tasks whose first prompt is longer than `max_prompt_tokens`, then keep the first `section.tasks`.

    Raises:
        RolloutsFailed: a task has several agents, no prompt fits, or they are fewer than a step takes.
    """
    kept, left_out = list[Task](), list[str]()
    for task in environment.tasks:
        if len(kept) == section.tasks:
            break
        if len(first_prompt(section, environment, task)) <= section.max_prompt_tokens:
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


def as_sequence(record: RolloutRecord) -> tuple[list[int], list[int], list[int], list[float]]:
    """Return a single agent's turns as (first prompt, all ids after it, mask with 1 for generated ids, log-probs).

    Raises:
        RolloutsFailed: a turn has no ids or log-probs, or its prompt does not extend the turn before it.
    """
    row = f"rollout {record.rollout_id} of task {record.task_id}"
    turns = record.agents[0].turns
    prompt = list(turns[0].prompt_ids or ())
    whole, mask, logprobs = list(prompt), [], []
    for turn in turns:
        if turn.prompt_ids is None or turn.output_ids is None or turn.logprobs is None:
            raise RolloutsFailed(f"{row}, turn {turn.turn}: the engine reported no ids or log-probs")
        if turn.prompt_ids[: len(whole)] != whole:
            raise RolloutsFailed(f"{row}, turn {turn.turn}: its prompt does not extend the turn before it")
        read = turn.prompt_ids[len(whole) :]
        whole += [*read, *turn.output_ids]
        mask += [0] * len(read) + [1] * len(turn.output_ids)
        logprobs += [0.0] * len(read) + [*turn.logprobs]
    return prompt, whole[len(prompt) :], mask, logprobs


def _parsed(record: RolloutRecord) -> bool:
    return all(turn.parse_error is None for agent in record.agents for turn in agent.turns)


def _solved(record: RolloutRecord) -> bool | None:
    reward = (record.outcome or {}).get("reward")
    return None if reward is None else reward == 1.0


def _path(folder: Path, step: int) -> Path:
    return folder / f"round-{step:06d}.jsonl"


def _step(path: Path) -> int:
    return int(path.stem.partition("-")[2])
