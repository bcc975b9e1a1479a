"""Floors and bounds that a data set must clear before a GPU is rented for it.

Belongs here: what the spec's `gates` section measures, each verdict with the figures and the remedy, and overriding one
by name with a reason. Does not belong here: invariants that no spec can move (`integrity`).

A gate over a rate carries n and its interval and says where n cannot decide; it then passes or fails by the estimate.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.curation.upweight import loss_share_by_turn
from etpi_assets.scoring.intervals import decide, rate
from etpi_assets.specs.experiment import GatesSection
from etpi_resources.lake.checks import CheckOutcome
from etpi_resources.lake.stored import Rows, batches, columns_of, counts, dicts

_SHOWN = 3
_PAIR_RATES = ("plan_first", "plan_content", "solved")
_AGENT_RATES = ("follow_through", "follow_own", "follow_edited", "follow_by_turn_5")
_RUN = 6
_COMMON = 0.9
_HELD_OUT = ("heldout_repo", "heldout_task")
_REMEDIES = {
    "over_max_length": "raise dataset.max_length",
    "not_captured": "set pairs.capture to what the rollouts have",
    "unclosed_think": "the prompts open a think block that the turns do not close, so set "
    "serving.template_kwargs.enable_thinking = false, or import the thoughts",
    "truncated": "set pairs.drop_truncated = false, or collect with a larger max_tokens",
}


def validate_overrides(section: GatesSection, names: Collection[str]) -> None:
    """Hold that every override names a check and gives a reason.

    Args:
        names: every check that an experiment has.

    Raises:
        ValueError: one does not.
    """
    for name, reason in section.override.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0)
            raise ValueError(
                f"gates.override.{name}: no such check, the nearest is {near[0]!r}; there are {sorted(names)}"
            )
        if not reason.strip():
            raise ValueError(f"gates.override.{name}: say why its failure is accepted")


def apply_overrides(outcomes: Iterable[CheckOutcome], section: GatesSection) -> list[CheckOutcome]:
    """The outcomes, those that failed and that `gates.override` names passed with the reason in front."""
    return [
        replace(o, passed=True, blocking=False, message=f"overridden: {section.override[o.name]} ({o.message})")
        if not o.passed and o.name in section.override
        else o
        for o in outcomes
    ]


def teacher_gate(rollouts: pa.Table, scores: pa.Table, agent_scores: pa.Table, section: GatesSection) -> CheckOutcome:
    """The teacher's own rates, over every rollout it made, against `gates.teacher`: a student is bounded by them.

    Raises:
        ValueError: `gates.teacher` names a metric that is not measured.
    """
    known = (*_PAIR_RATES, *_AGENT_RATES)
    if unknown := sorted(set(section.teacher) - set(known)):
        raise ValueError(f"gates.teacher.{unknown[0]}: no such metric; there are {list(known)}")
    task = dict(zip(rollouts["rollout_id"].to_pylist(), rollouts["task_id"].to_pylist(), strict=True))
    counted = [row for row in scores.to_pylist() if not row["infrastructure_error"]]
    names = {row["rollout_id"] for row in counted}
    agents = [row for row in agent_scores.to_pylist() if row["rollout_id"] in names]
    sentences, passed = [], True
    figures: dict[str, float] = {"excluded": len(scores) - len(counted)}
    for metric, floor in sorted(section.teacher.items()):
        rows = agents if metric in _AGENT_RATES else counted
        read = [(_value(row, metric), str(task.get(row["rollout_id"]) or row["rollout_id"])) for row in rows]
        hits = [(value, cluster) for value, cluster in read if value is not None]
        estimate = rate([value for value, _ in hits], [cluster for _, cluster in hits])
        if estimate is None:
            passed = False
            sentences.append(f"{metric} was not measured on any rollout: take it out of gates.teacher")
            continue
        passed = passed and estimate.value >= floor
        sentences.append(f"{metric} {decide(estimate, floor)[1]}")
        figures[metric] = estimate.value
    message = "; ".join(sentences) or "gates.teacher names no metric"
    if not passed:
        message += (
            ". A student is bounded by its teacher: take a stronger one, or say in gates.override why this one will do"
        )
    return CheckOutcome("teacher_gate", passed, message, figures=figures)


def _value(row: Mapping[str, Any], metric: str) -> float | None:
    if metric == "solved":
        return None if row["reward"] is None else float(row["reward"] == 1.0)
    return None if row[metric] is None else float(row[metric])


def turn_loss_share(rows: pa.Table, section: GatesSection) -> CheckOutcome:
    """Turn 0's share of the loss weight of the training rows, against its floor: per-turn rows bury the first turn."""
    share = loss_share_by_turn(rows)
    first = share.get(0, 0.0)
    floor = section.first_turn_loss_share
    told = ", ".join(f"turn {turn} {value:.3f}" for turn, value in list(share.items())[:6])
    message = f"Turn 0 carries {first:.3f} of the loss, floor {floor:.3f} ({told})."
    passed = first >= floor
    if not passed:
        factor = (1 - first) * floor / max(1e-9, first * (1 - floor))
        message += (
            " No training row has turn 0: look at `dropped`."
            if first == 0
            else f" Later turns bury it: raise dataset.upweight_factor about {factor:.1f} times for turn 0."
        )
    return CheckOutcome("turn_loss_share", passed, message, figures={f"turn_{t}": v for t, v in share.items()})


