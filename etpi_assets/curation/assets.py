"""The curation stage as assets: selected_trajectories, tito_pairs, upweighted_dataset."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.agent.tools import tool_schemas
from etpi_assets.curation import gates, integrity, lengths, merge, select, upweight
from etpi_assets.curation.captured import COLUMNS
from etpi_assets.curation.default_prompt import student_format, student_prompt
from etpi_assets.curation.pair_blocks import PairRecipe, PairReferences, label_syntax, of_rollouts, spread
from etpi_assets.curation.steering import SteeringNgrams
from etpi_assets.curation.student_form import StudentForm
from etpi_assets.materialize import AssetRun, Produced, etpi_asset
from etpi_assets.specs.check_names import DATASET, OVERRIDABLE, PAIRS, SELECTED
from etpi_assets.specs.experiment import ExperimentSpec, PairsSection
from etpi_assets.specs.load import SpecError
from etpi_assets.specs.rollout_set import RolloutSetSpec
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.table import read_tasks
from etpi_assets.trajectories.blocks import blocks
from etpi_resources.lake.checks import CheckOutcome
from etpi_resources.lake.schemas import empty
from etpi_resources.lake.stored import Stored, batches, columns_of, counts

_SECONDS_PER_TURN = {"native": 1.5e-4, "retokenised": 2e-3}
"""What the pair of a turn takes one core, roughly."""
_COMPARED_PROMPTS = 400
"""First-turn prompts of training and of evaluation that are compared; a median needs no more."""


# --- selected_trajectories -------------------------------------------------------------------------------------------


@etpi_asset("selected_trajectories", checks=SELECTED)
def selected_trajectories(run: AssetRun) -> Produced:
    spec: ExperimentSpec = run.spec
    rollouts = run.read("raw_rollouts", "rollouts", columns=select.COLUMNS)
    scores = run.read("scored_rollouts", "scores")
    uncounted = scores.filter(pc.field("output_tokens").is_null())["rollout_id"].to_pylist()
    section, rule = select.resolved(spec.select, rollouts, scores)
    tables = select.select(rollouts, scores, section, _count_tokens(run, uncounted) if uncounted else None)
    selected, dropped = tables["selected"], tables["dropped"]
    run.log(f"{run.label}: {rule.text}")
    reasons = Counter(dropped["reason"].to_pylist())
    return Produced(
        tables=tables,
        checks=_with_overrides(spec, [select.counts_reconcile(rollouts, selected, dropped, rule)]),
        metadata={
            "selected": len(selected),
            "offered": len(selected) + len(dropped),
            "reward": rule.text,
            "dropped": dict(reasons.most_common()),
            "repos": dict(Counter(selected["repo"].to_pylist())),
            "output_tokens": sum(selected["output_tokens"].to_pylist()),
        },
    )


def _count_tokens(run: AssetRun, rollout_ids: Sequence[str]) -> dict[str, int]:
    """Return the output tokens of rollouts without ids, from their messages in the student's form and tokenizer."""
    chat = student_format(run.spec)
    student = StudentForm(chat)
    tokens = dict.fromkeys(rollout_ids, 0)
    columns = ["rollout_id", "role", "kind", "content", "tool_calls"]
    wanted = pc.field("rollout_id").isin(pa.array(list(tokens), pa.string())) & (pc.field("kind") == "action")
    for batch in batches(run.stored("raw_rollouts", "messages"), columns):
        rows = pa.Table.from_batches([batch]).filter(wanted).to_pylist()
        calls = [json.loads(row["tool_calls"]) if row["tool_calls"] else None for row in rows]
        texts = [student.text(student.message(row["content"] or "", c)) for row, c in zip(rows, calls, strict=True)]
        for row, ids in zip(rows, chat.encode_all(texts), strict=True):  # a batch is encoded on all cores
            tokens[row["rollout_id"]] += len(ids)
    return tokens


# --- tito_pairs ------------------------------------------------------------------------------------------------------


