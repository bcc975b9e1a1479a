"""Checks of a GRPO run: all rollouts are recorded, advantages follow from rewards, rollout and trainer log-probs agree,
and the weights changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.checks import faulty, judged, outcome, within
from etpi_assets.scoring.rewards.rescore import UNREWARDED
from etpi_assets.specs.training import RLSection
from etpi_assets.training.rounds import ASIDE, ByAgent, advantages_of
from etpi_assets.training.sft_checks import outcomes_of_seeds, proofs
from etpi_resources.lake.check_outcome import CheckOutcome, percent
from etpi_resources.trainers.contracts import GrpoFigures
from etpi_resources.trainers.policy_link import largest_gap


def checks(
    section: RLSection,
    reports: Mapping[int, GrpoFigures],
    tables: Mapping[str, pa.Table],
    tasks: int,
    left_out: Sequence[str],
    rejected: int = 0,
) -> list[CheckOutcome]:
    """Return the outcomes of `rl_checkpoint` for all seeds; `prompts_fit` and `groups_vary` only warn.

    Args:
        tasks: the number of tasks that were trained on.
        left_out: tasks whose prompt is too long.
        rejected: the number of tasks that could not be proved.
    """
    samples = tables["rl_samples"].drop_columns(["policy_logprobs", "entropies", "teacher_logprobs"]).to_pylist()
    varied, proved = _groups_vary(section, samples), proofs(reports)
    if varied.figures["share"] == 1.0:  # the cause of whatever did not change
        proved = [o if o.passed else replace(o, message=f"{varied.message} ({o.message})") for o in proved]
    return [
        _rollouts_recorded(section, list(reports), tables, samples),
        _advantages_hold(section, samples),
        _weights_recent(section, samples),
        *outcomes_of_seeds([partial(_gap, section)], reports),
        prompts_fit(section, tasks, left_out, rejected),
        varied,
        *proved,
    ]


def prompts_fit(section: RLSection, kept: int, left_out: Sequence[str], rejected: int = 0) -> CheckOutcome:
    """Warn of tasks that were left out because their first prompt is longer than `max_prompt_tokens`."""
    figures = {"tasks": kept, "left_out": len(left_out), "quarantined": rejected}
    figures["found"] = sum(figures.values())
    words = {"most": section.max_prompt_tokens, "first": ", ".join(left_out[:5])}
    return outcome("prompts_fit", not left_out, figures, **words)


def _rollouts_recorded(
    section: RLSection, seeds: list[int], tables: Mapping[str, pa.Table], samples: list[dict[str, Any]]
) -> CheckOutcome:
    """Check that every rollout, its rewards and every id that the policy generated are recorded once."""
    rounds = [(seed, step) for seed in seeds for step in range(0, section.last_step, section.iterations)]
    counts = Counter((row["seed"], row["step"]) for row in samples if row["left_out"] not in ASIDE)
    size, ids = section.round_size, {row["rollout_id"] for row in samples}
    problems = [f"seed {s} step {t}: {counts[s, t]} of {size}" for s, t in rounds if counts[s, t] != size]
    if unexpected := counts.keys() - set(rounds):
        problems.append(f"rounds that the run did not request: {sorted(unexpected)[:3]}")
    if ids != set(tables["rollouts"]["rollout_id"].to_pylist()) or len(ids) != len(samples):
        problems.append("samples and rollouts do not match one to one")
    if wrong := _wrong_rewards(section, tables["rewards"], samples):
        problems.append(f"{len(wrong)} rewards are missing or repeated, first {wrong[0]}")
    generated, untrained = Counter[str](), Counter[str]()
    for name, tokens in zip(
        tables["turns"]["rollout_id"].to_pylist(), _lengths(tables["turns"], "output_ids"), strict=True
    ):
        generated[name] += tokens or 0
    for row, trained in zip(samples, _lengths(tables["rl_samples"], "policy_logprobs"), strict=True):
        name, counted, tokens = row["rollout_id"], row["policy_tokens"], generated[row["rollout_id"]]
        if counted != tokens or (row["left_out"] is None and trained not in (tokens, None)):
            problems.append(f"rollout {name}: {tokens} ids generated, {counted} counted, {trained} trained")
        if row["left_out"]:
            untrained[row["left_out"]] += tokens
        untrained["no turn"] += row["untrained_tokens"] or 0
    figures = {"rollouts": len(samples), "ids": generated.total(), "untrained_ids": dict(+untrained)}
    left = ", ".join(f"{n} {reason}" for reason, n in figures["untrained_ids"].items())
    words = {"rounds": len(rounds), "rewards": len(section.rewards), "left": left, "problems": "; ".join(problems[:5])}
    return outcome("rollouts_recorded", not problems, figures, **words)


def _wrong_rewards(section: RLSection, rewards: pa.Table, samples: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return (rollout, function) of each reward that is missing or repeated."""
    scored = Counter((row["rollout_id"], row["function"]) for row in rewards.to_pylist())
    wanted: Counter[tuple[str, str]] = Counter()
    for row in samples:
        if row["left_out"] not in UNREWARDED:
            for term in section.rewards:
                wanted[row["rollout_id"], term.function] += len(row["agent_rewards"] or ()) if term.of == "agent" else 1
    return sorted((wanted - scored) + (scored - wanted))


