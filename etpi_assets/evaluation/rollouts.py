"""Held-out rollouts of every checkpoint of an experiment, each combination evaluated once wherever it is shared.

Belongs here: which (checkpoint, decoding, seed) there are, and what identifies an evaluation. Does not belong here: the
loop (`etpi_assets.agent.loop`), or what the figures mean (`metrics`).

An evaluation is identified by what its outcome depends on: checkpoint content, tasks, agent, decoding and seed. Its
journal stands under that identity in a folder that experiments share, so two experiments on one base roll it out once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from etpi_assets.agent.loop import Identity, run_rollout
from etpi_assets.rollouts.collect import MODEL_CONCURRENCY, collect
from etpi_assets.rollouts.journal import Journal
from etpi_assets.specs.experiment import Budget, Decoding, EvaluateSection
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.family import Family, Task
from etpi_assets.trajectories.records import RolloutRecord
from etpi_resources.chat.format import ChatFormat
from etpi_resources.engines import Engine
from etpi_resources.hashes import json_hash
from etpi_resources.lake.checks import CheckOutcome
from etpi_resources.sandboxes import SandboxFactory

_COLUMNS = ("checkpoint_id", "role", "seed", "step", "final", "path", "adapter_path", "adapter_hash", "parent_id")
_ORDER = ("base", "sft", "rl")
STEERED = "+steering"
"""Ends the name of a decoding whose prompts carried the steering section."""
BUDGET = "@"
"""Stands between the name of a decoding and that of a budget other than the agent's own."""


@dataclass(frozen=True)
class Candidate:
    """A checkpoint to evaluate: its content hash, role (base, sft, rl), training seed (None for base), its folder; the
    adapter's folder and hash, where it was trained as one, and the checkpoint that the adapter goes onto; the optimiser
    step it was saved at, and whether that was the last."""

    checkpoint_id: str
    role: str
    seed: int | None
    path: str
    adapter_path: str | None = None
    adapter_hash: str | None = None
    parent_id: str | None = None
    step: int | None = None
    final: bool = True


@dataclass(frozen=True)
class Condition:
    """One way of rolling out: the agent with its sampling, the seed of the sampler, and the name of the decoding."""

    agent: AgentSection
    sample_seed: int
    decoding: str


@dataclass(frozen=True)
class Ground:
    """Where candidates are rolled out: tasks, what judges them, sandboxes, the chat format and its arguments."""

    tasks: Sequence[Task]
    family: Family
    sandboxes: SandboxFactory
    chat: ChatFormat
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


def candidates(checkpoints: pa.Table) -> list[Candidate]:
    """Every checkpoint of a table of that name: base first, then by role, seed and step."""
    found = [Candidate(**{name: row[name] for name in _COLUMNS}) for row in checkpoints.to_pylist()]
    found = [replace(c, final=True) if c.role == "base" else c for c in found]
    return sorted(found, key=lambda c: (_ORDER.index(c.role), -1 if c.seed is None else c.seed, c.step or 0))


def conditions(section: EvaluateSection, role: str) -> list[Condition]:
    """Every decoding with every sampler seed (a greedy decoding has one): under the agent's own budget, where asked the
    base with the steering prompt as well, and the others under each further budget."""
    own = section.agent
    variants = [(own, "")]
    if role == "base" and section.steering_probe:
        variants.append((own.model_copy(update={"steering": True}), STEERED))
    if role != "base":
        variants += [(_under(own, budget), f"{BUDGET}{budget.name}") for budget in section.budgets]
    return [
        Condition(_decoded(agent, decoding), seed, decoding.name + suffix)
        for agent, suffix in variants
        for decoding in section.decodings
        for seed in (section.sample_seeds if decoding.temperature > 0 else section.sample_seeds[:1])
    ]


