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
        spec=spec,
        tainted=experiment.tainted,
        base_id=next(iter(base["checkpoint_id"].to_pylist()), None),
        rollouts=train_rows["rollout_id"].n_unique(),
        rows=len(train_rows),
        tokens=train_rows["output_tokens"].sum(),
        teachers=sorted(train_rows["teacher"].fill_null("unknown").replace("", "unknown").unique()),
        selection=_selection(spec),
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
        limitations=spec.card.limitations or _limitations(spec, metrics),
    )


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
