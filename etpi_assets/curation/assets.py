"""The curation stage as assets: selected_trajectories, tito_pairs, upweighted_dataset."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.agent.tools import tool_schemas
from etpi_assets.asset import AssetRun, Input, Produced, asset
from etpi_assets.checks import judged
from etpi_assets.curation import gates, integrity, joins, lengths, merge, select, upweight
from etpi_assets.curation.captured import COLUMNS
from etpi_assets.curation.dataset_blocks import dataset_builder, plan
from etpi_assets.curation.default_prompt import student_format, student_prompt
from etpi_assets.curation.pair_blocks import (
    label_checks,
    label_syntax,
    of_rollouts,
    pair_builder,
    spread,
    steering_leaks,
)
from etpi_assets.curation.student_form import StudentForm
from etpi_assets.specs.experiment import ExperimentSpec, PairsSection
from etpi_assets.specs.load import SpecError
from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import Family
from etpi_assets.tasks.table import read_tasks
from etpi_assets.trajectories.rollout_checks import merged
from etpi_assets.trajectories.tables import blocks
from etpi_resources.chat.format import TemplateRefuses, same_vocabulary
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.parquet import RowRanges
from etpi_resources.lake.stored import batches, counts, no_rows

_SECONDS_PER_TURN = {"native": 1.5e-4, "retokenised": 2e-3}
"""Estimated seconds of one core for the pair of a turn."""
_SECONDS_PER_ROW = 1.2e-4
"""Estimated seconds of one core for a row of the data set."""
_COMPARED_PROMPTS = 400
"""First-turn prompts of training and of evaluation that are compared; a median needs no more."""


# --- selected_trajectories -------------------------------------------------------------------------------------------


@asset(
    set="experiment",
    group="curation",
    tables=("selected", "dropped"),
    sections=("rollout_sets", "select", "base", "gates.override"),
    versions=("selection",),
    summary="Rejection sampling: the rollouts that train the student, and the dropped ones with reasons.",
)
def selected_trajectories(run: AssetRun, scored_rollouts: Input, raw_rollouts: Input) -> Produced:
    spec: ExperimentSpec = run.spec
    rollouts = raw_rollouts.read("rollouts", columns=select.COLUMNS)
    scores = scored_rollouts.read("scores")
    uncounted = scores.filter(pc.field("output_tokens").is_null())["rollout_id"].to_pylist()
    section, rule = select.resolved(spec.select, rollouts, scores)
    tokens, refused = _count_tokens(run.spec, raw_rollouts, uncounted) if uncounted else ({}, {})
    offered = rollouts.filter((pc.field("origin") == "set") & (pc.field("engine") == "imported"))
    imported = offered["rollout_set"].unique().to_pylist()
    paths = {
        name: of_rollout
        for key in imported if section.duplicates == "drop"
        for block in blocks({t: raw_rollouts.stored(t, key=key) for t in joins.COLUMNS}, joins.COLUMNS)
        for name, of_rollout in joins.paths_of(block).items()
    }  # fmt: skip
    tables = select.select(rollouts, scores, section, tokens, paths, refused)
    selected, dropped = tables["selected"], tables["dropped"]
    run.log(f"{run.label}: {rule.text}")
    reconciled = select.counts_reconcile(rollouts, selected, dropped, rule)
    checks = [reconciled, joins.once_outcome(selected, paths)]
    return Produced(
        tables=tables,
        checks=gates.apply_overrides(checks, spec.gates),
        metadata={
            "selected": len(selected),
            "offered": len(selected) + len(dropped),
            "reward": rule.text,
            "dropped": dict(Counter(reconciled.figures["reasons"]).most_common()),
            "exits": dict(Counter(scores["exit_status"].to_pylist()).most_common()),
            "repos": dict(Counter(selected["repo"].to_pylist())),
            "output_tokens": sum(selected["output_tokens"].to_pylist()),
        },
    )


def _count_tokens(
    spec: ExperimentSpec, raw_rollouts: Input, rollout_ids: Sequence[str]
) -> tuple[dict[str, int], dict[str, str]]:
    """Return the output tokens of rollouts without ids, from their messages in the student's form and tokenizer.

    Also return rollout -> why the student's template refuses one of its turns.
    """
    chat = student_format(spec)
    student = StudentForm(chat)
    tokens, refused = dict.fromkeys(rollout_ids, 0), dict[str, str]()
    columns = ["rollout_id", "role", "kind", "content", "tool_calls"]
    wanted = pc.field("rollout_id").isin(pa.array(list(tokens), pa.string())) & (pc.field("kind") == "action")
    for batch in batches(raw_rollouts.stored("messages"), columns):
        rows = pa.Table.from_batches([batch]).filter(wanted).to_pylist()
        texts = []
        for row in rows:
            calls = json.loads(row["tool_calls"]) if row["tool_calls"] else None
            try:
                texts.append(student.text(student.message(row["content"] or "", calls)))
            except TemplateRefuses as error:
                refused.setdefault(row["rollout_id"], str(error))
                texts.append("")
        for row, ids in zip(rows, chat.encode_all(texts), strict=True):  # a batch is encoded on all cores
            tokens[row["rollout_id"]] += len(ids)
    return tokens, refused


# --- tito_pairs ------------------------------------------------------------------------------------------------------


@asset(
    set="experiment",
    group="curation",
    tables=("pairs", "dropped"),
    sections=(
        "pairs",
        "base",
        "serving.template_kwargs",
        "serving.options.tool-call-parser",
        "gates.override",
        "rollout_sets.agent",
        "rollout_sets.options.tokenizer",
    ),
    versions=("pairs", "chat", "prompts", "tasks"),
    summary="Token-in/token-out pairs, one per assistant turn: no steering, thoughts optionally, other ids unchanged.",
)
def tito_pairs(run: AssetRun, selected_trajectories: Input, raw_rollouts: Input, tasks: Input) -> Produced:
    spec: ExperimentSpec = run.spec
    by_id = {task.task_id: task for task in read_tasks(tasks.read("tasks"))}
    selected = selected_trajectories.read("selected", columns=["rollout_id", "rollout_set", "turns", "repeated"])
    section = _with_capture(run, raw_rollouts)

    def parts() -> Iterator[Mapping[str, pa.Table]]:
        for name in spec.rollout_sets:
            rollout_set = run.specs.get("rollout_set", name)
            chosen = selected.filter(pc.field("rollout_set") == name)
            rollout_ids = chosen["rollout_id"].to_pylist()
            shared = chosen.filter(pc.field("repeated").is_valid()).to_pylist()
            repeated = {row["rollout_id"]: json.loads(row["repeated"]) for row in shared}
            factory = partial(pair_builder, run.specs, run.key, rollout_set, rollout_ids, by_id, section, repeated)
            turns = pc.sum(chosen["turns"]).as_py() or 0  # pyright: ignore[reportAttributeAccessIssue]
            blocks_of_set = enumerate(_blocks(raw_rollouts, name, frozenset(rollout_ids)))
            named = ((f"{name}-{number:06}", block) for number, block in blocks_of_set)
            yield from run.parts_of(named, factory, turns * _SECONDS_PER_TURN[section.capture])

    counted = _spooled(run, parts())
    offered = pc.sum(selected["turns"]).as_py() or 0  # pyright: ignore[reportAttributeAccessIssue]
    return _pairs_produced(run, section, counted, offered)


def _blocks(raw_rollouts: Input, rollout_set: str, rollout_ids: frozenset[str]) -> Iterator[dict[str, pa.Table]]:
    """Yield the tables that pairs are built from, a few of those rollouts at a time; at least one block."""
    tables = {table: raw_rollouts.stored(table, key=rollout_set) for table in COLUMNS}
    empty_block = {name: no_rows(table, COLUMNS[name]) for name, table in tables.items()}
    return (of_rollouts(block, rollout_ids) for block in chain([empty_block], blocks(tables, COLUMNS)))


def _pairs_produced(run: AssetRun, section: PairsSection, counted: Mapping[str, Any], offered: int) -> Produced:
    spec: ExperimentSpec = run.spec
    chat, pairs = student_format(spec), run.spooled("pairs")
    checks = [
        label_syntax(spec).outcome(counted["syntax"]),
        *label_checks(counted, section, chat, spec.gates),
        integrity.reconcile_outcome("pairs_reconcile", counted["reconcile"], offered),
        integrity.capture_outcome(Counter(counted["captures"]), section),
        judged("history_as_captured", counted["history"]),
        integrity.think_outcome(counted["think"], section, chat),
        judged("no_steering_leak", steering_leaks(pairs, counted, spec)),
        judged("prompt_is_default_render", counted["default_render"]),
    ]
    return Produced(
        tables={"pairs": pairs, "dropped": run.spooled("dropped")},
        checks=gates.apply_overrides(checks, spec.gates),
        metadata={
            "capture": section.capture,
            "dropped": dict(Counter(counted["reconcile"]["reasons"]).most_common()),
            "conversations_rendered_per_prompt": counted["rerendered"],
        },
    )


def _with_capture(run: AssetRun, raw_rollouts: Input) -> PairsSection:
    """Return the spec's section with a capture: for "auto", native if all turns have ids of the student's vocabulary.

    Raises:
        SpecError: the spec's capture is native, and a set's ids are of another vocabulary, which no check could notice.
    """
    spec: ExperimentSpec = run.spec
    if spec.pairs.capture == "retokenised":
        return spec.pairs
    captured = {name: _captured(run.specs.get("rollout_set", name)) for name in spec.rollout_sets}
    student = spec.base.tokenizer
    foreign = next((name for name, of_set in captured.items() if of_set and not same_vocabulary(of_set, student)), None)
    if spec.pairs.capture == "native":
        if foreign:
            raise SpecError(
                f"rollout set {foreign!r} was captured in the ids of {captured[foreign]!r}, the student reads "
                f'{student!r}: set pairs.capture = "retokenised", or use a base with that tokenizer'
            )
        return spec.pairs
    native = not spec.pairs.tools and foreign is None
    native = native and all(set(counts(raw_rollouts.stored("turns", key=n), "capture")) <= {"native"} for n in captured)
    capture = "native" if native else "retokenised"
    run.log(f'{run.label}: pairs.capture = "auto" is {capture} here')
    return spec.pairs.model_copy(update={"capture": capture})


def _captured(rollout_set: RolloutSetSpec) -> str | None:
    """Return the tokenizer of a set's ids; None for imported ids whose tokenizer the spec does not name."""
    return rollout_set.options.get("tokenizer") if rollout_set.kind == "imported" else rollout_set.agent.tokenizer