@etpi_asset("tito_pairs", checks=PAIRS)
def tito_pairs(run: AssetRun) -> Produced:
    spec: ExperimentSpec = run.spec
    tasks = {task.task_id: task for task in read_tasks(run.read("tasks", "tasks"))}
    selected = run.read("selected_trajectories", "selected", columns=["rollout_id", "rollout_set", "turns"])
    dropped: list[pa.Table] = [empty("dropped")]
    section = _with_capture(run)
    references = PairReferences()
    syntax = label_syntax(spec)
    with run.spool("pairs") as spool:
        for name in spec.rollout_sets:
            rollout_set: RolloutSetSpec = run.specs.get("rollout_set", name)  # pyright: ignore[reportAssignmentType]
            _require_same_vocabulary(name, rollout_set, spec, section)
            chosen = selected.filter(pc.field("rollout_set") == name)
            rollout_ids = chosen["rollout_id"].to_pylist()
            recipe = PairRecipe(run.specs, run.key, rollout_set, rollout_ids, tasks, section)
            turns = pc.sum(chosen["turns"]).as_py() or 0  # pyright: ignore[reportAttributeAccessIssue]
            blocks_of_set = enumerate(_blocks(run, name, frozenset(rollout_ids)))
            named = ((f"{name}-{number:06}", block) for number, block in blocks_of_set)
            for part in run.parts_of(named, recipe, turns * _SECONDS_PER_TURN[section.capture]):
                references.add(part)
                spool.add(part["pairs"])
                dropped.append(part["dropped"])
    return _pairs_produced(run, section, references, syntax.outcome(references.syntax), pa.concat_tables(dropped))


def _blocks(run: AssetRun, rollout_set: str, rollout_ids: frozenset[str]) -> Iterator[dict[str, pa.Table]]:
    """Yield the tables that pairs are built from, a few of those rollouts at a time."""
    tables = {table: run.stored("raw_rollouts", table, key=rollout_set) for table in COLUMNS}
    return (of_rollouts(block, rollout_ids) for block in blocks(tables, COLUMNS))


def _pairs_produced(
    run: AssetRun, section: PairsSection, references: PairReferences, syntax: CheckOutcome, dropped: pa.Table
) -> Produced:
    spec: ExperimentSpec = run.spec
    chat, pairs = student_format(spec), run.spooled("pairs")
    steering = SteeringNgrams.build(sorted(references.steering), sorted(references.systems), chat)
    checks = [
        syntax,
        integrity.pairs_reconcile(pa.concat_tables(references.turns), pairs, dropped),
        integrity.capture_not_mixed(pairs, section),
        integrity.history_as_captured(pairs, pa.concat_tables(references.captured), chat),
        integrity.no_think_in_output(pairs, section, chat),
        integrity.no_steering_leak(pairs, steering),
        integrity.prompt_is_default_render(pairs, references.default_prompts, section, chat),
    ]
    narrow = columns_of(pairs, ["think_removed", "prefix_turn"])
    return Produced(
        tables={"pairs": pairs, "dropped": dropped},
        checks=_with_overrides(spec, checks),
        metadata={
            "capture": section.capture,
            "dropped": dict(counts(dropped, "reason").most_common()),
            "prompt_edits": dict(counts(pairs, "prompt_edit")),
            "think_ids_removed": pc.sum(narrow["think_removed"]).as_py() or 0,  # pyright: ignore[reportAttributeAccessIssue]
            "output_tokens": sum(len(batch.column(0).flatten()) for batch in batches(pairs, ["output_ids"])),
            "chained": len(narrow) - narrow["prefix_turn"].null_count,
            "conversations_rendered_per_prompt": references.rerendered,
        },
    )


def _with_capture(run: AssetRun) -> PairsSection:
    """Return the spec's section with a capture: for "auto", native if all turns have ids of the student's tokenizer."""
    spec: ExperimentSpec = run.spec
    if spec.pairs.capture != "auto":
        return spec.pairs
    native = not spec.pairs.tools
    for name in spec.rollout_sets:
        rollout_set: RolloutSetSpec = run.specs.get("rollout_set", name)  # pyright: ignore[reportAssignmentType]
        captures = counts(run.stored("raw_rollouts", "turns", key=name), "capture")
        native = native and set(captures) <= {"native"} and not _foreign(rollout_set, spec)
    capture = "native" if native else "retokenised"
    run.log(f'{run.label}: pairs.capture = "auto" is {capture} here')
    return spec.pairs.model_copy(update={"capture": capture})


def _foreign(rollout_set: RolloutSetSpec, spec: ExperimentSpec) -> bool:
    """Return whether a set's ids are known to be of another tokenizer than the student's."""
    return rollout_set.kind != "imported" and rollout_set.agent.tokenizer != spec.base.tokenizer


