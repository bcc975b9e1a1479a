"""Rejection sampling: selects the rollouts to train on and records why the others are dropped.

Only rollouts of origin "set" are candidates, not those of evaluation and reinforcement. The rules of `SelectSection`
apply in this order, and the first that a rollout fails drops it: infrastructure errors, excluded repositories, the
way it ended, the reward, the trust, the required behaviours, a refusal by the student's template, turns that other
rollouts have, shortest-correct, the first N, rollouts that the spec names.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.checks import outcome
from etpi_assets.curation.joins import Joined, Paths, join
from etpi_assets.curation.lost import listed_with_keys
from etpi_assets.specs.experiment import SelectSection
from etpi_assets.tasks.family import is_trusted
from etpi_assets.trajectories.records import exit_kind
from etpi_resources.lake.check_outcome import BadData, CheckOutcome
from etpi_resources.lake.schemas import from_rows

COLUMNS = [
    "rollout_id", "origin", "rollout_set", "suite", "task_id", "repo", "teacher", "sample", "engine", "source",
]  # fmt: skip
"""The columns that selection reads of `rollouts`."""
REFUSED = "refused_by_template"


@dataclass(frozen=True)
class RolloutCandidate:
    """A rollout and the values that the rules use; `order` is its task's position in order of first appearance."""

    rollout: Mapping[str, Any]
    score: Mapping[str, Any]
    tokens: int
    order: int

    @property
    def rollout_id(self) -> str:
        return self.rollout["rollout_id"]

    @property
    def length(self) -> tuple[int, int, int]:
        """The key that shortest-correct minimises: output tokens, then turns, then the sample."""
        return self.tokens, self.score["turns"], self.rollout["sample"]


class RewardRule(NamedTuple):
    """The rule by which rewards select, with its figures; and why its threshold is wrong for the rollouts, if it is."""

    text: str
    problem: str | None = None


def resolved(section: SelectSection, rollouts: pa.Table, scores: pa.Table) -> tuple[SelectSection, RewardRule]:
    """Return the section with a threshold for `min_reward = "auto"`, and the rule: 1.0 if any rollout has a reward."""
    offered = rollouts.filter(pc.field("origin") == "set")
    set_of = dict(zip(offered["rollout_id"].to_pylist(), offered["rollout_set"].to_pylist(), strict=True))
    usable = scores.filter(
        ~pc.field("infrastructure_error") & pc.field("rollout_id").isin(pa.array(set_of, pa.string()))
    )
    rewarded = usable.filter(pc.field("reward").is_valid())
    rewards = rewarded["reward"].to_pylist()
    sets, sets_with_rewards = ({set_of[i] for i in table["rollout_id"].to_pylist()} for table in (usable, rewarded))
    automatic = section.min_reward == "auto"
    threshold = (1.0 if rewards else None) if section.min_reward == "auto" else section.min_reward
    resolved_section = section.model_copy(update={"min_reward": threshold})
    if threshold is None:
        why = "no rollout has one" if automatic else 'select.min_reward = "none"'
        return resolved_section, RewardRule(f"rewards select nothing ({why}): {len(usable)} rollouts offered")
    passing = sum(reward >= threshold for reward in rewards)
    how = "auto: some rollouts have one" if automatic else "select.min_reward"
    text = f"reward >= {threshold:g} ({how}): {len(rewards)} of {len(usable)} rollouts have a reward, {passing} pass"
    problem = None
    if automatic and (unscored := sets - sets_with_rewards):
        problem = f"no rollout of {', '.join(sorted(unscored))} has a reward, so all are dropped; set select.min_reward"
    elif automatic and max(rewards) > threshold:
        problem = f"the highest reward is {max(rewards):g}, so 1 is not the full reward; set select.min_reward"
    elif automatic and not passing:
        problem = f'no rollout has the full reward 1, the highest is {max(rewards):g}; set select.min_reward, or "none"'
    return resolved_section, RewardRule(text, problem)


