"""The assets of the evaluation stage: serving_probe, eval_rollouts and eval_metrics."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from etpi_assets.agent.loop import RolloutRuntime
from etpi_assets.asset import AssetRun, Input, Produced, asset
from etpi_assets.checks import outcome
from etpi_assets.curation.gates import apply_overrides
from etpi_assets.evaluation import blame as blaming
from etpi_assets.evaluation import metrics, probes
from etpi_assets.evaluation.probe_plan import (
    ExpectedServing,
    ProbePlan,
    PromptRenderer,
    probe_final,
    probe_intermediate,
)
from etpi_assets.evaluation.rollouts import (
    checkpoint_rows,
    conditions,
    every_condition_ran,
    harness_as_trained,
    infrastructure_held,
    roll_out,
)
from etpi_assets.planning.versions import judge_of
from etpi_assets.resources import serving_kind
from etpi_assets.scoring.behaviours import ScoringOptions, every_rollout_scored, score
from etpi_assets.scoring.judging import Judging, one_judge
from etpi_assets.scoring.structure import structure_of
from etpi_assets.specs.experiment import BlameSection, EvaluateSection, ExperimentSpec
from etpi_assets.specs.rollout_set import AgentSection
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.proofs import Proving
from etpi_assets.tasks.table import read_tasks, rejected_table
from etpi_assets.training import sft
from etpi_assets.trajectories.records import RolloutRecord
from etpi_assets.trajectories.rollout_checks import budget_exhausted, tasks_as_asked
from etpi_assets.trajectories.tables import to_tables
from etpi_resources.chat.format import ChatFormat, load_chat_format
from etpi_resources.checkpoints import HUB, PACKAGE, checkpoint_folder
from etpi_resources.engines.serving import Checkpoint, Serving
from etpi_resources.lake.lake import Lake, LakeError
from etpi_resources.lake.older_names import older_folders
from etpi_resources.lake.schemas import empty, from_rows
from etpi_resources.trainers.contracts import (
    BlameWorkerConfig,
    BlameWorkerResult,
    Tracker,
    TrackerWorkerConfig,
    TrackerWorkerResult,
)
from etpi_resources.trainers.pipes import run_worker
from etpi_resources.trainers.trackers import tracking_of
from etpi_resources.trainers.workers.tracker_worker import MODULE

NOTHING = "the experiment trains or evaluates nothing"


@asset(
    set="experiment",
    group="serving",
    tables=("probes",),
    sections=("serving", "probe", "evaluate.suite", "evaluate.agent", "gates.override"),
    lock="accelerator",
    versions=("probes", "chat", "parsing", "prompts", "tasks", "engine.{engine}", "family.{family}"),
    summary="Checks of the served model: it differs from the base, reads its training prompts, and its turns parse.",
)
def serving_probe(
    run: AssetRun,
    base_checkpoint: Input,
    sft_checkpoint: Input,
    rl_checkpoint: Input,
    upweighted_dataset: Input,
    tito_pairs: Input,
    tasks: Input,
) -> Produced:
    spec: ExperimentSpec = run.spec
    if not any(row["role"] != "base" for row in _checkpoints(run)):
        return Produced.not_applicable(run.node.name, NOTHING)
    chat = load_chat_format(spec.base.tokenizer, spec.base.chat_template)
    plan = _plan(run, spec, chat, upweighted_dataset, tito_pairs, tasks)
    if not plan.train and not plan.heldout:
        return Produced.not_applicable(run.node.name, "no first turn of the training data has a readable action")
    rows, base_turns = [], None
    with _serving(run, spec) as (serving, checkpoints):
        for checkpoint in checkpoints:
            with serving.engine(checkpoint) as engine:
                if checkpoint.final:
                    expected, is_base = _expected(serving, checkpoint), checkpoint.role == "base"
                    results, base_turns = probe_final(engine, plan, expected, base_turns, trained=not is_base)
                else:
                    results = probe_intermediate(engine, plan)
            step = None if checkpoint.final else checkpoint.step
            rows += [result.row(checkpoint.identity, checkpoint.role, checkpoint.seed, step) for result in results]
    table = from_rows("probes", rows)
    checks = apply_overrides(probes.verdicts(table.to_pylist()), spec.gates)
    return Produced(
        tables={"probes": table}, checks=checks, notes={"serving_engine": serving_kind(spec.serving)}, seeds=spec.seeds
    )


@asset(
    set="experiment",
    group="evaluation",
    tables=("rollouts", "agents", "turns", "messages", "quarantined"),
    sections=("evaluate", "serving"),
    lock="accelerator",
    versions=("evaluation", "rollouts"),
    kept=("{steps}", "{world}", "engine.{engine}", "sandbox.{sandbox}", "family.{family}"),
    summary="Held-out rollouts of the base, the fine-tuned and the reinforced checkpoints.",
)
def eval_rollouts(
    run: AssetRun,
    serving_probe: Input,
    base_checkpoint: Input,
    sft_checkpoint: Input,
    rl_checkpoint: Input,
    tasks: Input,
) -> Produced:
    spec: ExperimentSpec = run.spec
    if spec.evaluate is None:
        return Produced.not_applicable(run.node.name, NOTHING)
    section = spec.evaluate
    served = [(row["role"], row["seed"]) for row in _checkpoints(run) if row["final"] and row["role"] in section.roles]
    if not served:
        return Produced.not_applicable(run.node.name, NOTHING)
    proving = Proving(
        run, section.suite, read_tasks(run.read("tasks", "tasks", section.suite), section.split), section.tasks
    )
    planned = [(*c, x) for c in served for x in conditions(section, c[0])]
    chat = load_chat_format(spec.base.tokenizer, spec.base.chat_template)
    records = _roll_out(run, spec, section, len(planned) * proving.expected, proving, chat)
    tables = to_tables(records, chat.decode)
    tables["quarantined"] = rejected_table(proving.rejected, run.node.name)
    count = len(proving.tasks)
    expected = {(role, seed, x.decoding, x.sample_seed): count for role, seed, x in planned}
    return Produced(
        tables=tables,
        checks=(
            every_condition_ran(tables["rollouts"], expected),
            infrastructure_held(tables["rollouts"]),
            harness_as_trained(
                section.agent, (run.specs.rollout_sets[name] for name in spec.rollout_sets), spec.rl.acting
            ),
            budget_exhausted(_exits(tables["rollouts"]), "evaluate.agent.max_steps, max_model_len or max_tokens"),
            tasks_as_asked(
                section.tasks if "tasks" in section.model_fields_set else None,
                count,
                section.split,
                len(proving.rejected),
            ),
        ),
        metadata={"exits": dict(Counter(tables["agents"]["exit_status"].to_pylist()))},
        notes={"serving_engine": serving_kind(spec.serving)},
        seeds=section.sample_seeds,
    )


def _exits(rollouts: pa.Table) -> dict[str, dict[str, int]]:
    """Return the exit statuses of each checkpoint's rollouts, with their numbers."""
    exits: dict[str, dict[str, int]] = {}
    for row in rollouts.group_by(["checkpoint_role", "exit_status"]).aggregate([([], "count_all")]).to_pylist():
        exits.setdefault(row["checkpoint_role"], {})[row["exit_status"]] = row["count_all"]
    return exits


