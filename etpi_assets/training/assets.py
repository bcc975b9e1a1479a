"""The training stage as assets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from etpi_assets import tiny_bases
from etpi_assets.asset import AssetRun, Input, Markdown, Produced, asset
from etpi_assets.checks import outcome
from etpi_assets.planning.versions import judge_of
from etpi_assets.scoring.judging import Judging, one_judge
from etpi_assets.scoring.rewards import rescore
from etpi_assets.scoring.rewards.functions import check_terms, version_of
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.specs.training import RLSection
from etpi_assets.tasks.families import load_family
from etpi_assets.tasks.family import Family, Task, is_trusted, weakest
from etpi_assets.tasks.proofs import Proving
from etpi_assets.tasks.table import read_tasks, rejected_table
from etpi_assets.training import checkpoints, grpo, grpo_checks, sft, sft_checks
from etpi_assets.training.checkpoints import SftReport
from etpi_assets.training.curriculum import chosen_tasks
from etpi_assets.training.curves import loss_plot, rollout_shares_plot
from etpi_assets.training.device import dtype_here
from etpi_assets.training.rounds import RLEnvironment, with_prompts_that_fit
from etpi_assets.trajectories.tables import from_tables
from etpi_resources.checkpoints import checkpoint_folder
from etpi_resources.lake.lake import LakeError
from etpi_resources.lake.schemas import from_rows


@asset(
    set="experiment",
    group="sources",
    tables=("checkpoints",),
    sections=("base",),
    lock="accelerator",
    kinds=("safetensors",),
    versions=("base",),
    summary="The model that training starts from: a pinned hub revision, a local path with its hash, or a tiny base.",
)
def base_checkpoint(run: AssetRun) -> Produced:
    section = run.spec.base
    if section.kind == "none":
        return Produced.not_applicable(run.node.name, 'this experiment has no model: base.kind = "none"')
    row = {"experiment": run.key, "role": "base", "step": 0, "final": True, "method": "base"}
    if section.kind == "tiny":
        return _tiny_base(run, row)
    pointer, pinned = checkpoints.pointer(section)
    return Produced(tables={"checkpoints": from_rows("checkpoints", [row | pointer])}, checks=(pinned,))


def _tiny_base(run: AssetRun, row: dict[str, Any]) -> Produced:
    from etpi_resources.chat.format import load_chat_format

    section = run.spec.base
    chat = load_chat_format(section.tokenizer, section.chat_template)
    recipe = tiny_bases.require(section.tiny, chat)
    checkpoint = tiny_bases.adopt(recipe, run.lake, chat)
    row |= {
        "checkpoint_id": checkpoint,
        "path": str(run.lake.checkpoint_dir(checkpoint).relative_to(run.lake.root)),
        "dtype": recipe.dtype,
        "train_loss": recipe.log[-1]["loss"],
        "wall_seconds": 0.0,
        "hyperparameters": section.tiny.model_dump_json(),
    }
    pinned = outcome(checkpoints.PINNED, True, case="shipped")
    curve = [{"role": "base", "seed": section.tiny.seed, "val_loss": None, **line} for line in recipe.log]
    return Produced(
        tables={"checkpoints": from_rows("checkpoints", [row])},
        checks=(pinned,),
        metadata={"loss": Markdown(loss_plot(curve)), "parameters": recipe.parameters},
    )


@asset(
    set="experiment",
    group="training",
    tables=("checkpoints", "training_log"),
    sections=("train", "seeds", "requires", "base"),
    lock="accelerator",
    kinds=("trl", "safetensors"),
    versions=("training",),
    kept=("trainer.sft", "chat"),
    summary="Supervised fine-tuning through TRL in its own process; one adapter and one merged checkpoint per seed.",
)
def sft_checkpoint(run: AssetRun, base_checkpoint: Input, upweighted_dataset: Input) -> Produced:
    spec: ExperimentSpec = run.spec
    if spec.train.method == "none":
        return Produced.not_applicable(run.node.name, 'nothing is fine-tuned: train.method = "none"')
    bases = base_checkpoint.read("checkpoints").to_pylist()
    if not bases:
        raise LakeError(
            f'{run.key} has no base to train from: base.kind = "none". Name one, or set train.method = "none" for an '
            "experiment that ends with its dataset"
        )
    from etpi_resources.chat.format import load_chat_format

    dataset = run.lake.require(upweighted_dataset.refs()[0])
    files = run.lake.files_of(dataset, "sequences")
    hashes = [entry["sha256"] for entry in dataset.tables["sequences"]["files"]]
    chat = load_chat_format(spec.base.tokenizer, spec.base.chat_template)
    requests = {
        seed: sft.SftRequest(
            experiment=run.key,
            base_id=bases[0]["checkpoint_id"],
            base_folder=checkpoint_folder(run.lake.root, bases[0]["path"]),
            files=dict(zip(files, hashes, strict=True)),
            train=spec.train,
            seed=seed,
            chat_template=chat.template,
            end_ids=tuple(sorted(chat.end_ids)),
            gpu=spec.requires != "cpu",
            dtype=dtype_here(spec.train.dtype, spec.train.shards),
            code=run.stored_name,
            older_codes=run.older_codes,
            report_to=spec.train.report_to,
        )
        for seed in spec.seeds
    }
    split = sft_checks.training_split(run.lake, files)
    reports = {
        seed: sft.train_once(run.lake, request, split=split, context=run.context, echo=run.log)
        for seed, request in requests.items()
    }
    rows = [row for seed, r in requests.items() for row in sft.checkpoint_rows(r, reports[seed], dataset.version)]
    log = [row for seed, r in requests.items() for row in sft.log_rows(r, reports[seed])]
    return Produced(
        tables={"checkpoints": from_rows("checkpoints", rows), "training_log": from_rows("training_log", log)},
        checks=sft_checks.checks(reports, split),
        metadata={"loss": Markdown(loss_plot(log)), **_figures(reports)},
        notes={"keys": {str(seed): request.key for seed, request in requests.items()}},
        seeds=spec.seeds,
    )


def _figures(reports: dict[int, SftReport]) -> dict[str, Any]:
    """Figures of the runs for the asset's page, one entry per seed."""
    return {
        f"seed {seed}": {
            "steps": report.plan.steps,
            "epochs": round(report.plan.epochs, 3),
            "loss": report.checkpoints[-1].train_loss,
            "mean token accuracy": report.checkpoints[-1].token_accuracy,
            "validation loss": report.checkpoints[-1].val_loss,
            "tokens a second": round(report.log[-1].tokens / max(report.seconds.train, 1e-9)),
            "padding": round(report.plan.padding, 3),
            "layout": f"{report.plan.layout}: {report.plan.layout_because}",
            "seconds": {name: round(value, 1) for name, value in report.seconds},
            "device": report.device,
            "dtype": report.dtype,
            "trained before": report.reused,
        }
        for seed, report in reports.items()
    }


