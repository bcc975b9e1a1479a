"""Build the pairs of a rollout set a few rollouts at a time, with everything that the checks of all pairs need."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.agent.tools import tool_schemas
from etpi_assets.curation import integrity, recorded_text
from etpi_assets.curation.captured import captured_agents
from etpi_assets.curation.default_prompt import DefaultPrompts, student_format
from etpi_assets.curation.label_syntax import Findings, LabelSyntax
from etpi_assets.curation.oracle import Oracle, labels_outcome
from etpi_assets.curation.pairs import CapturedAgent, make_pairs
from etpi_assets.curation.steering import FirstPrompt
from etpi_assets.specs.experiment import ExperimentSpec, PairsSection
from etpi_assets.specs.load import Specs
from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_assets.tasks.family import Task
from etpi_assets.trajectories.records import UNTRAINED
from etpi_assets.trajectories.rollout_checks import merged
from etpi_resources.chat.format import ChatFormat, load_chat_format
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.schemas import empty
from etpi_resources.lake.stored import counts

_COMPARED_ROLLOUTS = 100
"""Rollouts of a set whose re-tokenised prompts are compared with the captured ids."""


@dataclass
class PairFigures:
    """Figures for the checks of all pairs, collected while the pairs are built a block at a time.

    Attributes:
        syntax: the findings on the labels' syntax.
        steering, systems: texts of the steering, and of the default system messages.
        rows: the number of pairs of each block.
    """

    syntax: Findings = field(default_factory=Findings)
    steering: set[str] = field(default_factory=set)
    systems: set[str] = field(default_factory=set)
    rows: list[int] = field(default_factory=list)
    _counted: list[dict[str, Any]] = field(default_factory=list)

    def add(self, part: Mapping[str, pa.Table]) -> None:
        """Add the figures of the tables that `PairBuilder.build` returned for a block."""
        (text,) = part["figures"]["json"].to_pylist()
        figures = json.loads(text)
        self.syntax.add_json(figures.pop("syntax"))
        self.steering.update(figures.pop("steering"))
        self.systems.update(figures.pop("systems"))
        self.rows.append(len(part["pairs"]))
        self._counted.append(figures)

    def counted(self) -> dict[str, Any]:
        """Return the sum of the other figures, see `PairBuilder.build`."""
        return merged(self._counted)


FIGURES = pa.schema([("json", pa.string())])


@dataclass(frozen=True)
class PairBuilder:
    """Builds the pairs of one rollout set, a few rollouts at a time.

    Attributes:
        compared: rollouts whose pairs are also built from their captured ids.
        default_prompt: the first prompt of a student, see `DefaultPrompts`.
        tools: offered in every prompt; None offers each rollout's own.
    """

    section: PairsSection
    chat: ChatFormat
    template_kwargs: Mapping[str, Any]
    tools: Sequence[Any] | None
    compared: frozenset[str]
    default_prompts: DefaultPrompts
    syntax: LabelSyntax

    @classmethod
    def of(
        cls,
        specs: Specs,
        spec: ExperimentSpec,
        rollout_set: RolloutSetSpec,
        rollout_ids: Sequence[str],
        tasks: Mapping[str, Task],
        section: PairsSection,
        syntax: LabelSyntax,
    ) -> PairBuilder:
        """Return the builder for those rollouts of a set."""
        chat = student_format(spec)
        tools = tool_schemas(rollout_set.agent.tools if section.capture == "native" else section.tools)
        comparable = section.capture == "retokenised" and _same_form(rollout_set, chat)
        compared = frozenset(spread(rollout_ids, _COMPARED_ROLLOUTS) if comparable else ())
        prompts = DefaultPrompts(specs, spec, rollout_set, tasks, tools)
        return cls(section, chat, spec.serving.template_kwargs, tools, compared, prompts, syntax)

    def build(self, block: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
        """Return {"pairs", "dropped", "figures"} of the rollouts of a block.

        The result depends on the block alone, so a rerun can use the parts of a killed run.
        """
        expected: dict[integrity.AgentKey, FirstPrompt] = {}
        quoted: dict[str, int] = {}
        texts: dict[str, set[str]] = {"steering": set(), "systems": set()}
        rerendered = 0

        def noted(agents: Iterable[CapturedAgent]) -> Iterator[CapturedAgent]:
            nonlocal rerendered
            for agent in agents:
                rerendered += not agent.appended
                for turn in agent.turns:
                    if turn.quoted:
                        quoted[f"{agent.rollout_id}/{agent.agent_id}/{turn.turn}"] = turn.quoted
                if agent.default is not None:
                    expected[agent.rollout_id, agent.agent_id] = agent.default
                    texts["systems"].update(m["content"] for m in agent.default.messages if m["role"] == "system")
                    texts["steering"].update(self.default_prompts.steering(agent.facts["task_id"], agent.agent_id))
                yield agent

        default = self.default_prompts
        agents = captured_agents(block, self.section, self.chat, default, self.template_kwargs, self.tools)
        tables = make_pairs(self.syntax.collect(noted(agents)), self.section, self.chat)
        self.syntax.add(tables["pairs"], tables["dropped"])
        figures = {
            **self._checked(block, tables["pairs"], tables["dropped"], expected, quoted),
            **_totals(tables["pairs"]),
            "rerendered": rerendered,
            "syntax": self.syntax.take(),
            **{name: sorted(of_block) for name, of_block in texts.items()},
        }
        return {**tables, "figures": pa.table([[json.dumps(figures)]], schema=FIGURES)}

    def _checked(
        self,
        block: Mapping[str, pa.Table],
        pairs: pa.Table,
        dropped: pa.Table,
        expected: Mapping[integrity.AgentKey, FirstPrompt],
        quoted: Mapping[str, int],
    ) -> dict[str, Any]:
        """Return the figures of the checks by name."""
        section, chat = self.section, self.chat
        first = {key: prompt.messages for key, prompt in expected.items()}
        oracle = Oracle(chat, section, self.template_kwargs, self.tools)
        return {
            "reconcile": integrity.reconcile_figures(block["turns"], pairs, dropped),
            "captures": dict(counts(pairs, "capture")),
            "history": integrity.history_figures(pairs, self._captured_pairs(block), chat),
            "think": integrity.think_figures(pairs, section, chat, quoted),
            "default_render": integrity.default_render_figures(
                pairs, {key: prompt.ids for key, prompt in expected.items()}, section, chat
            ),
            "template": oracle.figures(block, pairs, first),
            "text": recorded_text.text_figures(block["turns"], block["messages"], pairs, chat),
            "tools": recorded_text.tool_figures(block, pairs, self.tools, chat),
        }

    def _captured_pairs(self, block: Mapping[str, pa.Table]) -> pa.Table:
        """Return the pairs that the captured ids of the compared rollouts give."""
        if not self.compared:
            return empty("pairs")
        native = self.section.model_copy(update={"capture": "native"})
        rollouts = of_rollouts(block, self.compared)
        agents = captured_agents(rollouts, native, self.chat, self.default_prompts, self.template_kwargs)
        return make_pairs(agents, native, self.chat)["pairs"]


def label_checks(counted: Mapping[str, Any], section: PairsSection, chat: ChatFormat) -> list[CheckOutcome]:
    """Return the verdicts over labels against the template, the recorded text and the offered tools."""
    return [
        labels_outcome(counted["template"], chat, native=section.capture == "native"),
        recorded_text.text_outcome(counted["text"]),
        recorded_text.tools_outcome(counted["tools"]),
    ]


def _totals(pairs: pa.Table) -> dict[str, Any]:
    """Return figures for the asset's page."""
    return {
        "prompt_edits": dict(counts(pairs, "prompt_edit")),
        "think_removed": pc.sum(pairs["think_removed"]).as_py() or 0,  # pyright: ignore[reportAttributeAccessIssue]
        "output_tokens": len(pc.list_flatten(pairs["output_ids"])),  # pyright: ignore[reportAttributeAccessIssue]
        "chained": len(pairs) - pairs["prefix_turn"].null_count,
    }