def select(
    rollouts: pa.Table,
    scores: pa.Table,
    section: SelectSection,
    tokens: Mapping[str, int] | None = None,
    paths: Mapping[str, Paths] | None = None,
    refused: Mapping[str, str] | None = None,
) -> dict[str, pa.Table]:
    """Return {"selected", "dropped"}: the selected rollouts in task order, then by sample.

    Args:
        rollouts, scores: tables of those names; every rollout of origin "set" has one score.
        tokens: output tokens, in the student's tokenizer, of rollouts without captured ids, whose score has none.
        paths: the keys of the turns of rollouts that may share turns with others.
        refused: rollout -> why the student's template refuses one of its turns.

    Shortest-correct considers only rollouts with reward 1, so it drops all others even if `min_reward` is none. Tokens
    are counted as captured, over all agents, before think blocks are stripped.

    Raises:
        BadData: a rollout is in two rollout sets, which import the same runs; names both.
        ValueError: a rollout has no score, or no token count where one is needed; names it.
    """
    candidates = _candidates(rollouts, scores, section, tokens or {})
    drops: dict[str, tuple[str, str]] = {}
    remaining: list[RolloutCandidate] = []
    if section.min_reward == "auto":
        section, _ = resolved(section, rollouts, scores)
    for candidate in candidates:
        name = candidate.rollout_id
        if reason := _failed_rule(candidate, section):
            drops[name] = reason
        elif name in (refused or {}):
            drops[name] = REFUSED, (refused or {})[name]
        else:
            remaining.append(candidate)
    shared = (paths or {}) if section.duplicates == "drop" else {}
    for name, (other, equal) in join([candidate.rollout_id for candidate in remaining], shared).covered.items():
        what = "the row of rollout {} again" if equal else "all its turns are turns of rollout {}"
        drops[name] = "duplicate" if equal else "part_of_another", what.format(other)
    remaining = [candidate for candidate in remaining if candidate.rollout_id not in drops]
    if section.shortest_correct:
        remaining = _shortest(remaining, drops)
    remaining.sort(key=lambda c: (c.order, c.rollout["rollout_set"] or "", c.rollout["sample"]))
    if section.max_rollouts is not None:
        chosen = _first_per_task(remaining, section.max_rollouts)
        for candidate in remaining:
            if candidate.rollout_id not in chosen:
                drops[candidate.rollout_id] = "over_max_rollouts", f"select.max_rollouts = {section.max_rollouts}"
        remaining = [candidate for candidate in remaining if candidate.rollout_id in chosen]
    without = {c.rollout_id for c in remaining} & {*section.exclude_rollouts}
    drops |= dict.fromkeys(without, ("excluded_rollout", "select.exclude_rollouts names it"))
    remaining = [candidate for candidate in remaining if candidate.rollout_id not in without]
    joined = join([candidate.rollout_id for candidate in remaining], shared)
    selected = [_selected_row(candidate, section, joined) for candidate in remaining]
    dropped = [
        {"stage": "selection", "rollout_id": name, "reason": drops[name][0], "detail": drops[name][1]}
        for name in (candidate.rollout_id for candidate in candidates)
        if name in drops
    ]
    if len(selected) + len(dropped) != len(candidates):
        raise AssertionError(f"{len(selected)} selected + {len(dropped)} dropped rollouts of {len(candidates)} offered")
    return {"selected": from_rows("selected", selected), "dropped": from_rows("dropped", dropped)}


def _shortest(candidates: Sequence[RolloutCandidate], drops: dict[str, tuple[str, str]]) -> list[RolloutCandidate]:
    """Return the shortest candidate of each task; add the others to `drops`."""
    shortest: dict[int, RolloutCandidate] = {}
    for candidate in candidates:
        best = shortest.setdefault(candidate.order, candidate)
        if candidate.length < best.length:
            shortest[candidate.order] = candidate
    for candidate in candidates:
        best = shortest[candidate.order]
        if candidate is not best:
            drops[candidate.rollout_id] = "not_the_shortest", f"{_figures(candidate)}; {_figures(best)} was taken"
    return list(shortest.values())


def _first_per_task(candidates: Sequence[RolloutCandidate], limit: int) -> set[str]:
    """Return the ids of the first `limit` rollouts, every task's first rollout before any task's second.

    The same number of rows teaches more if it covers more tasks.
    """
    seen: Counter[int] = Counter()
    ranked = []
    for candidate in candidates:
        ranked.append((seen[candidate.order], candidate.order, candidate.rollout_id))
        seen[candidate.order] += 1
    return {name for _, _, name in sorted(ranked)[:limit]}