def _roll_out(
    run: AssetRun, spec: ExperimentSpec, section: EvaluateSection, rollouts: int, tasks: Proving, chat: ChatFormat
) -> list[RolloutRecord]:
    """Roll out every checkpoint under every condition on the tasks."""
    journals = run.lake.scratch(f"evaluations/{run.stored_name}")
    older = older_folders(journals.parent) if run.reuses_older else []
    name, sandboxes = run.specs.suites[tasks.suite].family, run.resources.sandboxes(spec.serving.sandbox)
    family, judge, kwargs = load_family(name), judge_of(name), spec.serving.served_kwargs()
    records = []
    with (
        run.progress("held-out rollouts", rollouts) as progress,
        _serving(run, spec, lambda row: row["final"] and row["role"] in section.roles) as (serving, evaluated),
    ):
        for first in range(0, len(evaluated), serving.at_once):
            with ExitStack() as stack:
                served = []
                for checkpoint in evaluated[first : first + serving.at_once]:
                    engine = stack.enter_context(serving.engine(checkpoint))
                    runtime = RolloutRuntime(family, engine, sandboxes, chat, kwargs, judge)
                    served.append((checkpoint, runtime, conditions(section, checkpoint.role)))
                advance, log = progress.advance, run.log
                records += roll_out(served, tasks, journals, older, experiment=run.key, advance=advance, log=log)
    return records