@asset(
    set="experiment",
    group="training",
    tables=(
        "checkpoints",
        "training_log",
        "rollouts",
        "agents",
        "turns",
        "messages",
        "rl_samples",
        "rewards",
        "quarantined",
    ),
    sections=("rl", "seeds", "requires", "base", "serving.template_kwargs"),
    lock="accelerator",
    kinds=("trl", "safetensors"),
    versions=("training", "rollouts"),
    kept=(
        *("trainer.grpo", "{steps}", "{world}", "engine.{engine}", "sandbox.{sandbox}", "family.{family}"),
        *("judge", "judge.{family}", "rewards", "{reward}"),
    ),
    summary="Group-relative policy optimisation (GRPO) from the fine-tuned checkpoint; its rollouts are recorded too.",
)
def rl_checkpoint(run: AssetRun, base_checkpoint: Input, sft_checkpoint: Input, tasks: Input) -> Produced:
    spec: ExperimentSpec = run.spec
    if spec.rl.method == "none":
        return Produced.not_applicable(run.node.name, 'nothing is reinforced: rl.method = "none"')
    check_terms(spec.rl.rewards)
    starts = _start_checkpoints(run, base_checkpoint, sft_checkpoint)
    proving = _proving(run, spec.rl)
    environment = _environment(run, spec, proving)
    teacher = _teacher_folder(run, spec.rl, environment)
    requests = {
        seed: grpo.GrpoRequest(
            experiment=run.key,
            base_id=starts[seed]["checkpoint_id"],
            base_folder=checkpoint_folder(run.lake.root, starts[seed]["path"]),
            section=spec.rl,
            seed=seed,
            environment=environment,
            teacher_folder=teacher,
            gpu=spec.requires != "cpu",
            dtype=dtype_here(spec.rl.dtype),
            code=run.stored_name,
            older_codes=run.older_codes,
            report_to=spec.train.report_to,
        )
        for seed in spec.seeds
    }
    reports = {
        seed: grpo.reinforce_once(run.lake, r, context=run.context, echo=run.log) for seed, r in requests.items()
    }
    log = [row for seed, r in requests.items() for row in grpo.log_rows(r, reports[seed])]
    tables = {
        "checkpoints": from_rows(
            "checkpoints", [c for s, r in requests.items() for c in grpo.checkpoint_rows(r, reports[s])]
        ),
        "training_log": from_rows("training_log", log),
        "quarantined": rejected_table(proving.rejected, run.node.name),
        **grpo.recorded(run.lake, requests, reports),
    }
    rewards = {term.function: version_of(term.function) for term in spec.rl.rewards}
    return Produced(
        tables=tables,
        checks=grpo_checks.checks(
            spec.rl, reports, tables, len(environment.tasks), environment.left_out, len(proving.rejected)
        ),
        metadata={
            "rates": Markdown(rollout_shares_plot(log)),
            **{f"seed {seed}": grpo.figures(report) for seed, report in reports.items()},
            "rewards": rewards,
        },
        notes={"keys": {str(seed): request.key for seed, request in requests.items()}, "rewards": rewards},
        seeds=spec.seeds,
    )


