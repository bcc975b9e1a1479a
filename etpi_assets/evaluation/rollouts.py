"""Held-out rollouts of an experiment's checkpoints, shared between experiments.

An evaluation is identified by everything its outcome depends on: checkpoint content, tasks, agent, decoding and seed.
Its journal has that identity as its name, in a folder that all experiments share, so experiments with the same base
roll it out only once.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from etpi_assets.agent.harness import run_harness
from etpi_assets.agent.loop import Identity, RolloutJob, RolloutRuntime, run_rollout
from etpi_assets.checks import outcome, within
from etpi_assets.rollouts.collect import MODEL_CONCURRENCY, Run, collect, rollout_executor
from etpi_assets.rollouts.journal import Journal
from etpi_assets.specs.experiment import Budget, Decoding, EvaluateSection
from etpi_assets.specs.harness import harness_difference
from etpi_assets.specs.rollout_set import AgentSection, RolloutSetSpec
from etpi_assets.tasks.family import Task
from etpi_assets.trajectories.records import RolloutRecord
from etpi_resources.engines import Engine
from etpi_resources.engines.serving import Checkpoint
from etpi_resources.hashes import json_hash
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.older_names import adopt

_ORDER = ("base", "sft", "rl")
STEERED = "+steering"
"""Suffix of a decoding's name if its prompts carried the steering section."""
BUDGET = "@"
"""Separates the name of a decoding from the name of a budget other than the agent's own."""


@dataclass(frozen=True)
class EvaluationCondition:
    """One way to roll out: the agent with its sampling settings, the sampler's seed, and the name of the decoding."""

    agent: AgentSection
    sample_seed: int
    decoding: str