@asset(
    set="experiment",
    group="evaluation",
    tables=("metrics", "scores", "agent_scores", "turn_scores", "verdicts"),
    sections=("metrics", "evaluate.agent.grammar", "evaluate.agent.tools", "rollout_sets.agent.grammar"),
    across_seams=True,
    versions=("scoring", "metrics", "tasks", "family.{family}", "judge", "judge.{family}"),
    summary="Held-out metrics with n and 95 % intervals clustered by pair, next to the teacher's.",
)
def eval_metrics(run: AssetRun, eval_rollouts: Input, scored_rollouts: Input, tasks: Input) -> Produced:
    spec: ExperimentSpec = run.spec
    rollouts, agents = eval_rollouts.read("rollouts"), eval_rollouts.read("agents")
    section, evaluate = spec.metrics.scoring, spec.evaluate
    trained_on = [run.specs.rollout_sets[name].agent for name in spec.rollout_sets]
    options = ScoringOptions(
        section,
        entities=_entities(run, tasks),
        structure=structure_of(section, [evaluate.agent, *trained_on]) if evaluate else None,
        tools=bool(evaluate and evaluate.agent.tools),
    )
    turns, messages = eval_rollouts.read("turns"), eval_rollouts.read("messages")
    judged = judging(run, eval_rollouts).judged(read_tasks(tasks.read("tasks", key=evaluate.suite)) if evaluate else ())
    rollouts, verdicts = judged.of(rollouts)
    scored = score(rollouts, agents, turns, tasks.read("tasks"), options, messages)
    teacher = metrics.teacher_of(scored_rollouts.read("scores"), scored_rollouts.read("agent_scores"), run.key)
    student = metrics.measure(rollouts, scored["scores"], scored["agent_scores"], experiment=run.key)
    table = pa.concat_tables([student, teacher])
    report_metrics(run.lake, run.key, spec.train.report_to, table, run.log)
    return Produced(
        tables={"metrics": table, "verdicts": verdicts, **scored},
        checks=(
            every_rollout_scored(rollouts, agents, scored["scores"], scored["agent_scores"]),
            one_judge(verdicts, judged),
            *metrics.threshold_checks(table, spec.metrics, ("sft", "rl")),
        ),
        notes=judged.notes(),
        metadata={"rollouts": rollouts.num_rows},
    )


def judging(run: AssetRun, eval_rollouts: Input) -> Judging:
    """Return what judges an experiment's held-out rollouts again."""
    spec, evaluate = run.spec, run.spec.evaluate
    chat = partial(load_chat_format, spec.base.tokenizer, spec.base.chat_template)
    suite, agent = (evaluate.suite, evaluate.agent) if evaluate else (None, AgentSection())
    return Judging(run, eval_rollouts, suite, spec.serving.sandbox, agent, chat)


@asset(
    set="experiment",
    group="evaluation",
    tables=("blame", "blame_tasks"),
    sections=("blame", "seeds", "requires"),
    lock="accelerator",
    versions=("blame",),
    summary="How much each training row raised or lowered a held-out metric, token by token, by gradients.",
)
def blame(
    run: AssetRun,
    base_checkpoint: Input,
    sft_checkpoint: Input,
    upweighted_dataset: Input,
    eval_rollouts: Input,
    eval_metrics: Input,
) -> Produced:
    spec: ExperimentSpec = run.spec
    if (section := spec.blame) is None:
        return Produced.not_applicable(run.node.name, "the spec has no section [blame]")
    rollouts, scores = eval_rollouts.read("rollouts"), eval_metrics.read("scores")
    task_of = dict(zip(rollouts["rollout_id"].to_pylist(), rollouts["task_id"].to_pylist(), strict=True))
    tasks = set(task_of.values())
    seen = blaming.seen_tasks(tasks, section.share)
    heldout = {
        seed: blaming.heldout_sequences(
            eval_rollouts.read("turns"),
            task_of,
            blaming.advantages(rollouts, scores, section.metric, seed, seen),
            sft.micro_tokens(run.spec.train),
        )
        for seed in spec.seeds
    }
    splits = {seed: table["split"].to_pylist() for seed, table in heldout.items()}
    checks = [blaming.outcomes_vary(splits, section.metric), blaming.enough_tasks(len(seen), len(tasks - seen))]
    if not all(check.passed for check in checks):
        checks += [outcome(name, None) for name in ("matches_gradients", "every_row_blamed")]
        return Produced(tables={name: empty(name) for name in run.node.tables}, checks=checks)
    rows = _blamed_checkpoints(section, sft_checkpoint)
    base = base_checkpoint.read("checkpoints").to_pylist()[0]
    parts = [_blame_by(run, section, row, base, upweighted_dataset, heldout[row["seed"]]) for row in rows]
    tables = {name: pa.concat_tables([part[name] for part in parts]) for name in (*run.node.tables, "figures")}
    figures = tables.pop("figures").to_pydict()
    trained = upweighted_dataset.read("dataset_rows", columns=["split"])["split"].to_pylist().count("train")
    return Produced(
        tables=tables,
        checks=(
            *checks,
            blaming.matches_gradients(**figures),
            blaming.every_row_blamed(tables["blame"], trained, len(rows)),
        ),
        metadata={"rows": tables["blame"].num_rows, "tasks read": len(seen)},
        seeds=spec.seeds,
    )


