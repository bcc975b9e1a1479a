"""The curation stage as assets: selected_trajectories, tito_pairs, upweighted_dataset."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.agent.prompts import render_prompts, steering_text, template_path
from etpi_assets.agent.tools import tool_schemas
from etpi_assets.curation import gates, integrity, merge, select, upweight
from etpi_assets.curation.captured import COLUMNS, Default, captured_agents
from etpi_assets.curation.label_syntax import LabelSyntax
from etpi_assets.curation.pairs import CapturedAgent, make_pairs
from etpi_assets.curation.steering import FirstPrompt, Traces
from etpi_assets.curation.student_form import StudentForm
from etpi_assets.materialize import AssetRun, Produced, etpi_asset
from etpi_assets.specs.check_names import DATASET, OVERRIDABLE, PAIRS, SELECTED
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.load import SpecError
from etpi_assets.specs.rollout_set import AgentSection, RolloutSetSpec
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import Family, Role, Task
from etpi_assets.tasks.table import read_tasks
from etpi_assets.trajectories.blocks import blocks
from etpi_resources.chat.format import ChatFormat, load_chat_format
from etpi_resources.lake.checks import CheckOutcome
from etpi_resources.lake.schemas import empty
from etpi_resources.lake.stored import Stored, batches, columns_of, counts, dicts

_COMPARED_ROLLOUTS = 100
"""Rollouts of a set whose prompts are made a second time, from the captured ids."""
_COMPARED_PROMPTS = 400
"""First-turn prompts of each side whose lengths and template are compared: medians need no more."""


@etpi_asset("selected_trajectories", checks=SELECTED)
def selected_trajectories(run: AssetRun) -> Produced:
    spec: ExperimentSpec = run.spec
    rollouts = run.read("raw_rollouts", "rollouts", columns=select.COLUMNS)
    scores = run.read("scored_rollouts", "scores")
    lacking = scores.filter(pc.field("output_tokens").is_null())["rollout_id"].to_pylist()
    chosen = select.select(rollouts, scores, spec.select, _counted(run, lacking) if lacking else None)
    reasons = Counter(chosen["dropped"]["reason"].to_pylist())
    return Produced(
        tables=chosen,
        checks=_with_overrides(spec, [select.counts_reconcile(rollouts, **chosen)]),
        metadata={
            "selected": len(chosen["selected"]),
            "offered": len(chosen["selected"]) + len(chosen["dropped"]),
            "dropped": dict(reasons.most_common()),
            "repos": dict(Counter(chosen["selected"]["repo"].to_pylist())),
            "output_tokens": sum(chosen["selected"]["output_tokens"].to_pylist()),
        },
    )


def _counted(run: AssetRun, rollout_ids: Sequence[str]) -> dict[str, int]:
    """Output tokens of rollouts without ids: their assistant messages in the student's form and tokenizer."""
    chat = student_format(run.spec)
    student = StudentForm(chat)
    count = dict.fromkeys(rollout_ids, 0)
    columns = ["rollout_id", "role", "kind", "content", "tool_calls"]
    for row in dicts(run.stored("raw_rollouts", "messages"), columns):
        if row["kind"] == "action" and row["rollout_id"] in count:
            calls = json.loads(row["tool_calls"]) if row["tool_calls"] else None
            count[row["rollout_id"]] += len(chat.encode(student.text(student.message(row["content"] or "", calls))))
    return count


@etpi_asset("tito_pairs", checks=PAIRS)
def tito_pairs(run: AssetRun) -> Produced:
    spec: ExperimentSpec = run.spec
    chat = student_format(spec)
    section, kwargs = spec.pairs, spec.serving.template_kwargs
    native = section.model_copy(update={"capture": "native"})
    tasks = {task.task_id: task for task in read_tasks(run.read("tasks", "tasks"))}
    selected = run.read("selected_trajectories", "selected", columns=["rollout_id", "rollout_set"])
    dropped: list[pa.Table] = [empty("dropped")]
    read: list[pa.Table] = [empty("pairs")]
    seen, syntax = _Seen(), LabelSyntax(chat, spec.gates)
    with run.spool("pairs") as spool:
        for name in spec.rollout_sets:
            rollout_set: RolloutSetSpec = run.specs.get("rollout_set", name)  # pyright: ignore[reportAssignmentType]
            _same_vocabulary(name, rollout_set, spec)
            tools = tool_schemas(rollout_set.agent.tools if section.capture == "native" else section.tools)
            default = _default_prompts(run, rollout_set, tasks, tools, seen.steering)
            chosen = selected.filter(pc.field("rollout_set") == name)["rollout_id"].to_pylist()
            compares = section.capture == "retokenised" and _same_form(rollout_set, chat)
            some = frozenset(_spread(chosen, _COMPARED_ROLLOUTS) if compares else ())
            for block in _blocks(run, name, frozenset(chosen)):
                agents = captured_agents(block, section, chat, default, kwargs, tools)
                made = make_pairs(syntax.noted(seen.noted(agents)), section, chat)
                syntax.add(made["pairs"], made["dropped"])
                seen.offered.append(block["turns"].select(integrity.KEY))
                spool.add(made["pairs"])
                dropped.append(made["dropped"])
                if some:
                    agents = captured_agents(_of(block, some), native, chat, default, kwargs)
                    read.append(make_pairs(agents, native, chat)["pairs"])
    return _pairs_produced(run, seen, syntax.outcome(), pa.concat_tables(dropped), pa.concat_tables(read))


