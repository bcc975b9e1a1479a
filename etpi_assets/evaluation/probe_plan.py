"""Plan the probes of a served checkpoint and their prompts.

Every probe runs against a final checkpoint. Against an intermediate checkpoint only the held-out prompts run. They give
a learning curve over the steps of training, which shows how soon the model learns a behaviour, even if the final
checkpoints of two experiments do not differ.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from etpi_assets.agent.contract import read_turn
from etpi_assets.agent.prompts import render_prompts
from etpi_assets.agent.tools import tool_schemas
from etpi_assets.evaluation import probes
from etpi_assets.evaluation.probes import DEFAULT, BaseTurns, ProbePrompt, ProbeResult
from etpi_assets.specs.experiment import ProbeSection
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.family import Family, Task
from etpi_resources.chat.format import ChatFormat
from etpi_resources.chat.tool_forms import ToolForm
from etpi_resources.engines import Completion, Engine, ServerEngine

T = TypeVar("T")


@dataclass(frozen=True)
class PromptRenderer:
    """Renders the first-turn prompt of an agent as serving renders it."""

    family: Family
    chat: ChatFormat
    agent: AgentSection
    template_kwargs: Mapping[str, Any]

    def render(self, task: Task, agent_id: str) -> ProbePrompt:
        """Render an agent's first-turn prompt for a task."""
        (role,) = [role for role in self.family.roles(task) if role.agent_id == agent_id]
        messages, tools = render_prompts(self.agent, task, role), tool_schemas(self.agent.tools)
        ids = self.chat.prompt_ids(messages, tools=tools, **self.template_kwargs)
        return ProbePrompt(f"{task.task_id}/{agent_id}", ids, messages, tuple(tools or ()))


@dataclass(frozen=True)
class ProbePlan:
    """The prompts that every checkpoint of an experiment is probed with, and how its answers are read.

    Attributes:
        train, heldout: first-turn prompts of tasks in the training data, and of held-out tasks.
        trained_ids: source of each train prompt -> its prompt ids in the training data; None if the train prompts are
            those ids themselves, and not rendered from tasks.
        agent: the turn format, and the length of an answer.
        section: the floors of the spec.
        form: the form of the student's calls; None if its prompts offer no tools.
    """

    train: Sequence[ProbePrompt]
    heldout: Sequence[ProbePrompt]
    trained_ids: Mapping[str, Sequence[int]] | None
    agent: AgentSection
    section: ProbeSection
    form: ToolForm | None = None

    @classmethod
    def build(
        cls,
        renderer: PromptRenderer,
        section: ProbeSection,
        tasks: Sequence[Task],
        dataset_rows: Sequence[Mapping[str, Any]],
        first_prompt_ids: Mapping[str, Sequence[int]],
    ) -> ProbePlan:
        """Sample at most `section.prompts` prompts of each kind, always the same ones.

        Args:
            tasks: tasks of the evaluated suite. Held-out tasks alternate between their agents.
            dataset_rows: rows of `dataset_rows` (pair_id, task_id, agent_id, turn); only first turns of `tasks` count.
            first_prompt_ids: pair id of a first turn -> the prompt ids trained on.
        """
        by_id = {task.task_id: task for task in tasks}
        rows = _sample([r for r in dataset_rows if r["turn"] == 0 and r["task_id"] in by_id], section.prompts)
        train = [renderer.render(by_id[row["task_id"]], row["agent_id"]) for row in rows]
        trained_ids = {prompt.source: first_prompt_ids[row["pair_id"]] for prompt, row in zip(train, rows, strict=True)}
        unseen = _sample([task for task in tasks if task.split == "heldout"], section.prompts)
        roles = [renderer.family.roles(task) for task in unseen]
        heldout = [
            renderer.render(task, of_task[i % len(of_task)].agent_id)
            for i, (task, of_task) in enumerate(zip(unseen, roles, strict=True))
        ]
        form = renderer.chat.tool_form if renderer.agent.tools else None
        return cls(train, heldout, trained_ids, renderer.agent, section, form)

    @classmethod
    def of_data(cls, chat: ChatFormat, section: ProbeSection, first_pairs: Sequence[Mapping[str, Any]]) -> ProbePlan:
        """Sample prompts from the training data alone, for an experiment without a suite of tasks.

        Args:
            first_pairs: rows of `pairs` of first turns (pair_id, suffix_ids, output_ids). Only those whose label has a
                readable action count: a served checkpoint must then answer with one too.
        """
        form = chat.tool_form
        acting = [
            row
            for row in first_pairs
            if read_turn(chat.decode(chat.without_end(row["output_ids"])), DEFAULT, form=form)[1] is None
        ]
        rows = _sample(acting, section.prompts)
        longest = max((len(row["output_ids"]) for row in rows), default=0)
        agent = AgentSection(max_tokens=max(DEFAULT.max_tokens, longest))
        train = [ProbePrompt(row["pair_id"], row["suffix_ids"], ()) for row in rows]
        return cls(train, (), None, agent, section, form)