# --- upweighted_dataset ----------------------------------------------------------------------------------------------


@asset(
    set="experiment",
    group="curation",
    tables=("dataset_rows", "sequences", "dropped"),
    sections=(
        "dataset",
        "gates",
        "base",
        "serving.template_kwargs",
        "serving.untrained_kwargs",
        "evaluate.suite",
        "evaluate.split",
        "evaluate.agent.prompt",
        "evaluate.agent.tools",
    ),
    versions=("dataset", "chat", "prompts", "tasks"),
    summary="Weighted rows, split by repository and merged into the sequences that the trainer reads.",
)
def upweighted_dataset(
    run: AssetRun,
    tito_pairs: Input,
    selected_trajectories: Input,
    scored_rollouts: Input,
    raw_rollouts: Input,
    tasks: Input,
) -> Produced:
    spec: ExperimentSpec = run.spec
    pairs, task_rows = tito_pairs.stored("pairs"), tasks.read("tasks")
    heldout = frozenset(task_rows.filter(pc.field("split") == "heldout")["task_id"].to_pylist())
    chat = student_format(spec)
    context = lengths.base_context(spec.base, chat)
    limit = lengths.row_limit(spec.dataset, spec.base, context)
    rule = upweight.RowRule(spec.dataset, heldout, limit)
    planned = plan(pairs, rule)
    most = lengths.merge_limit(spec.dataset, limit, planned.longest)
    factory = partial(dataset_builder, pairs, rule, planned.validate, most)
    named = ((f"{block.start:010}", block) for block in planned.blocks)
    figures = _spooled(run, run.parts_of(named, factory, len(pairs) * _SECONDS_PER_ROW))
    tables = {name: run.spooled(name) for name in run.node.tables}
    inputs = tito_pairs, selected_trajectories, scored_rollouts, raw_rollouts
    checks = _dataset_checks(run, task_rows, heldout, figures, *inputs)
    measured = lengths.totals(figures["lengths"], context, limit)
    run.log(f"{run.label}: {lengths.summary(measured)}")
    savings = merge.savings(figures["lengths"]["rows"], figures["sequence_tokens"])
    return Produced(
        tables=tables,
        checks=gates.apply_overrides(checks, spec.gates),
        metadata={
            "rows": figures["splits"],
            "dropped": figures["reconcile"]["reasons"],
            "sequences": len(tables["sequences"]),
            "lengths": lengths.summary(measured),
            "tokens_saved_by_merging": f"{savings['ratio']:.2f}x",
            "loss_share_by_turn": {str(turn): round(n, 4) for turn, n in upweight.shares(figures["loss"]).items()},
            "label_tokens": figures["lengths"]["outputs"],
        },
        notes={"merging": savings, "lengths": measured},
    )