def format_exposure(rows: pa.Table, pairs: Rows, section: GatesSection) -> CheckOutcome:
    """Tool-call openings learnt in one epoch, each counted with its row's weight and copies, against their floor."""
    training = rows.filter(pc.field("split") == "train").select(["pair_id", "weight", "copies"])
    told = training.join(columns_of(pairs, ["pair_id", "format_tokens"]), "pair_id")
    openings = told.filter(pc.field("format_tokens") > 0)
    exposure = sum(row["weight"] * row["copies"] for row in dicts(openings, ["weight", "copies"]))
    floor = section.format_exposure
    figures = {
        "exposure": exposure,
        "rows_with_call": len(openings),
        "rows": len(training),
        "format_tokens": pc.sum(told["format_tokens"]).as_py() or 0,  # pyright: ignore[reportAttributeAccessIssue]
    }
    message = (
        f"{len(openings)} of {len(training)} training rows hold a tool call, {exposure:.0f} by weight; floor {floor}."
    )
    if exposure < floor:
        message += (
            " The format would not be learnt: "
            + ("the teacher writes no <tool_call>, so re-tokenise or take another teacher." if not openings else "")
            + ("collect more rollouts, or raise dataset.upweight_factor." if openings else "")
        )
    return CheckOutcome("format_exposure", exposure >= floor, message, figures=figures)


def role_balance(rows: pa.Table, pairs: Rows, section: GatesSection) -> CheckOutcome:
    """The rarer role's share of training rows, where agents work in pairs."""
    roles = {"pair_id": pa.string(), "role": pa.string()}
    parts = [pa.schema(roles).empty_table()]
    for batch in batches(pairs, ["pair_id", "metadata"]):
        role = pa.array([json.loads(facts).get("role") for facts in batch["metadata"].to_pylist()], pa.string())
        parts.append(pa.table([batch["pair_id"], role], list(roles)))
    training = rows.filter(pc.field("split") == "train").select(["pair_id"])
    count = counts(training.join(pa.concat_tables(parts), "pair_id"), "role")
    figures = {str(role): n for role, n in count.items()}
    if set(count) <= {"solo"}:
        return CheckOutcome("role_balance", True, "One agent alone: no roles to balance.", figures=figures)
    sides = {role: count.get(role, 0) for role in ("proposer", "responder")}
    share = min(sides.values()) / max(1, sum(sides.values()))
    floor = section.role_balance
    message = f"Rows by role {sides}: the rarer has {share:.2f}, floor {floor:.2f}."
    if share < floor:
        message += " A student trained on one role fails the other: select rollouts whole, with both agents' turns."
    return CheckOutcome("role_balance", share >= floor, message, figures=figures)


