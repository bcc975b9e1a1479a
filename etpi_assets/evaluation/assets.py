"""The evaluation stage as assets: serving_probe, eval_rollouts, eval_metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import get_args

import pyarrow as pa

from etpi_assets.curation.gates import apply_overrides
from etpi_assets.evaluation import metrics, probes
from etpi_assets.evaluation.examination import Desk, Expected, Paper, examine, examine_on_the_way
from etpi_assets.evaluation.rollouts import (
    Candidate,
    Ground,
    candidates,
    conditions,
    every_condition_ran,
    infrastructure_held,
    roll_out,
)
from etpi_assets.materialize import AssetRun, Produced, etpi_asset
from etpi_assets.scoring.behaviours import ScoringOptions, score
from etpi_assets.scoring.checks import every_rollout_scored
from etpi_assets.scoring.structure import structure_of
from etpi_assets.specs.check_names import PROBES
from etpi_assets.specs.experiment import EvaluateSection, ExperimentSpec, Threshold
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.table import read_tasks
from etpi_assets.trajectories.checks import tasks_as_asked
from etpi_assets.trajectories.tables import to_tables
from etpi_resources.chat.format import load_chat_format
from etpi_resources.checkpoints import HUB, checkpoint_folder
from etpi_resources.engines.serving import Checkpoint, Serving
from etpi_resources.lake.schemas import from_rows

THRESHOLDS = tuple(f"{rate}_threshold" for rate in get_args(Threshold))
NOTHING = "the experiment trains or evaluates nothing"


@etpi_asset("serving_probe", checks=PROBES)
def serving_probe(run: AssetRun) -> Produced:
    spec: ExperimentSpec = run.spec
    if spec.evaluate is None or not any(c.role != "base" for c in _candidates(run)):
        return Produced.not_applicable(run.node.name, NOTHING)
    desk = Desk(
        family=load_family(run.specs.suites[spec.evaluate.suite].family),
        chat=load_chat_format(spec.base.tokenizer, spec.base.chat_template),
        agent=spec.evaluate.agent,
        template_kwargs=spec.serving.served_kwargs(),
    )
    learnt = run.read("upweighted_dataset", "dataset_rows", columns=["pair_id", "task_id", "agent_id", "turn"])
    inputs = _first_inputs(run.read("tito_pairs", "pairs", columns=["pair_id", "turn", "suffix_ids"]))
    tasks = read_tasks(run.read("tasks", "tasks"))
    paper = Paper.write(desk, spec.probe, tasks, learnt.to_pylist(), inputs)
    rows, base_turns = [], None
    with _serving(run, spec) as (serving, checkpoints):
        for candidate, checkpoint in checkpoints.items():
            with serving.engine(checkpoint) as engine:
                if candidate.final:
                    expected, is_base = _expected(serving, candidate, checkpoint), candidate.role == "base"
                    answers, turns = examine(engine, paper, expected, base_turns, trained=not is_base)
                    base_turns = turns if is_base else base_turns
                else:
                    answers = examine_on_the_way(engine, paper)
            step = None if candidate.final else candidate.step
            rows += [answer.row(candidate.checkpoint_id, candidate.role, candidate.seed, step) for answer in answers]
    table = from_rows("probes", rows)
    checks = apply_overrides(probes.verdicts(table.to_pylist()), spec.gates)
    return Produced(tables={"probes": table}, checks=checks, seeds=spec.seeds)


@etpi_asset("eval_rollouts", checks=("every_condition_ran", "infrastructure_held", "tasks_as_asked"))
def eval_rollouts(run: AssetRun) -> Produced:
    spec: ExperimentSpec = run.spec
    served = [] if spec.evaluate is None else [c for c in _candidates(run) if c.final and c.role in spec.evaluate.roles]
    if spec.evaluate is None or not served:
        return Produced.not_applicable(run.node.name, NOTHING)
    section = spec.evaluate
    ground = _ground(run, spec, section)
    plan = [(candidate, condition) for candidate in served for condition in conditions(section, candidate.role)]
    journals = run.lake.scratch(f"evaluations/{run.kept_code}")
    records = []
    with (
        run.progress("held-out rollouts", len(plan) * len(ground.tasks)) as progress,
        _serving(run, spec) as (serving, checkpoints),
    ):
        for candidate in served:
            with serving.engine(checkpoints[candidate]) as engine:
                for condition in conditions(section, candidate.role):
                    records += roll_out(
                        candidate, condition, engine, ground, journals, experiment=run.key, advance=progress.advance
                    )
    tables = to_tables(records, ground.chat.decode)
    expected = {(c.role, c.seed, x.decoding, x.sample_seed): len(ground.tasks) for c, x in plan}
    return Produced(
        tables=tables,
        checks=(
            every_condition_ran(tables["rollouts"], expected),
            infrastructure_held(tables["rollouts"]),
            tasks_as_asked(section.tasks, len(ground.tasks), section.split),
        ),
        metadata={"exits": dict(Counter(tables["agents"]["exit_status"].to_pylist()))},
        seeds=section.sample_seeds,
    )


@etpi_asset("eval_metrics", checks=("every_rollout_scored", *THRESHOLDS))
def eval_metrics(run: AssetRun) -> Produced:
    spec: ExperimentSpec = run.spec
    tasks = run.read("tasks", "tasks")
    rollouts = run.read("eval_rollouts", "rollouts")
    agents = run.read("eval_rollouts", "agents")
    options = ScoringOptions(
        spec.metrics.scoring,
        entities=_entities(run, tasks),
        structure=structure_of(spec.metrics.scoring, spec.evaluate.agent) if spec.evaluate else None,
        tools=bool(spec.evaluate and spec.evaluate.agent.tools),
    )
    turns, messages = run.read("eval_rollouts", "turns"), run.read("eval_rollouts", "messages")
    scored = score(rollouts, agents, turns, tasks, options, messages)
    teacher = metrics.teacher_of(
        run.read("scored_rollouts", "scores"), run.read("scored_rollouts", "agent_scores"), run.key
    )
    table = pa.concat_tables(
        [metrics.measure(rollouts, scored["scores"], scored["agent_scores"], experiment=run.key), teacher]
    )
    return Produced(
        tables={"metrics": table, **scored},
        checks=(
            every_rollout_scored(rollouts, agents, scored["scores"], scored["agent_scores"]),
            *metrics.threshold_checks(table, spec.metrics.thresholds, ("sft", "rl")),
        ),
        metadata={"rollouts": rollouts.num_rows},
    )


def _ground(run: AssetRun, spec: ExperimentSpec, section: EvaluateSection) -> Ground:
    """Where checkpoints are evaluated: tasks, judge, sandboxes, chat format."""
    return Ground(
        tasks=read_tasks(run.read("tasks", "tasks", key=section.suite), section.split, section.tasks),
        family=load_family(run.specs.suites[section.suite].family),
        sandboxes=run.resources.sandboxes(spec.serving.sandbox),
        chat=load_chat_format(spec.base.tokenizer, spec.base.chat_template),
        template_kwargs=spec.serving.served_kwargs(),
    )


def _entities(run: AssetRun, tasks: pa.Table) -> dict[str, Sequence[str]]:
    """What each task names, as its family reads it."""
    families = {ref.key: load_family(run.specs.suites[ref.key].family) for ref in run.refs("tasks")}
    return {task.task_id: families[task.suite].entities(task) for task in read_tasks(tasks)}


def _candidates(run: AssetRun) -> list[Candidate]:
    """The base and every trained checkpoint, whatever roles are evaluated: the probe compares with the base."""
    tables = [run.read(asset, "checkpoints") for asset in ("base_checkpoint", "sft_checkpoint", "rl_checkpoint")]
    return candidates(pa.concat_tables(tables))


def _expected(serving: Serving, candidate: Candidate, checkpoint: Checkpoint) -> Expected:
    name, folder = serving.expected(checkpoint)
    content_hash = candidate.adapter_hash if folder == checkpoint.adapter else candidate.checkpoint_id
    return Expected(name, folder, content_hash or "", verifiable=not candidate.path.startswith(HUB))


@contextmanager
def _serving(run: AssetRun, spec: ExperimentSpec) -> Iterator[tuple[Serving, Mapping[Candidate, Checkpoint]]]:
    """What serves the experiment's checkpoints, and the files of each; all servers have ended on leaving."""
    chat = load_chat_format(spec.base.tokenizer, spec.base.chat_template)
    found = _candidates(run)
    folders = {c.checkpoint_id: checkpoint_folder(run.lake.root, c.path) for c in found}
    checkpoints = {
        candidate: Checkpoint(
            folder=folders[candidate.checkpoint_id],
            identity=candidate.checkpoint_id,
            role=candidate.role,
            adapter=run.lake.root / candidate.adapter_path if candidate.adapter_path else None,
            adapter_hash=candidate.adapter_hash,
            base=folders.get(candidate.parent_id or ""),
            base_identity=candidate.parent_id,
        )
        for candidate in found
    }
    with closing(run.resources.serving(spec.serving, chat, list(checkpoints.values()))) as serving:
        yield serving, checkpoints


def _first_inputs(pairs: pa.Table) -> dict[str, list[int]]:
    return {row["pair_id"]: row["suffix_ids"] for row in pairs.to_pylist() if row["turn"] == 0}


ASSETS = [serving_probe, eval_rollouts, eval_metrics]