def _spooled(run: AssetRun, parts: Iterable[Mapping[str, pa.Table]]) -> dict[str, Any]:
    """Write the asset's tables of each part to the version's files; return the sum of the parts' figures."""
    return merged(json.loads(text) for part in run.spool_parts(parts) for text in part["figures"]["json"].to_pylist())


def _dataset_checks(
    run: AssetRun,
    tasks: pa.Table,
    heldout_tasks: Collection[str],
    figures: Mapping[str, Any],
    tito_pairs: Input,
    selected_trajectories: Input,
    scored_rollouts: Input,
    raw_rollouts: Input,
) -> list[CheckOutcome]:
    spec: ExperimentSpec = run.spec
    selected = selected_trajectories.read("selected", columns=["rollout_id", "task_id"])
    agent_scores = scored_rollouts.read("agent_scores", columns=gates.AGENT_COLUMNS)
    rollouts = raw_rollouts.read("rollouts", columns=["rollout_id", "rollout_set", "task_id", "teacher", "source"])
    scores = scored_rollouts.read("scores", columns=gates.SCORE_COLUMNS)
    of_code = {name for name in tasks["suite"].unique().to_pylist() if not _family(run, name).repo_is_source}
    heldout_repos = integrity.repositories_held_out(tasks, of_code) | {*spec.dataset.heldout_repos}
    training, evaluation = _training_prompts(tito_pairs, figures["first_turns"]), _evaluation_prompts(run, tasks)
    columns = ["source", "row", "reason"]
    quarantined = {
        ref.key: gates.lost_runs(raw_rollouts.read("quarantined", ref.key, columns)) for ref in raw_rollouts.refs()
    }
    inputs = Counter(rollouts["rollout_set"].to_pylist()) + Counter({key: len(q) for key, q in quarantined.items()})
    lost_inputs = _lost_inputs(
        quarantined, rollouts, scores, selected, selected_trajectories.read("dropped"), figures["used"]
    )
    lost_turns = merged([gates.lost_figures(tito_pairs.stored("dropped")), figures["lost"]])
    rows = figures["reconcile"]["kept"]
    return [
        integrity.reconcile_outcome(
            "dataset_reconciles",
            figures["reconcile"],
            len(tito_pairs.stored("pairs")),
            figures["splits"].get("train", 0),
        ),
        integrity.validation_outcome(figures["splits"], spec.dataset),
        integrity.label_outcome(figures["labels"]),
        integrity.heldout_outcome(figures["heldout"], heldout_repos, heldout_tasks, spec.dataset.val_by),
        gates.teacher_gate(rollouts, scores, agent_scores, spec.gates),
        gates.loss_share_outcome(upweight.shares(figures["loss"]), spec.gates),
        gates.exposure_outcome(figures["exposure"], spec.gates),
        gates.role_outcome(figures["roles"], spec.gates),
        gates.plan_paths_in_task(selected, agent_scores, _task_texts(run, tasks), spec.gates),
        gates.prompt_length_ratio([len(p) for p in training], [len(p) for p in evaluation], spec.gates),
        gates.template_distance(training, evaluation, spec.gates),
        gates.generation_prompt(training, evaluation, student_format(spec)),
        gates.skip_rate(inputs, lost_inputs, spec.gates),
        gates.lost_outcome(lost_turns, rows, figures["lengths"]["outputs"], spec.gates),
    ]