def _require_same_vocabulary(
    name: str, rollout_set: RolloutSetSpec, spec: ExperimentSpec, section: PairsSection
) -> None:
    """Raise SpecError if native ids are of another tokenizer than the student's, which no check of ids could notice."""
    captured = rollout_set.agent.tokenizer
    if section.capture == "native" and _foreign(rollout_set, spec):
        raise SpecError(
            f"rollout set {name!r} was captured in the ids of {captured!r}, the student reads {spec.base.tokenizer!r}: "
            'set pairs.capture = "retokenised", or use a base with that tokenizer'
        )


# --- upweighted_dataset ----------------------------------------------------------------------------------------------


@etpi_asset("upweighted_dataset", checks=DATASET)
def upweighted_dataset(run: AssetRun) -> Produced:
    spec: ExperimentSpec = run.spec
    pairs, tasks = run.stored("tito_pairs", "pairs"), run.read("tasks", "tasks")
    heldout = tasks.filter(pc.field("split") == "heldout")
    chat = student_format(spec)
    shape = lengths.base_shape(spec.base, chat)
    limit = lengths.row_limit(spec.dataset, spec.base, shape)
    weighed = upweight.weigh(pairs, spec.dataset, set(heldout["task_id"].to_pylist()), limit)
    dropped = weighed["dropped"]
    row_lengths = lengths.row_lengths(weighed["dataset_rows"], pairs)
    most = lengths.merge_limit(spec.dataset, limit, int(row_lengths.max(initial=0)))
    with run.spool("sequences") as spool:
        rows = merge.merge(weighed["dataset_rows"], pairs, most, spool.add, merged=spec.dataset.merge)
    sequences = run.spooled("sequences")
    cost = lengths.costs(rows, row_lengths, sequences, shape, chat, limit)
    run.log(f"{run.label}: {lengths.summary(cost)}")
    savings = merge.merge_savings(rows, pairs, sequences)
    loss_share = upweight.loss_share_by_turn(rows)
    return Produced(
        tables={"dataset_rows": rows, "sequences": sequences, "dropped": dropped},
        checks=_with_overrides(spec, _dataset_checks(run, tasks, rows, sequences, dropped)),
        metadata={
            "rows": dict(counts(rows, "split")),
            "dropped": dict(counts(dropped, "reason")),
            "sequences": len(sequences),
            "forking_sequences": merge.forking(sequences),
            "lengths": lengths.summary(cost),
            "memory_formula": lengths.FORMULA,
            "tokens_saved_by_merging": f"{savings['ratio']:.2f}x",
            "loss_share_by_turn": {str(turn): round(share, 4) for turn, share in loss_share.items()},
            "label_tokens": pc.sum(rows["output_tokens"]).as_py() or 0,  # pyright: ignore[reportAttributeAccessIssue]
        },
        notes={"merging": savings, "lengths": cost},
    )


def _dataset_checks(
    run: AssetRun, tasks: pa.Table, rows: pa.Table, sequences: Stored, dropped: pa.Table
) -> list[CheckOutcome]:
    spec: ExperimentSpec = run.spec
    pairs = run.stored("tito_pairs", "pairs")
    selected = run.read("selected_trajectories", "selected")
    agent_scores = run.read("scored_rollouts", "agent_scores")
    rollouts = run.read("raw_rollouts", "rollouts", columns=["rollout_id", "task_id", "source"])
    scores = run.read("scored_rollouts", "scores")
    heldout = tasks.filter(pc.field("split") == "heldout")
    # A repository in both splits is split by time (`split_by_repo`); of it only the held-out tasks are kept out.
    shared = set(tasks.filter(pc.field("split") == "train")["repo"].to_pylist())
    heldout_repos = {*heldout["repo"].to_pylist()} - shared | {*spec.dataset.heldout_repos}
    training, evaluation = _training_prompts(rows, pairs), _evaluation_prompts(run, tasks)
    inputs = len(rollouts) + len(run.read("raw_rollouts", "quarantined", columns=["source"]))
    lost = _lost_inputs(run, rollouts, scores, selected, rows, dropped)
    return [
        integrity.dataset_reconciles(pairs, rows, dropped),
        integrity.label_tokens(rows, pairs, sequences),
        integrity.heldout_split(rows, heldout_repos, set(heldout["task_id"].to_pylist()), spec.dataset.val_by),
        gates.teacher_gate(rollouts, scores, agent_scores, spec.gates),
        gates.turn_loss_share(rows, spec.gates),
        gates.format_exposure(rows, pairs, spec.gates),
        gates.role_balance(rows, pairs, spec.gates),
        gates.plan_paths_in_task(selected, agent_scores, _with_entities(run, tasks), spec.gates),
        gates.prompt_length_ratio([len(p) for p in training], [len(p) for p in evaluation], spec.gates),
        gates.template_distance(training, evaluation, spec.gates),
        gates.generation_prompt(training, evaluation, student_format(spec)),
        gates.skip_rate(inputs, lost, spec.gates),
        gates.turns_lost(rows, run.read("tito_pairs", "dropped"), dropped, spec.gates),
    ]


