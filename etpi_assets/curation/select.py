"""Rejection sampling: which rollouts train the student, which do not, and why.

Belongs here: the rules of `SelectSection`, applied in one order, and the account that selected + dropped = offered.
Does not belong here: scoring, or what becomes of a selected rollout's turns.

The order: rollouts of evaluation and reinforcement are never read; infrastructure errors; excluded repositories; the
reward; the required behaviours; shortest-correct; the first N. A rollout is dropped by the first rule it fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.specs.experiment import SelectSection
from etpi_resources.lake.checks import CheckOutcome
from etpi_resources.lake.schemas import from_rows

COLUMNS = ["rollout_id", "origin", "rollout_set", "suite", "task_id", "repo", "teacher", "sample"]
"""What is read of `rollouts`."""


@dataclass(frozen=True)
class Candidate:
    """A rollout with what the rules look at. `order`: position of its task among the tasks, as first met."""

    rollout: Mapping[str, Any]
    score: Mapping[str, Any]
    tokens: int
    order: int

    @property
    def length(self) -> tuple[int, int, int]:
        """What shortest-correct minimises: output tokens, then turns, then the sample."""
        return self.tokens, self.score["turns"], self.rollout["sample"]


def select(
    rollouts: pa.Table, scores: pa.Table, section: SelectSection, tokens: Mapping[str, int] | None = None
) -> dict[str, pa.Table]:
    """{"selected", "dropped"}, in task order, then by sample.

    Args:
        rollouts, scores: tables of those names; every rollout of origin "set" has one score.
        tokens: output tokens of rollouts whose score has none (nothing was captured), in the student's tokenizer.

    Shortest-correct looks at rollouts with reward 1 alone, so it drops all others even where `min_reward` is none.
    Tokens are counted as captured, before think is stripped, over all agents.

    Raises:
        ValueError: a rollout has no score, or no token count where one is needed; names it.
    """
    candidates = _candidates(rollouts, scores, section, tokens or {})
    dropped: list[dict[str, Any]] = []

    def drop(candidate: Candidate, reason: str, detail: str) -> None:
        row = {"stage": "selection", "rollout_id": candidate.rollout["rollout_id"], "reason": reason, "detail": detail}
        dropped.append(row)

    kept: list[Candidate] = []
    for candidate in candidates:
        failed = _fails(candidate, section)
        if failed:
            drop(candidate, *failed)
        else:
            kept.append(candidate)
    if section.shortest_correct:
        shortest: dict[int, Candidate] = {}
        for candidate in kept:
            best = shortest.setdefault(candidate.order, candidate)
            if candidate.length < best.length:
                shortest[candidate.order] = candidate
        for candidate in kept:
            best = shortest[candidate.order]
            if candidate is not best:
                drop(candidate, "not_the_shortest", f"{_figures(candidate)}; {_figures(best)} was taken")
        kept = list(shortest.values())
    kept.sort(key=lambda c: (c.order, c.rollout["rollout_set"] or "", c.rollout["sample"]))
    if section.max_rollouts is not None:
        taken = _spread(kept, section.max_rollouts)
        for candidate in kept:
            if candidate.rollout["rollout_id"] not in taken:
                drop(candidate, "over_max_rollouts", f"select.max_rollouts = {section.max_rollouts}")
        kept = [candidate for candidate in kept if candidate.rollout["rollout_id"] in taken]
    rows = [_row(candidate, section) for candidate in kept]
    if len(rows) + len(dropped) != len(candidates):
        raise AssertionError(f"{len(rows)} selected + {len(dropped)} dropped is not the {len(candidates)} offered")
    order = {candidate.rollout["rollout_id"]: i for i, candidate in enumerate(candidates)}
    dropped.sort(key=lambda row: order[row["rollout_id"]])
    return {"selected": from_rows("selected", rows), "dropped": from_rows("dropped", dropped)}


def _spread(kept: Sequence[Candidate], limit: int) -> set[str]:
    """The ids of the first `limit`, every task's first rollout before any task's second: what is learnt from so many
    rows hangs on how many tasks they are of."""
    seen: Counter[int] = Counter()
    ranked = []
    for candidate in kept:
        ranked.append((seen[candidate.order], candidate.order, candidate.rollout["rollout_id"]))
        seen[candidate.order] += 1
    return {name for _, _, name in sorted(ranked)[:limit]}


def _candidates(
    rollouts: pa.Table, scores: pa.Table, section: SelectSection, tokens: Mapping[str, int]
) -> list[Candidate]:
    scored = {row["rollout_id"]: row for row in scores.to_pylist()}
    offered = rollouts.select(COLUMNS).filter(pc.field("origin") == "set")
    order: dict[tuple[Any, Any], int] = {}
    found = []
    for row in offered.to_pylist():
        name = row["rollout_id"]
        if name not in scored:
            raise ValueError(
                f"rollout {name} has no score; materialize scored_rollouts of {row['rollout_set']!r} again"
            )
        score = scored[name]
        count = tokens.get(name) if score["output_tokens"] is None else score["output_tokens"]
        if count is None and section.shortest_correct and not score["infrastructure_error"]:
            raise ValueError(
                f"rollout {name} has no token count and no text was tokenised for it; it cannot be compared"
            )
        # A rollout of an unknown task is a task of its own.
        task = (row["suite"], row["task_id"]) if row["task_id"] is not None else ("", name)
        found.append(Candidate(row, score, count or 0, order.setdefault(task, len(order))))
    return found


def _fails(candidate: Candidate, section: SelectSection) -> tuple[str, str] | None:
    """The first rule the rollout fails on its own, as (reason, detail)."""
    score, repo = candidate.score, candidate.rollout["repo"]
    if score["infrastructure_error"]:
        return "infrastructure", score["exit_status"] or ""
    if repo in section.exclude_repos:
        return "excluded_repo", f"select.exclude_repos names {repo}"
    if section.min_reward is not None:
        if score["reward"] is None:
            return "no_reward", f"verdict {score['verdict']}; select.min_reward = {section.min_reward:g}"
        if score["reward"] < section.min_reward:
            return "low_reward", f"reward {score['reward']:g} < {section.min_reward:g}, verdict {score['verdict']}"
    for name in section.require:
        value = score[name]
        if value is None or value < 1:
            why = score.get(f"{name}_reason") or (f"{value:g} of its agents" if value is not None else "not measured")
            return f"no_{name}", why
    if section.shortest_correct and score["reward"] != 1.0:
        return "not_correct", f"reward {score['reward']}, verdict {score['verdict']}"
    return None


def _row(candidate: Candidate, section: SelectSection) -> dict[str, Any]:
    rules = [] if section.min_reward is None else [f"reward >= {section.min_reward:g}"]
    rules += [*section.require, *(["shortest_correct"] if section.shortest_correct else [])]
    return {
        **{
            name: candidate.rollout[name]
            for name in ("rollout_id", "rollout_set", "task_id", "repo", "teacher", "sample")
        },
        "reward": candidate.score["reward"],
        "output_tokens": candidate.tokens,
        "turns": candidate.score["turns"],
        "rule": ", ".join(rules) or "all",
    }


def _figures(candidate: Candidate) -> str:
    return f"{candidate.tokens} tokens in {candidate.score['turns']} turns (sample {candidate.rollout['sample']})"


def counts_reconcile(rollouts: pa.Table, selected: pa.Table, dropped: pa.Table) -> CheckOutcome:
    """Selected + dropped are the rollouts of origin "set", each once, and something was selected."""
    offered = Counter(rollouts.filter(pc.field("origin") == "set")["rollout_id"].to_pylist())
    found = Counter(selected["rollout_id"].to_pylist()) + Counter(dropped["rollout_id"].to_pylist())
    reasons = Counter(dropped["reason"].to_pylist())
    figures = {"offered": offered.total(), "selected": len(selected), "dropped": len(dropped), "reasons": dict(reasons)}
    told = f"{offered.total()} rollouts = {len(selected)} selected + {len(dropped)} dropped ({_told(reasons)})"
    if found != offered:
        wrong = sorted((found - offered) + (offered - found))
        message = f"{told}: {len(wrong)} are lost or doubled, first {wrong[:3]}; do not use this version"
        return CheckOutcome("selection_reconciles", False, message, figures=figures)
    if not len(selected):
        message = f"{told}: nothing is left to train on; loosen `select`, or collect rollouts from a better teacher"
        return CheckOutcome("selection_reconciles", False, message, figures=figures)
    return CheckOutcome("selection_reconciles", True, told, figures=figures)


def _told(reasons: Counter[str]) -> str:
    return ", ".join(f"{reason} {n}" for reason, n in reasons.most_common()) or "none"