def _training_prompts(tito_pairs: Input, first_turns: Sequence[int]) -> list[Sequence[int]]:
    """Return first-turn inputs of training rows, evenly spread over them, given the numbers of their pairs."""
    stored = tito_pairs.stored("pairs")
    pairs = RowRanges(stored.name, stored.paths, ["prefix_turn", "suffix_ids"])
    chosen = pairs.take(spread(first_turns, _COMPARED_PROMPTS))
    return chosen.filter(pc.field("prefix_turn").is_null())["suffix_ids"].to_pylist()


def _evaluation_prompts(run: AssetRun, tasks: pa.Table) -> list[Sequence[int]]:
    """Return first-turn prompts of evaluation as serving renders them; none if nothing is evaluated."""
    spec: ExperimentSpec = run.spec
    if spec.evaluate is None:
        return []
    suite = tasks.filter(pc.field("suite") == spec.evaluate.suite)
    family = _family(run, spec.evaluate.suite)
    chat, agent = student_format(spec), spec.evaluate.agent
    tools, kwargs = tool_schemas(agent.tools), spec.serving.served_kwargs()
    agents = [(task, role) for task in read_tasks(suite, spec.evaluate.split) for role in family.roles(task)]
    return [
        chat.prompt_ids(student_prompt(agent, task, role), tools=tools, **kwargs)
        for task, role in spread(agents, _COMPARED_PROMPTS)
    ]