def _proving(run: AssetRun, section: RLSection) -> Proving:
    """Return the training tasks of a section's suite, to be proved."""
    assert section.suite  # RLSection requires it
    offered = read_tasks(run.read("tasks", "tasks", key=section.suite), "train")
    if section.tasks_from:
        offered = chosen_tasks(section.tasks_from, section.suite, offered, run.lake)
    return Proving(run, section.suite, offered)


def _environment(run: AssetRun, spec: ExperimentSpec, proving: Proving) -> RLEnvironment:
    """Return the proved tasks of a suite, and everything that is needed to roll the policy out on them.

    All are proved before the first round, because the trainer shuffles all of them by the seed.
    """
    from etpi_resources.chat.format import load_chat_format

    suite = run.specs.suites[proving.suite]
    family = load_family(suite.family)
    environment = RLEnvironment(
        tasks=trusted_tasks(run.key, family, list(proving), spec.rl.min_trust),
        family=family,
        sandboxes=run.resources.sandboxes(spec.rl.sandbox),
        chat=load_chat_format(spec.base.tokenizer, spec.base.chat_template),
        template_kwargs=spec.serving.template_kwargs,
        judge=judge_of(suite.family),
    )
    return with_prompts_that_fit(spec.rl, environment)


def _teacher_folder(run: AssetRun, section: RLSection, environment: RLEnvironment) -> Path | None:
    """Return the folder of the teacher that a section pins. Raises LakeError if its ids are not the policy's."""
    from etpi_resources.chat.tokenizer_files import read_tokenizer
    from etpi_resources.checkpoints import pinned_folder

    if section.teacher is None:
        return None
    folder, _ = pinned_folder(run.lake, section.teacher, None)
    if read_tokenizer(folder).get_vocab() != environment.chat.tokenizer.get_vocab():
        raise LakeError(
            f"rl.teacher = {section.teacher!r} has another vocabulary than the policy, so its log-probabilities are of "
            "other tokens; name a teacher with the tokenizer of the base"
        )
    return folder


def trusted_tasks(experiment: str, family: Family, offered: Sequence[Task], least: str | None) -> list[Task]:
    """Return the tasks of which each test that has to turn has the trust `least`. Raises LakeError if none is left."""
    tasks = [task for task in offered if is_trusted(weakest(family.trusts(task) or ["unknown"]), least)]
    if offered and not tasks:
        why = f"none of its {len(offered)} training tasks has rl.min_trust = {least}"
        raise LakeError(f"{experiment} has nothing to reinforce: {why}; lower it, or name another suite")
    return tasks


def _start_checkpoints(run: AssetRun, base_checkpoint: Input, sft_checkpoint: Input) -> dict[int, dict[str, Any]]:
    """Return each seed's start checkpoint: its fine-tuned one, or the base if nothing was fine-tuned."""
    tuned = [row for row in sft_checkpoint.read("checkpoints").to_pylist() if row["final"]]
    bases = base_checkpoint.read("checkpoints").to_pylist()
    if not tuned and not bases:
        raise LakeError(
            f'{run.key} has nothing to reinforce: base.kind = "none". Name a base, or set rl.method = "none"'
        )
    return {seed: next((row for row in tuned if row["seed"] == seed), *bases) for seed in run.spec.seeds}


def judging(run: AssetRun, rl_checkpoint: Input) -> Judging:
    """Return what judges the rollouts of reinforcement again."""
    from etpi_resources.chat.format import load_chat_format

    spec: ExperimentSpec = run.spec
    chat = partial(load_chat_format, spec.base.tokenizer, spec.base.chat_template)
    return Judging(run, rl_checkpoint, spec.rl.suite, spec.rl.sandbox, spec.rl.agent, chat)


@asset(
    set="experiment",
    group="training",
    tables=("rewards", "verdicts"),
    sections=("rl.rewards",),
    across_seams=True,
    versions=("rewards", "{reward}", "parsing", "tasks", "judge", "judge.{family}"),
    summary="Rewards and verdicts of the recorded GRPO rollouts, under the current functions and judge; no model runs.",
)
def rl_rewards(run: AssetRun, rl_checkpoint: Input, tasks: Input) -> Produced:
    spec: ExperimentSpec = run.spec
    names = ("rollouts", "agents", "turns", "messages")
    tables = {name: rl_checkpoint.read(name) for name in names}
    if not tables["rollouts"].num_rows:
        return Produced.not_applicable(run.node.name, "nothing was reinforced")
    by_id = {task.task_id: task for task in read_tasks(tasks.read("tasks", key=spec.rl.suite))}
    judged = judging(run, rl_checkpoint).judged(by_id.values())
    tables["rollouts"], verdicts = judged.of(tables["rollouts"])
    applied = rl_checkpoint.read("rewards")
    samples = rl_checkpoint.read("rl_samples", columns=("rollout_id", "seed", "step", "left_out"))
    rescored = rescore.rescore_rollouts(from_tables(tables), by_id, samples, spec.rl.rewards)
    return Produced(
        tables={"rewards": rescored, "verdicts": verdicts},
        checks=(rescore.rewards_as_applied(applied, rescored), one_judge(verdicts, judged)),
        notes=judged.notes(),
        metadata={"rewards": {term.function: version_of(term.function) for term in spec.rl.rewards}},
    )
