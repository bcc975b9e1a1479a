"""Build the pairs of a rollout set a few rollouts at a time, with everything that the checks of all pairs need."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.agent.tools import tool_schemas
from etpi_assets.checks import judged
from etpi_assets.curation import integrity, recorded_text
from etpi_assets.curation.captured import captured_agents
from etpi_assets.curation.default_prompt import DefaultPrompts, student_format
from etpi_assets.curation.integrity import STEERING_COLUMNS, steering_figures
from etpi_assets.curation.label_syntax import LabelSyntax
from etpi_assets.curation.pairs import CapturedAgent, make_pairs
from etpi_assets.curation.steering import SteeringNgrams
from etpi_assets.curation.template_check import TemplateCheck, labels_outcome, native_figures
from etpi_assets.specs.experiment import ExperimentSpec, GatesSection, PairsSection
from etpi_assets.specs.load import Specs
from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_assets.tasks.family import Task
from etpi_assets.trajectories.records import UNTRAINED
from etpi_assets.trajectories.rollout_checks import merged
from etpi_resources.chat.format import ChatFormat, load_chat_format
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.parquet import RowRanges
from etpi_resources.lake.schemas import empty
from etpi_resources.lake.stored import Stored, counts
from etpi_resources.process.pool import ordered_map, workers_for

_COMPARED_ROLLOUTS = 100
"""Rollouts of a set whose re-tokenised prompts are compared with the captured ids."""


@dataclass(frozen=True)
class PairBuilder:
    """Builds the pairs of one rollout set, a few rollouts at a time.

    Attributes:
        compared: rollouts whose pairs are also built from their captured ids.
        repeated: rollout -> agent -> numbers of the turns, from 0, that another rollout trains.
        default_prompts: the first prompts of a student.
        tools: offered in every prompt; None offers each rollout's own.
    """

    section: PairsSection
    chat: ChatFormat
    template_kwargs: Mapping[str, Any]
    tools: Sequence[Any] | None
    compared: frozenset[str]
    default_prompts: DefaultPrompts
    syntax: LabelSyntax
    repeated: Mapping[str, Mapping[str, Sequence[int]]] = field(default_factory=dict)

    def build(self, block: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
        """Return {"pairs", "dropped", "figures"} of the rollouts of a block.

        The result depends on the block alone, so a rerun can use the parts of a killed run.
        """
        agents = list(
            captured_agents(block, self.section, self.chat, self.default_prompts, self.template_kwargs, self.tools)
        )
        shared = self.repeated
        agents = [replace(a, repeated=shared.get(a.rollout_id, {}).get(a.agent_id, ())) for a in agents]
        tables = make_pairs(agents, self.section, self.chat)
        figures = {
            **self._checked(block, agents, **tables),
            **self._texts(agents),
            "rerendered": sum(not agent.appended for agent in agents),
            "rows": [len(tables["pairs"])],
        }
        return {**tables, "figures": pa.table({"json": [json.dumps(figures)]})}

    def _texts(self, agents: Sequence[CapturedAgent]) -> dict[str, list[str]]:
        """Return the texts of the steering that teachers may have had, and of the default system messages."""
        steering: set[str] = set()
        systems: set[str] = set()
        for agent in agents:
            if agent.default is not None:
                systems.update(m["content"] for m in agent.default.messages if m["role"] == "system")
                steering |= self.default_prompts.steering(agent.facts["task_id"], agent.agent_id)
        return {"steering": sorted(steering), "systems": sorted(systems)}

    def _checked(
        self, block: Mapping[str, pa.Table], agents: Sequence[CapturedAgent], pairs: pa.Table, dropped: pa.Table
    ) -> dict[str, Any]:
        """Return the figures of the checks by name."""
        section, chat = self.section, self.chat
        quoted = {f"{a.rollout_id}/{a.agent_id}/{t.turn}": t.quoted for a in agents for t in a.turns if t.quoted}
        defaults = {(a.rollout_id, a.agent_id): a.default for a in agents if a.default is not None}
        prompts = {key: prompt.ids for key, prompt in defaults.items()}
        check = TemplateCheck(chat, section, self.template_kwargs)
        native = section.capture == "native"
        return {
            "syntax": self.syntax.figures(agents, pairs, dropped),
            "reconcile": integrity.reconcile_figures(block["turns"], pairs, dropped),
            "captures": dict(counts(pairs, "capture")),
            "history": integrity.history_figures(pairs, self._captured_pairs(block), chat),
            "think": integrity.think_figures(pairs, section, chat, quoted),
            "default_render": integrity.default_render_figures(pairs, prompts, section, chat),
            "template": self._rendered_again(block, pairs) if native else check.figures(agents, pairs),
            "text": recorded_text.text_figures(block["turns"], block["messages"], pairs, chat),
            "tools": recorded_text.tool_figures(block, pairs, self.tools, chat),
            "results": recorded_text.result_figures(block["messages"], pairs),
        }

    def _rendered_again(self, block: Mapping[str, pa.Table], pairs: pa.Table) -> dict[str, Any]:
        """Return the figures of recorded ids; a model wrote them, so one rollout of a block is enough to count."""
        sampled = of_rollouts(block, frozenset(pairs["rollout_id"].slice(0, 1).to_pylist()))
        section = self.section.model_copy(update={"capture": "retokenised"})
        try:
            agents = list(
                captured_agents(sampled, section, self.chat, self.default_prompts, self.template_kwargs, self.tools)
            )
        except ValueError:  # their messages alone are no conversation
            agents = []
        return native_figures(pairs, make_pairs(agents, section, self.chat)["pairs"], self.chat)

    def _captured_pairs(self, block: Mapping[str, pa.Table]) -> pa.Table:
        """Return the pairs that the captured ids of the compared rollouts give."""
        if not self.compared:
            return empty("pairs")
        native = self.section.model_copy(update={"capture": "native"})
        rollouts = of_rollouts(block, self.compared)
        agents = captured_agents(rollouts, native, self.chat, self.default_prompts, self.template_kwargs)
        return make_pairs(agents, native, self.chat)["pairs"]


def label_checks(
    counted: Mapping[str, Any], section: PairsSection, chat: ChatFormat, gates: GatesSection
) -> list[CheckOutcome]:
    """Return the verdicts over labels against the template, the recorded text, offered tools and results of calls."""
    names = ", ".join(f"{name} {n}" for name, n in Counter(counted["tools"]["names"]).most_common(3))
    return [
        labels_outcome(counted["template"], chat, gates.turns_lost, native=section.capture == "native"),
        recorded_text.text_outcome(counted["text"]),
        judged("tools_offered", counted["tools"], names=names),
        judged("calls_answered", counted["results"]),
    ]


def pair_builder(
    specs: Specs,
    experiment: str,
    rollout_set: RolloutSetSpec,
    rollout_ids: Sequence[str],
    tasks: Mapping[str, Task],
    section: PairsSection,
    repeated: Mapping[str, Mapping[str, Sequence[int]]],
) -> Callable[[Mapping[str, pa.Table]], dict[str, pa.Table]]:
    """Return `PairBuilder.build` of a rollout set, in a worker process.

    Args:
        specs, experiment: all specs, as loaded at the start of the run, and the name of the experiment.
        rollout_ids: the selected rollouts of the set.
    """
    spec = specs.experiments[experiment]
    chat = student_format(spec)
    tools = tool_schemas(rollout_set.agent.tools if section.capture == "native" else section.tools)
    comparable = section.capture == "retokenised" and _same_form(rollout_set, chat)
    compared = frozenset(spread(rollout_ids, _COMPARED_ROLLOUTS) if comparable else ())
    prompts = DefaultPrompts(specs, spec, rollout_set, tasks, tools)
    kwargs = spec.serving.template_kwargs
    return PairBuilder(section, chat, kwargs, tools, compared, prompts, label_syntax(spec), repeated).build


def label_syntax(spec: ExperimentSpec) -> LabelSyntax:
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


_ROWS = 4096
"""Pairs that are searched at a time, at least."""
_SECONDS_PER_PAIR = 3e-4
"""Estimated seconds of one core to search a pair."""


def steering_leaks(pairs: Stored, figures: Mapping[str, Any], spec: ExperimentSpec) -> dict[str, Any]:
    """Return `steering_figures` of all pairs, given the figures of their blocks; raises as `SteeringNgrams.build`.

    It reads the pairs again, because only all rollouts together say which texts are steering.
    """
    if not figures["steering"]:
        return {"pairs": len(pairs), "leaks": 0}
    ranges = ((f"pairs {start} to {stop}", (start, stop)) for start, stop in _ranges(figures["rows"]))
    factory = partial(_searcher, pairs, spec, sorted({*figures["steering"]}), sorted({*figures["systems"]}))
    workers = workers_for(len(pairs) * _SECONDS_PER_PAIR)
    return merged(ordered_map(factory, ranges, workers=workers, reads=pairs.paths))


def _searcher(
    pairs: Stored, spec: ExperimentSpec, steering: Sequence[str], systems: Sequence[str]
) -> Callable[[tuple[int, int]], dict[str, Any]]:
    """Return the function that searches a range of the pairs for the n-grams of the texts."""
    ranges = RowRanges(pairs.name, pairs.paths, STEERING_COLUMNS)
    ngrams = SteeringNgrams.build(steering, systems, student_format(spec))
    return lambda bounds: steering_figures(ranges.read(*bounds), ngrams)


def _ranges(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of at least `_ROWS` pairs that end with a block; at least one."""
    start = stop = 0
    for of_block in rows:
        stop += of_block
        if stop - start >= _ROWS:
            yield start, stop
            start = stop
    if stop > start or not stop:
        yield start, stop