def _lengths(table: pa.Table, column: str) -> list[int | None]:
    return pc.call_function("list_value_length", [table[column]]).to_pylist()


def _advantages_hold(section: RLSection, samples: list[dict[str, Any]]) -> CheckOutcome:
    """Check that the recorded advantages are exactly those of the recorded rewards."""
    mixed = [g[0]["rollout_id"] for g in _groups(samples, section) if len({r["task_id"] for r in g}) != 1]
    rounds: dict[tuple[int, int], list[list[dict[str, Any]]]] = {}
    for group in _groups(samples, section):
        whole = [row for row in group if row["left_out"] != "broken"]
        rounds.setdefault((group[0]["seed"], group[0]["step"]), []).append(whole)
    wrong = []
    for groups in rounds.values():
        expected = advantages_of(section, [[_by_agent(row, "reward") for row in group] for group in groups])
        compared = zip(chain(*groups), expected, strict=True)
        wrong += [row["rollout_id"] for row, advantages in compared if _by_agent(row, "advantage") != advantages]
    wrong += [row["rollout_id"] for row in samples if row["left_out"] in UNREWARDED | ASIDE and row["advantage"]]
    largest = max((abs(row["advantage"]) for row in samples), default=0.0)
    counted = {"samples": len(samples), "largest": largest, "mixed": faulty(mixed), "wrong": faulty(wrong)}
    return judged("advantages_hold", counted)


def _weights_recent(section: RLSection, samples: list[dict[str, Any]]) -> CheckOutcome:
    """Check that every turn was generated by weights at most `ahead` hand-overs older than those that it trained."""
    lags = [
        (row["step"] - version, row["rollout_id"])
        for row in samples for version in row["turn_versions"] or [row["version"]]
    ]  # fmt: skip
    bound, largest = section.ahead * section.iterations, max(lags, default=(0, ""))[0]
    wrong = faulty((lag, name) for lag, name in lags if not 0 <= lag <= bound)
    return judged("weights_recent", {"largest": largest, "bound": bound, "turns": wrong})


def _by_agent(row: dict[str, Any], name: str) -> ByAgent:
    """Return the reward or advantage of a rollout (None), and of each agent that has its own."""
    return {None: row[name], **dict(zip(row["agents"] or (), row[f"agent_{name}s"] or (), strict=False))}


def _gap(section: RLSection, report: GrpoFigures) -> CheckOutcome:
    served = [section.options["dtype"]] if "dtype" in section.options else []
    bound = largest_gap(*served, report.dtype, report.saved.dtype)
    gaps = [line.logprob_gap for line in report.log if line.logprob_gap is not None]
    mean = sum(gaps) / len(gaps) if gaps else None
    figures, case = {"mean": mean, "bound": bound}, "none" if mean is None else ""
    return outcome("logprobs_agree", mean is not None and mean <= bound, figures, case=case)


def _groups_vary(section: RLSection, samples: list[dict[str, Any]]) -> CheckOutcome:
    equal: dict[int, list[bool]] = {}
    for group in _groups(samples, section):
        equal.setdefault(group[0]["seed"], []).append(
            len({(row["reward"], *(row["agent_rewards"] or ())) for row in group if row["left_out"] != "broken"}) <= 1
        )
    share, seed = max(((sum(groups) / len(groups), seed) for seed, groups in equal.items()), default=(0.0, None))
    if not section.learns_from_rewards:
        return outcome("groups_vary", None, {"share": 0.0})
    passed = within("groups_vary", share)
    return outcome("groups_vary", passed, {"share": share}, seed=seed, percent=percent(share))


def _groups(samples: list[dict[str, Any]], section: RLSection) -> list[list[dict[str, Any]]]:
    """Consecutive samples of the trainer's rounds, `group_size` at a time."""
    samples = [row for row in samples if row["left_out"] not in ASIDE]
    return [samples[at : at + section.group_size] for at in range(0, len(samples), section.group_size)]