@dataclass
class _Seen:
    """What pairs are held against, taken from the rollouts on the way."""

    offered: list[pa.Table] = field(default_factory=lambda: [empty("turns").select(integrity.KEY)])
    expected: dict[tuple[str, str], Sequence[int] | np.ndarray] = field(default_factory=dict)
    steering: set[str] = field(default_factory=set)
    systems: set[str] = field(default_factory=set)
    written_anew: int = 0

    def noted(self, agents: Iterable[CapturedAgent]) -> Iterator[CapturedAgent]:
        """The agents as they pass."""
        for agent in agents:
            self.written_anew += not agent.appended
            if agent.default is not None:
                self.expected[agent.rollout_id, agent.agent_id] = agent.default.ids
                self.systems.update(m["content"] for m in agent.default.messages if m["role"] == "system")
            yield agent


def _blocks(run: AssetRun, rollout_set: str, rollout_ids: frozenset[str]) -> Iterator[dict[str, pa.Table]]:
    """What pairs are made of, of those rollouts, a few at a time."""
    tables = {table: run.stored("raw_rollouts", table, key=rollout_set) for table in COLUMNS}
    return (_of(block, rollout_ids) for block in blocks(tables, COLUMNS))


def _of(block: Mapping[str, pa.Table], rollout_ids: frozenset[str]) -> dict[str, pa.Table]:
    wanted = [name for name in block["rollouts"]["rollout_id"].to_pylist() if name in rollout_ids]
    named = pc.field("rollout_id").isin(pa.array(wanted, pa.string()))
    return {name: table.filter(named) for name, table in block.items()}


def _pairs_produced(run: AssetRun, seen: _Seen, syntax: CheckOutcome, dropped: pa.Table, read: pa.Table) -> Produced:
    spec: ExperimentSpec = run.spec
    chat, section, pairs = student_format(spec), spec.pairs, run.spooled("pairs")
    checks = [
        syntax,
        integrity.pairs_reconcile(pa.concat_tables(seen.offered), pairs, dropped),
        integrity.capture_not_mixed(pairs, section),
        integrity.history_as_captured(pairs, read, chat),
        integrity.no_think_in_output(pairs, section, chat),
        integrity.no_steering_leak(pairs, Traces.of(sorted(seen.steering), sorted(seen.systems), chat)),
        integrity.prompt_is_default_render(pairs, seen.expected, section, chat),
    ]
    narrow = columns_of(pairs, ["think_removed", "prefix_turn"])
    return Produced(
        tables={"pairs": pairs, "dropped": dropped},
        checks=_with_overrides(spec, checks),
        metadata={
            "dropped": dict(counts(dropped, "reason").most_common()),
            "prompt_edits": dict(counts(pairs, "prompt_edit")),
            "think_ids_removed": pc.sum(narrow["think_removed"]).as_py() or 0,  # pyright: ignore[reportAttributeAccessIssue]
            "output_tokens": sum(len(batch.column(0).flatten()) for batch in batches(pairs, ["output_ids"])),
            "chained": len(narrow) - narrow["prefix_turn"].null_count,
            "conversations_the_template_writes_anew": seen.written_anew,
        },
    )


def _same_vocabulary(name: str, rollout_set: RolloutSetSpec, spec: ExperimentSpec) -> None:
    """Ids of one tokenizer mean nothing to another, and no check of ids alone could tell."""
    captured = rollout_set.agent.tokenizer
    if spec.pairs.capture == "native" and rollout_set.kind != "imported" and captured != spec.base.tokenizer:
        raise SpecError(
            f"rollout set {name!r} was captured in the ids of {captured!r}, the student reads {spec.base.tokenizer!r}: "
            'set pairs.capture = "retokenised", or take a base of that tokenizer'
        )