def _training_prompts(rows: pa.Table, pairs: Stored) -> list[Sequence[int]]:
    """Return first-turn inputs of the training rows, evenly spread over them."""
    first_turns = rows.filter((pc.field("split") == "train") & (pc.field("turn") == 0))["pair_id"].to_pylist()
    chosen = set(spread(first_turns, _COMPARED_PROMPTS))
    columns = ["pair_id", "turn", "prefix_turn", "suffix_ids"]
    parts = (batch.filter(batch["turn"].to_numpy() == 0) for batch in batches(pairs, columns))
    return [
        ids.values.to_numpy().tolist()
        for part in parts
        for name, prefix, ids in zip(part["pair_id"], part["prefix_turn"], part["suffix_ids"], strict=True)
        if name.as_py() in chosen and not prefix.is_valid
    ]


def _evaluation_prompts(run: AssetRun, tasks: pa.Table) -> list[Sequence[int]]:
    """Return first-turn prompts of evaluation as serving renders them; none if nothing is evaluated."""
    spec: ExperimentSpec = run.spec
    if spec.evaluate is None:
        return []
    suite = tasks.filter(pc.field("suite") == spec.evaluate.suite)
    family = load_family(run.specs.suites[spec.evaluate.suite].family)
    chat, agent = student_format(spec), spec.evaluate.agent
    tools, kwargs = tool_schemas(agent.tools), spec.serving.served_kwargs()
    agents = [(task, role) for task in read_tasks(suite, spec.evaluate.split) for role in family.roles(task)]
    return [
        chat.prompt_ids(student_prompt(agent, task, role), tools=tools, **kwargs)
        for task, role in spread(agents, _COMPARED_PROMPTS)
    ]


def _with_entities(run: AssetRun, tasks: pa.Table) -> pa.Table:
    """Return the tasks with the entities that their family knows appended to their instruction."""
    texts = []
    for task in read_tasks(tasks):
        entities = load_family(run.specs.suites[task.suite].family).entities(task)
        texts.append("\n".join([task.instruction, *entities]))
    index = tasks.schema.get_field_index("instruction")
    return tasks.set_column(index, tasks.schema.field(index), pa.array(texts, pa.string()))


def _lost_inputs(
    run: AssetRun, rollouts: pa.Table, scores: pa.Table, selected: pa.Table, rows: pa.Table, dropped: pa.Table
) -> dict[str, str]:
    """Return name -> reason of every input that was lost before training, other than by selection."""
    lost = {
        row["source"]: f"quarantined: {row['reason']}"
        for row in run.read("raw_rollouts", "quarantined", columns=["source", "reason"]).to_pylist()
    }
    names = {
        row["rollout_id"]: row["source"] or f"{row['task_id']} ({row['rollout_id'][:8]})"
        for row in rollouts.to_pylist()
    }
    for row in scores.to_pylist():
        if row["infrastructure_error"]:
            lost[names[row["rollout_id"]]] = f"infrastructure: {row['exit_status']}"
    heldout = dropped.filter(pc.field("reason").isin(["heldout_repo", "heldout_task"]))
    used = {name for table in (rows, heldout) for name in table["rollout_id"].unique().to_pylist()}
    for rollout_id in selected["rollout_id"].to_pylist():
        if rollout_id not in used:
            lost[names[rollout_id]] = "no turn is left"
    return lost


# --- common ----------------------------------------------------------------------------------------------------------


def _with_overrides(spec: ExperimentSpec, outcomes: Sequence[CheckOutcome]) -> list[CheckOutcome]:
    gates.validate_overrides(spec.gates, OVERRIDABLE)
    return gates.apply_overrides(outcomes, spec.gates)


ASSETS = [selected_trajectories, tito_pairs, upweighted_dataset]