def plan_paths_in_task(
    selected: pa.Table, agent_scores: pa.Table, tasks: pa.Table, section: GatesSection
) -> CheckOutcome:
    """The share of the selected agents' plans of which every entity occurs in the task's text, against its floor.

    A plan that names nothing does not pass. Plans of unknown tasks are left out and counted.
    """
    text = dict(zip(tasks["task_id"].to_pylist(), tasks["instruction"].to_pylist(), strict=True))
    task = dict(zip(selected["rollout_id"].to_pylist(), selected["task_id"].to_pylist(), strict=True))
    hits, clusters, strange, unknown, plans = [], [], [], 0, 0
    for row in agent_scores.to_pylist():
        if row["rollout_id"] not in task or row["plan_entities"] is None:
            continue
        plans += 1
        instruction = text.get(task[row["rollout_id"]])
        if instruction is None:
            unknown += 1
            continue
        named = json.loads(row["plan_entities"])
        missing = [entity for entity in named if entity not in instruction]
        strange += [f"{entity} ({task[row['rollout_id']]})" for entity in missing]
        hits.append(float(bool(named) and not missing))
        clusters.append(str(task[row["rollout_id"]]))
    floor = section.plan_paths_in_task
    figures = {"plans": plans, "unknown_task": unknown, "judged": len(hits)}
    estimate = rate(hits, clusters)
    if estimate is None:
        message = f"Cannot be decided: none of {plans} plans is of a known task."
        return CheckOutcome("plan_paths_in_task", True, message, figures=figures)
    passed = estimate.value >= floor
    message = f"Plans whose entities all occur in their task: {decide(estimate, floor)[1]}; {unknown} of unknown tasks."
    if not passed:
        message += (
            f" Plans name what the task does not, first {strange[:_SHOWN]}: the student would learn names that "
            "have nothing to do with its task. Require plan_content, or take another teacher."
        )
    return CheckOutcome("plan_paths_in_task", passed, message, figures={**figures, "rate": estimate.value})


def prompt_length_ratio(training: Sequence[int], evaluation: Sequence[int], section: GatesSection) -> CheckOutcome:
    """Median first-turn prompt of evaluation and of training, in tokens: neither may be many times the other."""
    name, bound = "prompt_length_ratio", section.prompt_length_ratio
    figures = {"training": len(training), "evaluation": len(evaluation)}
    if not training or not evaluation:
        side = "training" if not training else "evaluation"
        return CheckOutcome(
            name, True, f"Cannot be decided: there are no first-turn prompts of {side}.", figures=figures
        )
    ours, theirs = median(training), median(evaluation)
    ratio = max(ours / theirs, theirs / ours)
    message = (
        f"Median first prompt {ours:.0f} tokens in training (n = {len(training)}), {theirs:.0f} in evaluation "
        f"(n = {len(evaluation)}): ratio {ratio:.2f}, bound {bound:.2f}."
    )
    if ratio > bound:
        message += " What is learnt on one length fails on the other: take tasks of the evaluation's registers."
    return CheckOutcome(name, ratio <= bound, message, figures={**figures, "ratio": ratio})