def _same_form(rollout_set: RolloutSetSpec, chat: ChatFormat) -> bool:
    """Whether the set was captured in the student's own tokenizer and template, so that prompts can be compared."""
    if rollout_set.kind == "imported" or rollout_set.agent.tokenizer != chat.name:
        return False
    return load_chat_format(rollout_set.agent.tokenizer).template == chat.template


def _default_prompts(
    run: AssetRun,
    rollout_set: RolloutSetSpec,
    tasks: Mapping[str, Task],
    tools: Sequence[Any] | None,
    steering: set[str],
) -> Default:
    """What a student reads first at a task of the set; the steering it could have had is added to `steering`."""
    if rollout_set.kind == "imported" or rollout_set.suite is None:
        return lambda task_id, agent_id: None
    family = load_family(run.specs.suites[rollout_set.suite].family)
    agent, chat, kwargs = rollout_set.agent, student_format(run.spec), run.spec.serving.template_kwargs

    @cache
    def default(task_id: str | None, agent_id: str) -> FirstPrompt | None:
        task = tasks.get(task_id or "")
        if task is None:
            return None
        role = _role(family, task, agent_id)
        if template_path(agent.prompt, "steering"):
            steering.add(steering_text(agent.prompt, role).strip())
        messages = student_prompt(agent, task, role)
        return FirstPrompt(messages, np.asarray(chat.prompt_ids(messages, tools=tools, **kwargs), dtype=np.int32))

    return default


@etpi_asset("upweighted_dataset", checks=DATASET)
def upweighted_dataset(run: AssetRun) -> Produced:
    spec: ExperimentSpec = run.spec
    pairs, tasks = run.stored("tito_pairs", "pairs"), run.read("tasks", "tasks")
    heldout = tasks.filter(pc.field("split") == "heldout")
    weighed = upweight.weigh(pairs, spec.dataset, set(heldout["task_id"].to_pylist()))
    with run.spool("sequences") as spool:
        rows = merge.merge(weighed["dataset_rows"], pairs, spec.dataset.max_length, spool.add)
    dropped, sequences = weighed["dropped"], run.spooled("sequences")
    selected = run.read("selected_trajectories", "selected")
    agent_scores = run.read("scored_rollouts", "agent_scores")
    rollouts = run.read("raw_rollouts", "rollouts", columns=["rollout_id", "task_id", "source"])
    scores = run.read("scored_rollouts", "scores")
    ours, theirs = _training_prompts(rows, pairs), _evaluation_prompts(run, tasks)
    heldout_repos = {*heldout["repo"].to_pylist(), *spec.dataset.heldout_repos}
    lost = _lost(run, rollouts, scores, selected, rows, dropped)
    found = len(rollouts) + len(run.read("raw_rollouts", "quarantined", columns=["source"]))
    checks = [
        integrity.dataset_reconciles(pairs, rows, dropped),
        integrity.label_tokens(rows, pairs, sequences),
        integrity.heldout_split(rows, heldout_repos, set(heldout["task_id"].to_pylist())),
        gates.teacher_gate(rollouts, scores, agent_scores, spec.gates),
        gates.turn_loss_share(rows, spec.gates),
        gates.format_exposure(rows, pairs, spec.gates),
        gates.role_balance(rows, pairs, spec.gates),
        gates.plan_paths_in_task(selected, agent_scores, _task_texts(run, tasks), spec.gates),
        gates.prompt_length_ratio([len(p) for p in ours], [len(p) for p in theirs], spec.gates),
        gates.template_distance(ours, theirs, spec.gates),
        gates.skip_rate(found, lost, spec.gates),
        gates.turns_lost(rows, run.read("tito_pairs", "dropped"), dropped, spec.gates),
    ]
    saved = merge.merge_savings(rows, pairs, sequences)
    return Produced(
        tables={"dataset_rows": rows, "sequences": sequences, "dropped": dropped},
        checks=_with_overrides(spec, checks),
        metadata={
            "rows": dict(counts(rows, "split")),
            "dropped": dict(counts(dropped, "reason")),
            "sequences": len(sequences),
            "forking_sequences": sum(len(row["node_starts"]) > 1 for row in dicts(sequences, ["node_starts"])),
            "tokens_saved_by_merging": f"{saved['ratio']:.2f}x",
            "loss_share_by_turn": {
                str(turn): round(share, 4) for turn, share in upweight.loss_share_by_turn(rows).items()
            },
            "label_tokens": pc.sum(rows["output_tokens"]).as_py() or 0,  # pyright: ignore[reportAttributeAccessIssue]
        },
        notes={"merging": saved},
    )