def _task_texts(run: AssetRun, tasks: pa.Table) -> dict[str, str]:
    """Return task id -> its instruction, with the entities that its family knows."""
    return {
        task.task_id: "\n".join([task.instruction, *_family(run, task.suite).entities(task)])
        for task in read_tasks(tasks)
    }


def _family(run: AssetRun, suite: str) -> Family:
    return load_family(run.specs.suites[suite].family)


def _lost_inputs(
    quarantined: Mapping[str, pa.Table],
    rollouts: pa.Table,
    scores: pa.Table,
    selected: pa.Table,
    dropped: pa.Table,
    used: Sequence[str],
) -> list[tuple[str, str, str]]:
    """Return (rollout set, name, reason) of every input that neither trains nor was dropped by selection.

    Args:
        quarantined: rollout set -> its quarantined runs.
        dropped: the rollouts that selection dropped, of which those that the template refuses are lost too.
        used: the rollouts with rows, or with turns that are held out.
    """
    inputs = [
        (key, row["source"] if row["row"] is None else f"{row['source']}#{row['row']}", f"quarantined: {row['reason']}")
        for key, rows in quarantined.items()
        for row in rows.to_pylist()
    ]
    names = {
        row["rollout_id"]: (row["rollout_set"], row["source"] or f"{row['task_id']} ({row['rollout_id'][:8]})")
        for row in rollouts.to_pylist()
    }
    lost = dict.fromkeys(set(selected["rollout_id"].to_pylist()).difference(used), "no turn is left")
    for row in scores.to_pylist():
        if row["infrastructure_error"]:
            lost[row["rollout_id"]] = f"infrastructure: {row['exit_status']}"
    for row in dropped.filter(pc.field("reason") == select.REFUSED).to_pylist():
        lost[row["rollout_id"]] = f"{select.REFUSED}: {row['detail']}"
    return inputs + sorted((*names[rollout_id], reason) for rollout_id, reason in lost.items())
