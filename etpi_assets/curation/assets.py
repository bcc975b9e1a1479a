"""The curation stage as assets: selected_trajectories, tito_pairs, upweighted_dataset."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.curation import gates, integrity, merge, select, upweight
from etpi_assets.curation.captured import Default, captured_agents
from etpi_assets.curation.pairs import make_pairs
from etpi_assets.curation.steering import FirstPrompt, Traces
from etpi_assets.curation.student_form import turn_text
from etpi_assets.evaluation.probes import PROBES
from etpi_assets.materialize import AssetRun, Produced, etpi_asset
from etpi_assets.rollouts.prompts import FOLDER as PROMPTS
from etpi_assets.rollouts.prompts import render_prompts, steering_text
from etpi_assets.rollouts.tables import iter_prompts
from etpi_assets.rollouts.tools import tool_schemas
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.load import SpecError
from etpi_assets.specs.rollout_set import AgentSection, RolloutSetSpec
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import Family, Role, Task
from etpi_assets.tasks.table import read_tasks
from etpi_resources.chat_format import ChatFormat, load_chat_format
from etpi_resources.checks import CheckOutcome
from etpi_resources.schemas import empty

SELECTED = ("selection_reconciles",)
PAIRS = (
    "pairs_reconcile", "capture_not_mixed", "history_as_captured", "no_think_in_output", "no_steering_leak",
    "prompt_is_default_render",
)  # fmt: skip
DATASET = (
    "dataset_reconciles", "label_tokens", "heldout_split", "teacher_gate", "turn_loss_share", "format_exposure",
    "role_balance", "plan_paths_in_task", "prompt_length_ratio", "template_distance", "skip_rate",
)  # fmt: skip
_COMPARED_ROLLOUTS = 100
"""Rollouts of a set whose prompts are made a second time, from the captured ids."""
_COMPARED_PROMPTS = 400
"""First-turn prompts of each side whose lengths and template are compared: medians need no more."""


@etpi_asset("selected_trajectories", checks=SELECTED)
def selected_trajectories(run: AssetRun) -> Produced:
    spec: ExperimentSpec = run.spec
    rollouts, scores = run.read("raw_rollouts", "rollouts"), run.read("scored_rollouts", "scores")
    lacking = scores.filter(pc.field("output_tokens").is_null())["rollout_id"].to_pylist()
    chosen = select.select(rollouts, scores, spec.select, _counted(run, lacking) if lacking else None)
    reasons = Counter(chosen["dropped"]["reason"].to_pylist())
    return Produced(
        tables=chosen,
        checks=_honour(spec, [select.counts_reconcile(rollouts, **chosen)]),
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
    messages = run.read(
        "raw_rollouts", "messages", columns=["rollout_id", "role", "kind", "content", "tool_calls"]
    ).filter(pc.field("rollout_id").isin(rollout_ids) & (pc.field("kind") == "action"))
    count = dict.fromkeys(rollout_ids, 0)
    for row in messages.to_pylist():
        calls = json.loads(row["tool_calls"]) if row["tool_calls"] else None
        count[row["rollout_id"]] += len(chat.encode(turn_text(row["content"] or "", calls)))
    return count


@etpi_asset("tito_pairs", checks=PAIRS)
def tito_pairs(run: AssetRun) -> Produced:
    spec: ExperimentSpec = run.spec
    chat, section, kwargs = student_format(spec), spec.pairs, spec.serving.template_kwargs
    by_set: defaultdict[str, list[str]] = defaultdict(list)
    for row in run.read("selected_trajectories", "selected", columns=["rollout_id", "rollout_set"]).to_pylist():
        by_set[row["rollout_set"]].append(row["rollout_id"])
    tasks = {task.task_id: task for task in read_tasks(run.read("tasks", "tasks"))}
    made: dict[str, list[pa.Table]] = {"pairs": [], "dropped": []}
    read: list[pa.Table] = [empty("pairs")]
    written_anew = 0
    offered: list[integrity.TurnKey] = []
    expected: dict[tuple[str, str], Sequence[int]] = {}
    steering: set[str] = set()
    systems: set[str] = set()
    for name in spec.rollout_sets:
        rollout_set: RolloutSetSpec = run.specs.get("rollout_set", name)  # pyright: ignore[reportAssignmentType]
        _same_vocabulary(name, rollout_set, spec)
        tables = {
            table: run.read("raw_rollouts", table, key=name) for table in ("rollouts", "agents", "turns", "messages")
        }
        tools = tool_schemas(rollout_set.agent.tools if section.capture == "native" else section.tools)
        default = _default_prompts(run, rollout_set, tasks, tools, steering)
        agents = list(captured_agents(tables, by_set[name], section, chat, default, kwargs, tools))
        for agent in agents:
            written_anew += not agent.appended
            offered += [(agent.rollout_id, agent.agent_id, turn.turn) for turn in agent.turns]
            wanted = default(agent.facts["task_id"], agent.agent_id)
            if wanted is not None:
                expected[agent.rollout_id, agent.agent_id] = wanted.ids
                systems.update(message["content"] for message in wanted.messages if message["role"] == "system")
        for table, rows in make_pairs(agents, section, chat).items():
            made[table].append(rows)
        if section.capture == "retokenised" and _same_form(rollout_set, chat):
            native = section.model_copy(update={"capture": "native"})
            some = _spread(by_set[name], _COMPARED_ROLLOUTS)
            read.append(make_pairs(captured_agents(tables, some, native, chat, default, kwargs), native, chat)["pairs"])
    pairs, dropped = pa.concat_tables(made["pairs"]), pa.concat_tables(made["dropped"])
    checks = [
        integrity.pairs_reconcile(offered, pairs, dropped),
        integrity.capture_not_mixed(pairs, section),
        integrity.history_as_captured(pairs, pa.concat_tables(read), chat),
        integrity.no_think_in_output(pairs, section, chat),
        integrity.no_steering_leak(pairs, Traces.of(sorted(steering), sorted(systems), chat)),
        integrity.prompt_is_default_render(pairs, expected, section, chat),
    ]
    return Produced(
        tables={"pairs": pairs, "dropped": dropped},
        checks=_honour(spec, checks),
        metadata={
            "dropped": dict(Counter(dropped["reason"].to_pylist()).most_common()),
            "prompt_edits": dict(Counter(pairs["prompt_edit"].to_pylist())),
            "think_ids_removed": sum(pairs["think_removed"].to_pylist()),
            "output_tokens": sum(len(ids) for ids in pairs["output_ids"]),
            "chained": len(pairs) - pairs["prefix_turn"].null_count,
            "conversations_the_template_writes_anew": written_anew,
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
        if (PROMPTS / agent.prompt / "steering.md").is_file():
            steering.add(steering_text(agent.prompt, role).strip())
        messages = student_prompt(agent, task, role)
        return FirstPrompt(messages, chat.prompt_ids(messages, tools=tools, **kwargs))

    return default


@etpi_asset("upweighted_dataset", checks=DATASET)
def upweighted_dataset(run: AssetRun) -> Produced:
    spec: ExperimentSpec = run.spec
    pairs, tasks = run.read("tito_pairs", "pairs"), run.read("tasks", "tasks")
    heldout = tasks.filter(pc.field("split") == "heldout")
    weighed = upweight.weigh(pairs, spec.dataset, set(heldout["task_id"].to_pylist()))
    merged = merge.merge(weighed["dataset_rows"], pairs, spec.dataset.max_length)
    rows, dropped, sequences = merged["dataset_rows"], weighed["dropped"], merged["sequences"]
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
    ]
    saved = merge.saving(rows, pairs, sequences)
    return Produced(
        tables={"dataset_rows": rows, "sequences": sequences, "dropped": dropped},
        checks=_honour(spec, checks),
        metadata={
            "rows": dict(Counter(rows["split"].to_pylist())),
            "dropped": dict(Counter(dropped["reason"].to_pylist())),
            "sequences": len(sequences),
            "forking_sequences": sum(len(nodes) > 1 for nodes in sequences["node_starts"]),
            "tokens_saved_by_merging": f"{saved['ratio']:.2f}x",
            "loss_share_by_turn": {str(turn): round(share, 4) for turn, share in gates.loss_shares(rows).items()},
            "label_tokens": sum(rows["output_tokens"].to_pylist()),
        },
        notes={"merging": saved},
    )


def _training_prompts(rows: pa.Table, pairs: pa.Table) -> list[Sequence[int]]:
    """First-turn inputs of the training rows, evenly spread over them."""
    chosen = rows.filter((pc.field("split") == "train") & (pc.field("turn") == 0))["pair_id"].to_pylist()
    names = set(_spread(chosen))
    first = pairs.filter((pc.field("turn") == 0) & pc.field("prefix_turn").is_null())
    return [ids.tolist() for key, ids in iter_prompts(first) if "/".join(map(str, key)) in names]


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
    heldout = dropped.filter(pc.field("reason").isin(["heldout_repo", "heldout_task"]))["rollout_id"].to_pylist()
    used = {*rows["rollout_id"].to_pylist(), *heldout}
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


def _honour(spec: ExperimentSpec, outcomes: Sequence[CheckOutcome]) -> list[CheckOutcome]:
    gates.check_overrides(spec.gates, (*SELECTED, *PAIRS, *DATASET, *PROBES))
    return gates.honour(outcomes, spec.gates)


ASSETS = [selected_trajectories, tito_pairs, upweighted_dataset]
