"""Examining one served checkpoint: which probes are asked of it, on which prompts.

Belongs here: choosing and rendering the prompts, the order of questions. Does not belong here: a probe itself
(`probes`), or serving.

A final checkpoint answers everything. One from the middle of training is asked only how it acts on prompts it has not
seen: over its steps that is a learning curve, and shows what a comparison at the end no longer does, how soon a
behaviour was learnt.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from etpi_assets.agent.prompts import render_prompts
from etpi_assets.agent.tools import tool_schemas
from etpi_assets.evaluation import probes
from etpi_assets.evaluation.probes import Answer, Prompt
from etpi_assets.specs.experiment import ProbeSection
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.family import Family, Task
from etpi_resources.chat.format import ChatFormat
from etpi_resources.engines import Completion, Engine, ServerEngine

T = TypeVar("T")


@dataclass(frozen=True)
class Desk:
    """What a first-turn prompt is rendered with, as serving does it."""

    family: Family
    chat: ChatFormat
    agent: AgentSection
    template_kwargs: Mapping[str, Any]

    def prompt(self, task: Task, agent_id: str) -> Prompt:
        (role,) = [role for role in self.family.roles(task) if role.agent_id == agent_id]
        messages, tools = render_prompts(self.agent, task, role), tool_schemas(self.agent.tools)
        ids = self.chat.prompt_ids(messages, tools=tools, **self.template_kwargs)
        return Prompt(f"{task.task_id}/{agent_id}", ids, messages, tuple(tools or ()))


@dataclass(frozen=True)
class Paper:
    """What is asked.

    Attributes:
        train, heldout: first-turn prompts of tasks that were trained on, and of tasks that were not.
        trained: source of each train prompt -> the ids that the training data hold for it.
        agent: how answers are read, and their length.
        section: the floors.
    """

    train: Sequence[Prompt]
    heldout: Sequence[Prompt]
    trained: Mapping[str, Sequence[int]]
    agent: AgentSection
    section: ProbeSection

    @classmethod
    def write(
        cls,
        desk: Desk,
        section: ProbeSection,
        tasks: Sequence[Task],
        learnt: Sequence[Mapping[str, Any]],
        inputs: Mapping[str, Sequence[int]],
    ) -> Paper:
        """At most `section.prompts` of each kind, the same ones every time.

        Args:
            tasks: of the evaluated suite; held-out ones take their agents in turns.
            learnt: rows of `dataset_rows` (pair_id, task_id, agent_id, turn); first turns of these tasks count.
            inputs: pair id -> the ids trained on.
        """
        by_id = {task.task_id: task for task in tasks}
        rows = _sample([r for r in learnt if r["turn"] == 0 and r["task_id"] in by_id], section.prompts)
        train = [desk.prompt(by_id[row["task_id"]], row["agent_id"]) for row in rows]
        trained = {prompt.source: inputs[row["pair_id"]] for prompt, row in zip(train, rows, strict=True)}
        unseen = _sample([task for task in tasks if task.split == "heldout"], section.prompts)
        seats = [(task, desk.family.roles(task)) for task in unseen]
        heldout = [desk.prompt(task, roles[i % len(roles)].agent_id) for i, (task, roles) in enumerate(seats)]
        return cls(train, heldout, trained, desk.agent, section)


def _sample(rows: Sequence[T], n: int) -> list[T]:
    return random.Random(0).sample(list(rows), min(n, len(rows)))


@dataclass(frozen=True)
class Expected:
    """What serving has to show of a checkpoint: the name it is served under, the folder behind it, the hash of what was
    trained, and whether that hash is one of files that can be read again."""

    name: str
    folder: Path
    content_hash: str
    verifiable: bool


def examine(
    engine: Engine, paper: Paper, expected: Expected, base: Sequence[Completion] | None, *, trained: bool
) -> tuple[list[Answer], list[Completion]]:
    """Every probe that applies.

    Args:
        base: the base's turns on the train prompts, where it was examined before.
        trained: whether the checkpoint came out of training, not the base itself.
    Returns:
        The answers, and the checkpoint's own greedy turns on the train prompts.
    """
    agent, section = paper.agent, paper.section
    turns = probes.first_turns(engine, paper.train, agent.max_tokens)
    unseen = probes.first_turns(engine, paper.heldout, agent.max_tokens)
    rendered = {p.source: p.ids for p in paper.train}
    found = []
    if isinstance(engine, ServerEngine):
        content_hash = expected.content_hash if expected.verifiable else None
        found.append(probes.served_root(engine.list_models(), expected.name, expected.folder, content_hash))
        for prompt_set, prompts in (("train", paper.train), ("heldout", paper.heldout)):
            chats = probes.first_chat_turns(engine, prompts, agent.max_tokens)
            found.append(probes.content_visible(prompt_set, prompts, chats))
            found.append(probes.calls_round_trip(prompt_set, prompts, chats))
            rendered |= {p.source: c.prompt_ids or () for p, c in zip(prompts, chats, strict=True)}
    found += [
        probes.served_name(engine, expected.content_hash),
        probes.ids_returned("train", paper.train, turns),
        probes.ids_returned("heldout", paper.heldout, unseen),
        probes.parses("train", paper.train, turns, section.min_parse, agent),
        probes.parses("heldout", paper.heldout, unseen, section.min_parse, agent),
        probes.messages_first("train", turns, agent),
        probes.messages_first("heldout", unseen, agent),
    ]
    if trained:
        found.append(probes.prompt_parity(rendered, paper.trained))
        if base is not None:
            found.append(probes.differs_from_base(turns, base, section.min_differs))
    return found, turns


def examine_on_the_way(engine: Engine, paper: Paper) -> list[Answer]:
    """How a checkpoint from the middle of training acts on prompts it has not seen."""
    unseen = probes.first_turns(engine, paper.heldout, paper.agent.max_tokens)
    return [
        probes.parses("heldout", paper.heldout, unseen, paper.section.min_parse, paper.agent),
        probes.messages_first("heldout", unseen, paper.agent),
    ]