def _blamed_checkpoints(section: BlameSection, sft_checkpoint: Input) -> list[dict[str, Any]]:
    """Return the rows of the checkpoints whose weights are used. Raises LakeError if a step was not kept."""
    rows = sft_checkpoint.read("checkpoints").to_pylist()
    chosen = [row for row in rows if (row["step"] in section.steps if section.steps else row["final"])]
    if missing := sorted({*section.steps} - {row["step"] for row in chosen}):
        kept = sorted({row["step"] for row in rows})
        raise LakeError(f"blame.steps names {missing}, and training kept the steps {kept}; set train.save_steps")
    return chosen


def _blame_by(
    run: AssetRun,
    section: BlameSection,
    checkpoint: dict[str, Any],
    base: dict[str, Any],
    upweighted_dataset: Input,
    heldout: pa.Table,
) -> dict[str, pa.Table]:
    """Return the tables by the weights of one checkpoint, and `figures`: influences by gradients, and as measured."""
    root, name = run.lake.root, f"seed{checkpoint['seed']}-step{checkpoint['step']}"
    adapter = root / checkpoint["adapter_path"] if checkpoint["adapter_path"] else None

    def compute() -> dict[str, pa.Table]:
        folder = run.lake.scratch(f"blame/{run.key}-{name}")
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(heldout, folder / "heldout.parquet", write_page_checksum=True)
        config = BlameWorkerConfig(
            label=f"blame of {run.key}, {name}",
            checkpoint={"seed": checkpoint["seed"], "step": checkpoint["step"], "objective": section.metric},
            model=str(checkpoint_folder(root, (base if adapter else checkpoint)["path"])),
            adapter=str(adapter) if adapter else None,
            files=tuple(map(str, upweighted_dataset.stored("sequences").paths)),
            rows=tuple(map(str, upweighted_dataset.stored("dataset_rows").paths)),
            heldout=str(folder / "heldout.parquet"),
            device="cuda" if run.spec.requires != "cpu" else "auto",
            micro_tokens=sft.micro_tokens(run.spec.train),
            extremes=blaming.EXTREMES,
        )
        result = run_worker(blaming.WORKER, config, folder, BlameWorkerResult, context=run.context, echo=run.log)
        run.log(f"{config.label}: {result.tokens} tokens in {result.seconds:.0f} s, {result.memory_mb} MB")
        tables = {each: pq.read_table(folder / f"{each}.parquet") for each in run.node.tables}
        shutil.rmtree(folder)
        return {**tables, "figures": pa.table({"exact": result.exact, "measured": result.measured})}

    assert run.parts is not None
    return run.parts.get(name, compute)


def _plan(
    run: AssetRun, spec: ExperimentSpec, chat: ChatFormat, upweighted_dataset: Input, tito_pairs: Input, tasks: Input
) -> ProbePlan:
    """Return the prompts of the evaluated suite; training's own where no task of the training data is in the suite, and
    where a harness writes the prompts."""
    rows = upweighted_dataset.read("dataset_rows", columns=["pair_id", "task_id", "agent_id", "turn"])
    of_suite = None
    if spec.evaluate and not spec.evaluate.harness:
        renderer = PromptRenderer(
            family=load_family(run.specs.suites[spec.evaluate.suite].family),
            chat=chat,
            agent=spec.evaluate.agent,
            template_kwargs=spec.serving.served_kwargs(),
        )
        first = _first_pairs(tito_pairs, ["pair_id", "turn", "suffix_ids"])
        prompt_ids = {row["pair_id"]: row["suffix_ids"] for row in first}
        of_suite = ProbePlan.build(renderer, spec.probe, read_tasks(tasks.read("tasks")), rows.to_pylist(), prompt_ids)
        if of_suite.train:
            return of_suite
    first = _first_pairs(tito_pairs, ["pair_id", "turn", "suffix_ids", "output_ids"])
    trained = set(rows["pair_id"].to_pylist())
    of_data = ProbePlan.of_data(chat, spec.probe, [row for row in first if row["pair_id"] in trained])
    return replace(of_suite, train=of_data.train, trained_ids=None) if of_suite else of_data