def checkpoint_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Return the rows of a `checkpoints` table: the base first, then by role, seed and step."""
    rows = [row | {"final": row["final"] or row["role"] == "base"} for row in table.to_pylist()]
    return sorted(rows, key=lambda c: (_ORDER.index(c["role"]), -1 if c["seed"] is None else c["seed"], c["step"] or 0))


def conditions(section: EvaluateSection, role: str) -> list[EvaluationCondition]:
    """Return every decoding with every sampler seed (greedy decoding has one), for each setting of the agent.

    All roles have the agent's own budget. With `steering_probe` the base is also rolled out with the steering prompt;
    trained checkpoints are also rolled out under each further budget.
    """
    agents = [(section.agent, "")]
    if role == "base" and section.steering_probe:
        agents.append((section.agent.model_copy(update={"steering": True}), STEERED))
    if role != "base":
        agents += [(_under(section.agent, budget), f"{BUDGET}{budget.name}") for budget in section.budgets]
    return [
        EvaluationCondition(_decoded(agent, decoding), seed, decoding.name + suffix)
        for agent, suffix in agents
        for decoding in section.decodings
        for seed in (section.sample_seeds if decoding.temperature > 0 else section.sample_seeds[:1])
    ]


def roll_out(
    served: Sequence[tuple[Checkpoint, RolloutRuntime, Sequence[EvaluationCondition]]],
    tasks: Iterable[Task],
    journals: Path,
    older: Sequence[Path] = (),
    *,
    experiment: str,
    advance: Callable[[int], None] = lambda n: None,
    log: Callable[[str], None] = print,
) -> Iterator[RolloutRecord]:
    """Yield one rollout per task of every checkpoint and condition, from the journals if they have it, relabelled for
    this experiment. All of them run at once, so that a server does not wait for the last rollouts of each.

    Args:
        tasks: may still be proved as they are first taken.
        older: folders of etpi 0.2 that may have the journals.
    """
    runs: dict[str, tuple[Run, Journal]] = {}
    wanted: list[tuple[Checkpoint, str]] = []
    for checkpoint, runtime, planned in served:
        for condition in planned:
            key = _key(checkpoint, condition, runtime)
            run = partial(_roll_out, condition, _identity(key, checkpoint, condition, runtime.engine), runtime)
            runs[key] = run, Journal(journals, key, wait=True)
            adopt(runs[key][1].path, older)
            wanted.append((checkpoint, key))
    with ExitStack() as stack:
        # Another experiment may roll out the same checkpoints: in one order, neither waits for the other.
        for key in sorted(runs):
            stack.enter_context(runs[key][1])
        with rollout_executor(served[0][1], MODEL_CONCURRENCY, log) as executor:
            collect(tasks, 1, list(runs.values()), executor=executor, advance=advance)
        for checkpoint, key in wanted:
            for task in tasks:
                yield _relabelled(runs[key][1].get(task, 0), checkpoint, experiment)


def _identity(key: str, checkpoint: Checkpoint, condition: EvaluationCondition, engine: Engine) -> Identity:
    return Identity(
        spec_key=key,
        origin="eval",
        engine="model",
        teacher=engine.name,
        checkpoint_role=checkpoint.role,
        checkpoint_id=checkpoint.identity,
        seed=checkpoint.seed,
        decoding=condition.decoding,
    )


def _roll_out(
    condition: EvaluationCondition, identity: Identity, runtime: RolloutRuntime, task: Task, sample: int
) -> RolloutRecord:
    job = RolloutJob(task, condition.agent, identity, sample, condition.sample_seed)
    return run_harness(job, runtime) if condition.agent.harness else run_rollout(job, runtime)


def every_condition_ran(rollouts: pa.Table, expected: Mapping[tuple[str, int | None, str, int], int]) -> CheckOutcome:
    """Check that each (role, seed, decoding, sampler seed) has one rollout per task."""
    columns = ["checkpoint_role", "seed", "decoding", "sample_seed"]
    rows = [tuple(row.values()) for row in rollouts.select([*columns, "task_id"]).to_pylist()]
    counts = Counter(row[:-1] for row in rows)
    tasks = Counter(row[:-1] for row in set(rows))
    wrong = {key: (counts[key], n) for key, n in expected.items() if not counts[key] == tasks[key] == n}
    passed = not wrong and len(counts) == len(expected)
    figures = {"rollouts": rollouts.num_rows, "conditions": len(expected)}
    return outcome("every_condition_ran", passed, figures, wrong=wrong)


def harness_as_trained(
    evaluated: AgentSection, rollout_sets: Iterable[RolloutSetSpec], reinforced: AgentSection | None = None
) -> CheckOutcome:
    """Warn if the student is evaluated in another harness than its rollouts came from."""
    difference = harness_difference(evaluated, rollout_sets, reinforced)
    return outcome("harness_as_trained", not difference, difference=difference)


def infrastructure_held(rollouts: pa.Table) -> CheckOutcome:
    """Check that infrastructure errors are too rare to bias the remaining rollouts, of all and of each checkpoint role
    and decoding; one error among a few rollouts of a role is no bias."""
    rows = rollouts.select(["checkpoint_role", "decoding", "error"]).to_pylist()
    failed = [row for row in rows if row["error"] is not None]
    share = len(failed) / max(1, len(rows))
    of, errors = (Counter((row["checkpoint_role"], row["decoding"]) for row in group) for group in (rows, failed))
    over = {key: n for key, n in errors.items() if n > 1 and not within("infrastructure_held", n / of[key])}
    return outcome(
        "infrastructure_held",
        within("infrastructure_held", share) and not over,
        {"errors": len(failed), "share": share},
        rollouts=len(rows),
        over="".join(f", {n} of the {of[key]} of {' '.join(map(str, key))}" for key, n in over.items()),
        first=f"; the first: {failed[0]['error']}" if failed else "",
    )


def _under(agent: AgentSection, budget: Budget) -> AgentSection:
    bounds = {"max_steps": budget.max_steps, "max_model_len": budget.max_model_len}
    return agent.model_copy(update={name: bound for name, bound in bounds.items() if bound is not None})


def _decoded(agent: AgentSection, decoding: Decoding) -> AgentSection:
    return agent.model_copy(update={"temperature": decoding.temperature, "top_p": decoding.top_p})


def _key(checkpoint: Checkpoint, condition: EvaluationCondition, runtime: RolloutRuntime) -> str:
    identity = {
        "checkpoint": checkpoint.identity,
        "agent": condition.agent.identity(),
        "sample_seed": condition.sample_seed,
        "engine": dict(runtime.engine.fingerprint()),
        "template_kwargs": dict(runtime.template_kwargs),
    }
    return json_hash(identity)


def _relabelled(record: RolloutRecord, checkpoint: Checkpoint, experiment: str) -> RolloutRecord:
    """Give a shared rollout this experiment's labels and a rollout id that no other experiment uses for it."""
    record.rollout_id = hashlib.sha256(f"{experiment}/{checkpoint.role}/{record.rollout_id}".encode()).hexdigest()[:32]
    record.experiment, record.checkpoint_role, record.seed = experiment, checkpoint.role, checkpoint.seed
    return record