def _sample(rows: Sequence[T], n: int) -> list[T]:
    return random.Random(0).sample(list(rows), min(n, len(rows)))


@dataclass(frozen=True)
class ExpectedServing:
    """Values that the server must report of a checkpoint.

    Attributes:
        name: the name it is served under.
        folder: the folder of its files.
        content_hash: the hash of the trained weights.
        verifiable: whether `content_hash` is a hash of files that can be read again.
    """

    name: str
    folder: Path
    content_hash: str
    verifiable: bool


def probe_final(
    engine: Engine, plan: ProbePlan, expected: ExpectedServing, base: BaseTurns | None, *, trained: bool
) -> tuple[list[ProbeResult], BaseTurns | None]:
    """Run every probe that applies to a final checkpoint.

    Args:
        base: the base's greedy turns on the train prompts, if the base was probed before.
        trained: whether the checkpoint comes from training; False for the base.

    Returns:
        The results, and the base's turns on the train prompts: those given, or the checkpoint's own if it is the base.
    """
    turns = probes.first_turns(engine, plan.train, plan.agent.max_tokens)
    rendered = {p.source: p.ids for p in plan.train}
    results = []
    if isinstance(engine, ServerEngine):
        server_results, server_ids = _probe_server(engine, plan, expected)
        results += server_results
        rendered |= server_ids
    results += [
        probes.served_name(engine, expected.content_hash),
        probes.ids_returned("train", plan.train, turns),
        *_acting("train", plan.train, turns, plan),
    ]
    if plan.heldout:
        unseen = probes.first_turns(engine, plan.heldout, plan.agent.max_tokens)
        results += [probes.ids_returned("heldout", plan.heldout, unseen)]
        results += _acting("heldout", plan.heldout, unseen, plan)
    if not trained:
        # In another order, so that batches have other contents.
        again = probes.first_turns(engine, plan.train[::-1], plan.agent.max_tokens)[::-1]
        return results, BaseTurns(turns, again)
    if plan.trained_ids is not None:
        results.append(probes.prompt_parity(rendered, plan.trained_ids))
    if base is not None:
        results.append(probes.differs_from_base(turns, base, plan.section.min_differs))
    return results, base


def _probe_server(
    engine: ServerEngine, plan: ProbePlan, expected: ExpectedServing
) -> tuple[list[ProbeResult], dict[str, Sequence[int]]]:
    """Run the probes of a server's model listing, template and parsers; also return the prompt ids it rendered."""
    content_hash = expected.content_hash if expected.verifiable else None
    results = [probes.served_root(engine.list_models(), expected.name, expected.folder, content_hash)]
    rendered: dict[str, Sequence[int]] = {}
    # Prompts of the data alone are ids; a server's own template needs messages.
    sets = (("train", plan.train if plan.trained_ids is not None else ()), ("heldout", plan.heldout))
    for prompt_set, prompts in [(name, prompts) for name, prompts in sets if prompts]:
        chats = probes.first_chat_turns(engine, prompts, plan.agent.max_tokens)
        results.append(probes.content_visible(prompt_set, prompts, chats))
        results.append(probes.calls_round_trip(prompt_set, prompts, chats, plan.form))
        rendered |= {p.source: c.prompt_ids or () for p, c in zip(prompts, chats, strict=True)}
    return results, rendered


def probe_intermediate(engine: Engine, plan: ProbePlan) -> list[ProbeResult]:
    """Probe how an intermediate checkpoint acts on held-out prompts; without such prompts, probe nothing."""
    if not plan.heldout:
        return []
    unseen = probes.first_turns(engine, plan.heldout, plan.agent.max_tokens)
    return _acting("heldout", plan.heldout, unseen, plan)


def _acting(
    prompt_set: str, prompts: Sequence[ProbePrompt], turns: Sequence[Completion], plan: ProbePlan
) -> list[ProbeResult]:
    """Probe how first turns act."""
    return [
        probes.parses(prompt_set, prompts, turns, plan.section.min_parse, plan.agent, plan.form),
        probes.messages_first(prompt_set, turns, plan.agent, plan.form),
    ]