def template_distance(
    training: Sequence[Sequence[int]], evaluation: Sequence[Sequence[int]], section: GatesSection
) -> CheckOutcome:
    """How much of what all evaluation prompts have in common the training prompts lack, against its bound.

    The common part is the runs of 6 ids in at least 90 % of the evaluation's first-turn prompts; the distance is the
    mean share of them that a training prompt has not: 0 for the same template, 1 for another.
    """
    name, bound = "template_distance", section.template_distance
    figures: dict[str, Any] = {"training": len(training), "evaluation": len(evaluation)}
    if not training or len(evaluation) < 2:
        message = "Cannot be decided: it takes a training prompt and two of evaluation to tell a template from a task."
        return CheckOutcome(name, True, message, figures=figures)
    seen: Counter[tuple[int, ...]] = Counter(run for prompt in evaluation for run in _runs(prompt))
    common = {run for run, n in seen.items() if n >= _COMMON * len(evaluation)}
    if not common:
        message = f"Cannot be decided: {len(evaluation)} evaluation prompts have nothing in common."
        return CheckOutcome(name, True, message, figures=figures)
    distance = float(np.mean([1 - len(common & _runs(prompt)) / len(common) for prompt in training]))
    message = (
        f"Training prompts lack {distance:.2f} of what {len(evaluation)} evaluation prompts share, bound {bound:.2f}."
    )
    if distance > bound:
        message += (
            " The student would be trained on another template than it is given: compare system and user messages."
        )
    return CheckOutcome(
        name, distance <= bound, message, figures={**figures, "distance": distance, "common": len(common)}
    )


def _runs(prompt: Sequence[int]) -> set[tuple[int, ...]]:
    return {tuple(prompt[i : i + _RUN]) for i in range(len(prompt) - _RUN + 1)}


def skip_rate(found: int, lost: Mapping[str, str], section: GatesSection) -> CheckOutcome:
    """The share of inputs lost before training for reasons other than selection, with their names.

    Args:
        found: rollouts and quarantined inputs.
        lost: name -> reason of each one lost.
    """
    share = len(lost) / found if found else 1.0
    reasons = Counter(reason.partition(":")[0] for reason in lost.values())
    bound = section.skip_rate
    named = ", ".join(f"{name} ({reason})" for name, reason in list(lost.items())[:10])
    message = f"{len(lost)} of {found} inputs lost ({share:.2f}, bound {bound:.2f})"
    message += f": {named}{', ...' if len(lost) > 10 else ''}." if lost else "."
    if share > bound:
        message += " Mend what refuses them, or say in gates.override why the rest is enough."
    return CheckOutcome("skip_rate", share <= bound, message, figures={"found": found, "lost": len(lost), **reasons})


def turns_lost(rows: pa.Table, from_pairs: pa.Table, from_rows: pa.Table, section: GatesSection) -> CheckOutcome:
    """The share of turns, and of their output tokens, that the selected rollouts lost on the way to the data set.

    Args:
        rows: `dataset_rows`. from_pairs, from_rows: what `tito_pairs` and `upweighted_dataset` dropped. Turns that are
            held out on purpose are no loss; a turn without ids counts as a turn, not in tokens.
    """
    lost = pa.concat_tables([from_pairs, from_rows])
    lost = lost.filter(~pc.field("reason").isin(_HELD_OUT))
    reasons = Counter(lost["reason"].to_pylist())
    turns = len(rows) + len(lost)
    gone, kept = (pc.sum(t["output_tokens"]).as_py() or 0 for t in (lost, rows))  # pyright: ignore[reportAttributeAccessIssue]
    share = len(lost) / turns if turns else 1.0
    token_share = gone / (gone + kept) if gone + kept else 1.0
    bound = section.turns_lost
    told = ", ".join(f"{reason} {n}" for reason, n in reasons.most_common()) or "none"
    message = (
        f"{len(lost)} of {turns} turns lost ({share:.2f}) and {gone} of {gone + kept} output tokens "
        f"({token_share:.2f}), bound {bound:.2f}: {told}."
    )
    passed = max(share, token_share) <= bound
    if not passed:
        remedy = _REMEDIES.get(reasons.most_common(1)[0][0], "see the tables `dropped` for each turn's reason")
        message += f" The student would be trained on the rest alone: {remedy}, or raise gates.turns_lost."
    figures = {"turns": turns, "turns_lost": len(lost), "tokens": gone + kept, "tokens_lost": gone, **reasons}
    return CheckOutcome("turns_lost", passed, message, figures=figures)