def _training_prompts(rows: pa.Table, pairs: Stored) -> list[Sequence[int]]:
    """First-turn inputs of the training rows, evenly spread over them."""
    chosen = rows.filter((pc.field("split") == "train") & (pc.field("turn") == 0))["pair_id"].to_pylist()
    names = set(_spread(chosen))
    columns = ["pair_id", "turn", "prefix_turn", "suffix_ids"]
    first = (batch.filter(batch["turn"].to_numpy() == 0) for batch in batches(pairs, columns))
    return [
        ids.values.to_numpy().tolist()
        for batch in first
        for name, prefix, ids in zip(batch["pair_id"], batch["prefix_turn"], batch["suffix_ids"], strict=True)
        if name.as_py() in names and not prefix.is_valid
    ]


def _evaluation_prompts(run: AssetRun, tasks: pa.Table) -> list[Sequence[int]]:
    """First-turn prompts of evaluation as serving renders them; none where nothing is evaluated."""
    spec: ExperimentSpec = run.spec
    if spec.evaluate is None:
        return []
    suite = tasks.filter(pc.field("suite") == spec.evaluate.suite)
    family = load_family(run.specs.suites[spec.evaluate.suite].family)
    chat, agent = student_format(spec), spec.evaluate.agent
    tools, kwargs = tool_schemas(agent.tools), spec.serving.template_kwargs
    seats = [(task, role) for task in read_tasks(suite, spec.evaluate.split) for role in family.roles(task)]
    return [chat.prompt_ids(student_prompt(agent, task, role), tools=tools, **kwargs) for task, role in _spread(seats)]


def _spread(items: Sequence[Any], n: int = _COMPARED_PROMPTS) -> Sequence[Any]:
    """About `n` of the items, evenly spread."""
    return items[:: max(1, len(items) // n)]


def _task_texts(run: AssetRun, tasks: pa.Table) -> pa.Table:
    """The tasks, the entities that their family knows of them behind their instruction."""
    texts = []
    for task in read_tasks(tasks):
        entities = load_family(run.specs.suites[task.suite].family).entities(task)
        texts.append("\n".join([task.instruction, *entities]))
    index = tasks.schema.get_field_index("instruction")
    return tasks.set_column(index, tasks.schema.field(index), pa.array(texts, pa.string()))


def _lost(
    run: AssetRun, rollouts: pa.Table, scores: pa.Table, selected: pa.Table, rows: pa.Table, dropped: pa.Table
) -> dict[str, str]:
    """Inputs lost before training for reasons other than selection: name -> reason."""
    lost = {
        row["source"]: f"quarantined: {row['reason']}"
        for row in run.read("raw_rollouts", "quarantined", columns=["source", "reason"]).to_pylist()
    }
    named = {
        row["rollout_id"]: row["source"] or f"{row['task_id']} ({row['rollout_id'][:8]})"
        for row in rollouts.to_pylist()
    }
    for row in scores.to_pylist():
        if row["infrastructure_error"]:
            lost[named[row["rollout_id"]]] = f"infrastructure: {row['exit_status']}"
    heldout = dropped.filter(pc.field("reason").isin(["heldout_repo", "heldout_task"]))
    used = {name for table in (rows, heldout) for name in table["rollout_id"].unique().to_pylist()}
    for rollout_id in selected["rollout_id"].to_pylist():
        if rollout_id not in used:
            lost[named[rollout_id]] = "no turn is left"
    return lost


def _role(family: Family, task: Task, agent_id: str) -> Role:
    return next(role for role in family.roles(task) if role.agent_id == agent_id)


def student_prompt(agent: AgentSection, task: Task, role: Role) -> list[dict[str, str]]:
    """The first messages without steering, whatever the teacher's prompt has."""
    return render_prompts(agent.model_copy(update={"steering": False}), task, role)


def student_format(spec: ExperimentSpec) -> ChatFormat:
    """The chat format the student is trained and served in."""
    return load_chat_format(spec.base.tokenizer, spec.base.chat_template)


def _with_overrides(spec: ExperimentSpec, outcomes: Sequence[CheckOutcome]) -> list[CheckOutcome]:
    gates.validate_overrides(spec.gates, OVERRIDABLE)
    return gates.apply_overrides(outcomes, spec.gates)


ASSETS = [selected_trajectories, tito_pairs, upweighted_dataset]