def roll_out(
    candidate: Candidate,
    condition: Condition,
    engine: Engine,
    ground: Ground,
    journals: Path,
    *,
    experiment: str,
    advance: Callable[[int], None] = lambda n: None,
) -> Iterator[RolloutRecord]:
    """One rollout a task, of the journal where it holds them, each relabelled for this experiment."""
    key = _key(candidate, condition, engine, ground.template_kwargs)
    identity = Identity(
        spec_key=key,
        origin="eval",
        engine="model",
        teacher=engine.name,
        checkpoint_role=candidate.role,
        checkpoint_id=candidate.checkpoint_id,
        seed=candidate.seed,
        decoding=condition.decoding,
    )

    def run(task: Task, sample: int) -> RolloutRecord:
        return run_rollout(
            task,
            ground.family,
            engine,
            ground.sandboxes,
            condition.agent,
            ground.chat,
            identity=identity,
            sample=sample,
            sample_seed=condition.sample_seed,
            template_kwargs=ground.template_kwargs,
        )

    with Journal(journals, key, wait=True) as journal:  # another experiment may roll out the same checkpoint
        for record in collect(ground.tasks, 1, run, journal, concurrency=MODEL_CONCURRENCY, advance=advance):
            yield _relabelled(record, candidate, experiment)


def every_condition_ran(rollouts: pa.Table, expected: Mapping[tuple[str, int | None, str, int], int]) -> CheckOutcome:
    """Each (role, seed, decoding, sampler seed) has as many rollouts as there are tasks."""
    found: dict[tuple[Any, ...], int] = {}
    for row in rollouts.select(["checkpoint_role", "seed", "decoding", "sample_seed"]).to_pylist():
        key = (row["checkpoint_role"], row["seed"], row["decoding"], row["sample_seed"])
        found[key] = found.get(key, 0) + 1
    wrong = {key: (found.get(key, 0), n) for key, n in expected.items() if found.get(key, 0) != n}
    passed = not wrong and len(found) == len(expected)
    return CheckOutcome(
        name="every_condition_ran",
        passed=passed,
        message=f"{rollouts.num_rows} rollouts over {len(expected)} conditions"
        if passed
        else f"(role, seed, decoding, sampler seed) -> (found, expected): {wrong}; materialize eval_rollouts again",
        figures={"rollouts": rollouts.num_rows, "conditions": len(expected)},
    )


def infrastructure_held(rollouts: pa.Table, bound: float = 0.05) -> CheckOutcome:
    """Infrastructure errors are rare enough not to bias what is left."""
    errors = [e for e in rollouts["error"].to_pylist() if e is not None]
    share = len(errors) / max(1, rollouts.num_rows)
    return CheckOutcome(
        name="infrastructure_held",
        passed=share <= bound,
        message=f"{len(errors)} of {rollouts.num_rows} rollouts ended in an infrastructure error (bound {bound:.0%})"
        + (f"; the first: {errors[0]}" if errors else ""),
        figures={"errors": len(errors), "share": share},
    )


def _under(agent: AgentSection, budget: Budget) -> AgentSection:
    bounds = {"max_steps": budget.max_steps, "max_model_len": budget.max_model_len}
    return agent.model_copy(update={name: bound for name, bound in bounds.items() if bound is not None})


def _decoded(agent: AgentSection, decoding: Decoding) -> AgentSection:
    return agent.model_copy(update={"temperature": decoding.temperature, "top_p": decoding.top_p})


def _key(candidate: Candidate, condition: Condition, engine: Engine, template_kwargs: Mapping[str, Any]) -> str:
    identity = {
        "checkpoint": candidate.checkpoint_id,
        "agent": condition.agent.identity(),
        "sample_seed": condition.sample_seed,
        "engine": dict(engine.fingerprint()),
        "template_kwargs": dict(template_kwargs),
    }
    return json_hash(identity)


def _relabelled(record: RolloutRecord, candidate: Candidate, experiment: str) -> RolloutRecord:
    """The shared rollout as this experiment's: an id of its own, since another experiment holds the same one."""
    record.rollout_id = hashlib.sha256(f"{experiment}/{candidate.role}/{record.rollout_id}".encode()).hexdigest()[:32]
    record.experiment, record.checkpoint_role, record.seed = experiment, candidate.role, candidate.seed
    return record