def _first_pairs(tito_pairs: Input, columns: list[str]) -> list[dict[str, Any]]:
    """Return the pairs of first turns, whose suffix is their whole prompt."""
    return tito_pairs.read("pairs", columns=columns).filter(pc.field("turn") == 0).to_pylist()


def _entities(run: AssetRun, tasks: Input) -> dict[str, Sequence[str]]:
    """Return task id -> the files and functions the task names, as its family reads them."""
    families = {ref.key: load_family(run.specs.suites[ref.key].family) for ref in tasks.refs()}
    return {task.task_id: families[task.suite].entities(task) for task in read_tasks(tasks.read("tasks"))}


def _checkpoints(run: AssetRun) -> list[dict[str, Any]]:
    """Return the rows of the base and of every trained checkpoint, because the probe compares with the base."""
    tables = [run.read(asset, "checkpoints") for asset in ("base_checkpoint", "sft_checkpoint", "rl_checkpoint")]
    return checkpoint_rows(pa.concat_tables(tables))


def _expected(serving: Serving, checkpoint: Checkpoint) -> ExpectedServing:
    name, folder = serving.expected(checkpoint)
    adapter, trained = folder != checkpoint.folder, folder in (checkpoint.folder, checkpoint.adapter)
    content_hash = checkpoint.adapter_hash if adapter else checkpoint.identity
    verifiable = trained and not checkpoint.path.startswith((HUB, PACKAGE))  # a copy was verified when it was written
    return ExpectedServing(name, folder, content_hash or "", verifiable=verifiable)


@contextmanager
def _serving(
    run: AssetRun, spec: ExperimentSpec, chosen: Callable[[dict[str, Any]], bool] = lambda row: True
) -> Iterator[tuple[Serving, Sequence[Checkpoint]]]:
    """Serve the chosen checkpoints of the experiment; every server has stopped when the context ends."""
    chat = load_chat_format(spec.base.tokenizer, spec.base.chat_template)
    rows = _checkpoints(run)
    folders = {row["checkpoint_id"]: checkpoint_folder(run.lake.root, row["path"]) for row in rows}
    checkpoints = [
        Checkpoint(
            folder=folders[row["checkpoint_id"]],
            identity=row["checkpoint_id"],
            adapter=run.lake.root / row["adapter_path"] if row["adapter_path"] else None,
            base=folders.get(row["parent_id"] or ""),
            base_identity=row["parent_id"],
            **{name: row[name] for name in ("role", "path", "adapter_hash", "seed", "step", "final")},
        )
        for row in filter(chosen, rows)
    ]
    context = spec.evaluate.longest_context() if spec.evaluate else None
    with closing(run.resources.serving(spec.serving, chat, checkpoints, context)) as serving:
        yield serving, checkpoints


def report_metrics(
    lake: Lake, experiment: str, report_to: tuple[Tracker, ...], metrics: pa.Table, log: Callable[[str], None]
) -> None:
    """Report the rows of `metrics` that are pooled over seeds, "<role>/<decoding>/<metric>" each.

    A failure is logged as a warning: the metrics are in the lake, and no tracker makes an evaluation fail.
    """
    tracking = tracking_of(lake, report_to, f"{experiment}-eval")
    if tracking is None or not (values := pooled(metrics)):
        return
    folder = lake.scratch("trackers") / experiment
    lines: list[str] = []
    try:
        config = TrackerWorkerConfig(tracking=tracking, values=values)
        done = run_worker(MODULE, config, folder, TrackerWorkerResult, echo=lines.append)
    except Exception as error:  # see above
        log(f"WARNING: the metrics of {experiment} were not reported to {', '.join(report_to)}: {error}")
    else:
        log(f"{len(values)} metrics reported to {', '.join(report_to)} as {done.run_name}")
    shutil.rmtree(folder, ignore_errors=True)


def pooled(metrics: pa.Table) -> dict[str, float]:
    """Return {"role/decoding/metric": value} of the rows pooled over seeds that have a value."""
    return {
        "/".join(row[name] or "-" for name in ("checkpoint_role", "decoding", "metric")): row["value"]
        for row in metrics.to_pylist()
        if row["seed"] is None and row["value"] is not None
    }