@dataclass(frozen=True)
class PairFactory:
    """Inputs from which a worker process builds the pairs of a rollout set: `PairBuilder.of` without unpicklable parts.

    Attributes:
        specs, experiment: all specs, as loaded at the start of the run, and the name of the experiment.
        rollout_ids: the selected rollouts of the set.
    """

    specs: Specs
    experiment: str
    rollout_set: RolloutSetSpec
    rollout_ids: Sequence[str]
    tasks: Mapping[str, Task]
    section: PairsSection

    def __call__(self) -> Callable[[Mapping[str, pa.Table]], dict[str, pa.Table]]:
        """Return `PairBuilder.build`."""
        spec = self.specs.experiments[self.experiment]
        syntax = label_syntax(spec)
        return PairBuilder.of(
            self.specs, spec, self.rollout_set, self.rollout_ids, self.tasks, self.section, syntax
        ).build


def label_syntax(spec: ExperimentSpec) -> LabelSyntax:
    """Return the check of the labels of an experiment."""
    return LabelSyntax(student_format(spec), spec.gates, spec.serving.options.get("tool-call-parser"))


def of_rollouts(block: Mapping[str, pa.Table], rollout_ids: frozenset[str]) -> dict[str, pa.Table]:
    wanted = [name for name in block["rollouts"]["rollout_id"].to_pylist() if name in rollout_ids]
    is_wanted = pc.field("rollout_id").isin(pa.array(wanted, pa.string()))
    chosen = {name: table.filter(is_wanted) for name, table in block.items()}
    is_own = pc.invert(pc.match_substring_regex(chosen["messages"]["kind"], UNTRAINED))  # pyright: ignore[reportAttributeAccessIssue]
    return chosen | {"messages": chosen["messages"].filter(is_own)}


def _same_form(rollout_set: RolloutSetSpec, chat: ChatFormat) -> bool:
    """Return whether the set was captured in the student's tokenizer and template, so that prompts can be compared."""
    if rollout_set.kind == "imported" or rollout_set.agent.tokenizer != chat.name:
        return False
    return load_chat_format(rollout_set.agent.tokenizer).template == chat.template


def spread(items: Sequence[Any], n: int) -> Sequence[Any]:
    """Return about `n` of the items, evenly spread."""
    return items[:: max(1, len(items) // n)]
