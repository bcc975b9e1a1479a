"""Render the model card of an experiment in the format of the Hugging Face Hub."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from etpi_assets.reports import answer, facts, story
from etpi_assets.reports.changes import changes
from etpi_assets.reports.html import TEMPLATES, ReportedExperiment
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.tasks.table import data_sources
from etpi_resources.frames import to_frame


def render(experiment: ReportedExperiment, tables: facts.ReportTables, base: pa.Table) -> str:
    """Render the card as markdown; of `tables`, those of the selection and of rollouts that trained are not read.

    Args:
        base: the `checkpoints` of base_checkpoint.
    """
    name, spec, sets = experiment.name, experiment.spec, experiment.rollout_sets
    metrics, rollouts, scores = tables.metrics, tables.eval_rollouts, tables.eval_scores
    train_rows = to_frame(tables.dataset_rows).filter(split="train")
    finals = [c for c in tables.checkpoints.to_pylist() if c["final"] and c["role"] != "base"]
    names = facts.headline_metrics(spec.metrics.reading, spec.metrics.headline)
    headline = facts.metric_rows(metrics, names)
    evaluated = [row for row in headline if row["checkpoint_role"] != "teacher"]
    role = answer.last_role(rollouts["checkpoint_role"].to_pylist())
    why = answer.why(role, answer.verdicts_of(scores, rollouts, role), {}) if role else ""
    paired = changes(rollouts, scores, tables.eval_agent_scores, [name for name in names if name not in facts.MEANS])
    return TEMPLATES.get_template("model_card.md.jinja").render(
        name=name,
        title=spec.title,
        tainted=experiment.tainted,
        notes=spec.notes,
        card=spec.card,
        base=spec.base,
        base_name=_base_name(spec, base),
        train=spec.train,
        seeds=spec.seeds,
        rollout_sets=spec.rollout_sets,
        rollouts=train_rows["rollout_id"].n_unique(),
        rows=len(train_rows),
        tokens=train_rows["output_tokens"].sum(),
        teachers=sorted(train_rows["teacher"].fill_null("unknown").replace("", "unknown").unique()),
        selection=_selection(spec),
        method=_method(spec),
        max_length="the base's context" if spec.dataset.max_length == "auto" else f"{spec.dataset.max_length:,}",
        agent=spec.evaluate.agent if spec.evaluate else None,
        decodings=spec.evaluate.decodings if spec.evaluate else (),
        template_kwargs=repr(spec.serving.template_kwargs),
        upweight_turns=spec.dataset.upweight_turns,
        upweight_factor=f"{spec.dataset.upweight_factor:g}",
        finals=finals,
        precision=", ".join(sorted({row["dtype"] for row in finals if row["dtype"]})) or "not trained",
        trained_on=_trained_on(finals),
        story=story.compared(experiment.split, paired, experiment.main, why) if evaluated else [("", "Not evaluated.")],
        example=answer.example(name, rollouts, scores, tables.eval_turns),
        evaluated_on="On held-out repositories"
        if experiment.split == "heldout"
        else f"On tasks of the split {experiment.split}, not held out",
        metrics=evaluated,
        teacher=[row for row in headline if row["checkpoint_role"] == "teacher"],
        repos=train_rows.group_by("repo").len().sort("repo").rows(),
        sources=data_sources(tables.tasks, [(each, sets[each]) for each in spec.rollout_sets if each in sets]),
        rl=spec.rl if spec.rl.method != "none" else None,
        rl_rewards=[f"{t.function} × {t.weight:g}" for t in spec.rl.rewards],
        limitations=spec.card.limitations or _limitations(spec, metrics),
    )


def _base_name(spec: ExperimentSpec, base: pa.Table) -> str:
    if spec.base.kind == "hub":
        return f"{spec.base.repo} at {spec.base.revision}"
    if spec.base.kind == "package":
        return f"the model of the Python package {spec.base.package}"
    rows = base.to_pylist()
    return f"{spec.base.kind} `{rows[0]['checkpoint_id'][:16]}`" if rows else spec.base.kind


def _method(spec: ExperimentSpec) -> str:
    train = spec.train
    if train.method == "lora":
        knobs = f"rank {train.lora_rank}, α {train.lora_alpha}, dropout {train.lora_dropout:g}"
        return f"LoRA {knobs}, {train.target_modules}; merged"
    return "full fine-tuning" if train.method == "full" else "no training"


def _trained_on(finals: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return each training device with the versions of the libraries used on it."""
    settings = [json.loads(row["hyperparameters"]) for row in finals]
    used = [
        f"{s['device']}; {', '.join(f'{name} {version}' for name, version in s['libraries'].items())}"
        for s in settings
        if "libraries" in s
    ]
    return list(dict.fromkeys(used))


def _selection(spec: ExperimentSpec) -> str:
    rules = []
    if spec.select.min_reward == "auto":
        rules.append("full reward, where rollouts have rewards")
    elif spec.select.min_reward is not None:
        rules.append(f"reward ≥ {spec.select.min_reward:g}")
    rules += [name.replace("_", " ") for name in spec.select.require]
    if spec.select.shortest_correct:
        rules.append("shortest correct per task")
    return ", ".join(rules) or "every rollout"


def _limitations(spec: ExperimentSpec, metrics: pa.Table) -> list[str]:
    lines = [f"Trained only on rollouts of {', '.join(spec.rollout_sets)}; other task types are untested."]
    of_student = [row for row in metrics.to_pylist() if row["checkpoint_role"] != "teacher"]
    sizes = {(row["unit"], row["n"]) for row in of_student if row["seed"] is None and row["unit"] == "pair"}
    if sizes:
        lines.append(f"Some figures are over only {min(n for _, n in sizes)} evaluated pairs; read the intervals.")
    if spec.serving.template_kwargs:
        lines.append(f"Serve it with the template arguments of training: {json.dumps(spec.serving.template_kwargs)}.")
    return lines