def _candidates(
    rollouts: pa.Table, scores: pa.Table, section: SelectSection, tokens: Mapping[str, int]
) -> list[RolloutCandidate]:
    scored = {row["rollout_id"]: row for row in scores.to_pylist()}
    offered = rollouts.select(COLUMNS).filter(pc.field("origin") == "set")
    sets: dict[str, str] = {}
    order: dict[tuple[Any, Any], int] = {}
    candidates = []
    for row in offered.to_pylist():
        name = row["rollout_id"]
        if name in sets:
            both = f"the rollout sets {sets[name]!r} and {row['rollout_set']!r}"
            raise BadData(f"{both} import the same runs, first {row['source']}, which would train twice; name one set")
        sets[name] = row["rollout_set"]
        if name not in scored:
            raise ValueError(
                f"rollout {name} has no score; materialize scored_rollouts of {row['rollout_set']!r} again"
            )
        score = scored[name]
        count = tokens.get(name) if score["output_tokens"] is None else score["output_tokens"]
        if count is None and section.shortest_correct and not score["infrastructure_error"]:
            raise ValueError(
                f"rollout {name} has no token count, from ids or from text, so its length cannot be compared"
            )
        # Each rollout of an unknown task counts as a task; files of two sets may have the same name.
        task = (row["suite"], named) if (named := _task_of(row)) is not None else ("", name)
        candidates.append(RolloutCandidate(row, score, count or 0, order.setdefault(task, len(order))))
    return candidates


def _task_of(rollout: Mapping[str, Any]) -> str | None:
    """Return the task of a row of `rollouts`; None if its name is only its place (`RunInfo`)."""
    place = (rollout["source"] or "").rpartition("#")
    return None if rollout["task_id"] == f"{place[0]}, row {place[2]}" else rollout["task_id"]


def _failed_rule(candidate: RolloutCandidate, section: SelectSection) -> tuple[str, str] | None:
    """Return the first rule that the rollout fails by itself, as (reason, detail)."""
    score, repo = candidate.score, candidate.rollout["repo"]
    if score["infrastructure_error"]:
        return "infrastructure", score["exit_status"] or ""
    if repo in section.exclude_repos:
        return "excluded_repo", f"select.exclude_repos names {repo}"
    ended = score["exit_status"]
    if section.exit == "ended" and (kind := exit_kind(ended)) != "ended":
        return f"exit_{kind}", f"exit status {ended}"
    if not isinstance(section.exit, str) and ended not in section.exit:
        return "exit_other", f"exit status {ended}"
    if isinstance(section.min_reward, float):
        if score["reward"] is None:
            return "no_reward", f"verdict {score['verdict']}; select.min_reward = {section.min_reward:g}"
        if score["reward"] < section.min_reward:
            return "low_reward", f"reward {score['reward']:g} < {section.min_reward:g}, verdict {score['verdict']}"
    if not is_trusted(trust := score["verdict_trust"], section.min_trust):
        return "low_trust", f"verdict_trust {trust or 'unknown'}; select.min_trust = {section.min_trust}"
    for name in section.require:
        value = score[name]
        if value is None or value < 1:
            return f"no_{name}", score.get(f"{name}_reason") or _share(value)
    if section.shortest_correct and score["reward"] != 1.0:
        return "not_correct", f"reward {score['reward']}, verdict {score['verdict']}"
    return None


def _share(value: float | None) -> str:
    if value is None:
        return "not measured"
    return "not all of its agents" if value is False else f"{value:g} of its agents"


def _selected_row(candidate: RolloutCandidate, section: SelectSection, joined: Joined) -> dict[str, Any]:
    repeated = joined.repeated.get(candidate.rollout_id)
    rules = [f"reward >= {section.min_reward:g}"] if isinstance(section.min_reward, float) else []
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
        "repeated": None if repeated is None else json.dumps(repeated, sort_keys=True),
    }


def _figures(candidate: RolloutCandidate) -> str:
    return f"{candidate.tokens} tokens in {candidate.score['turns']} turns (sample {candidate.rollout['sample']})"


def counts_reconcile(
    rollouts: pa.Table, selected: pa.Table, dropped: pa.Table, rule: RewardRule | None = None
) -> CheckOutcome:
    """Check that selected + dropped are the rollouts of origin "set", each once, and that some were selected.

    It fails too if the rollouts have rewards for which the automatic threshold of `rule` is wrong.
    """
    offered = Counter(rollouts.filter(pc.field("origin") == "set")["rollout_id"].to_pylist())
    accounted = Counter(selected["rollout_id"].to_pylist()) + Counter(dropped["rollout_id"].to_pylist())
    reasons = Counter(dropped["reason"].to_pylist())
    figures = {"offered": offered.total(), "selected": len(selected), "dropped": len(dropped), "reasons": dict(reasons)}
    wrong = sorted((accounted - offered) + (offered - accounted))
    problem = (rule and rule.problem) or ""
    case = "doubled" if wrong else "rule" if problem else ""
    return outcome(
        "selection_reconciles",
        not case and bool(len(selected)),
        figures,
        case=case,
        hint="" if offered else "refused",
        by_reason=listed_with_keys(reasons),
        rule=f"; {rule.text}" if rule else "",
        wrong=len(wrong),
        first=wrong[:3],
        problem=problem,
    )
