"""What a run of reinforcement proves: its rollouts are all there, its probabilities agree, and it moved the weights.

Belongs here: judging reports and recorded rollouts. Does not belong here: training (`grpo`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from etpi_assets.scoring.advantage import group_advantages
from etpi_assets.specs.training import RLSection
from etpi_assets.training.sft_checks import PROOFS, proofs
from etpi_resources.lake.checks import CheckOutcome
from etpi_resources.trainers.policy_link import largest_gap

CHECKS = ("rollouts_recorded", "advantages_hold", "logprobs_agree", "groups_vary", *PROOFS)

CONSTANT_SHARE = 0.95
"""A run with more groups of equal rewards than this has hardly learnt from anything."""


def checks(
    section: RLSection, reports: Mapping[int, Mapping[str, Any]], tables: Mapping[str, pa.Table]
) -> list[CheckOutcome]:
    """Every check of `CHECKS` over all seeds; `groups_vary` only warns."""
    samples = tables["rl_samples"].to_pylist()
    return [
        _recorded(section, list(reports), tables, samples),
        _advantages(section, samples),
        _agree(section, reports),
        _vary(section, samples),
        *proofs(reports),
    ]


def _recorded(
    section: RLSection, seeds: list[int], tables: Mapping[str, pa.Table], samples: list[dict[str, Any]]
) -> CheckOutcome:
    batch = section.device_batch * section.accumulate
    wanted = {(seed, step): batch for seed in seeds for step in range(0, section.steps, section.iterations)}
    found = Counter((row["seed"], row["step"]) for row in samples)
    ids = {row["rollout_id"] for row in samples}
    scored = Counter(row["rollout_id"] for row in tables["rewards"].to_pylist())
    problems = [f"seed {s} step {t}: {found[s, t]} of {n}" for (s, t), n in wanted.items() if found[s, t] != n]
    problems += (
        [f"rounds nobody asked for: {sorted(found.keys() - wanted.keys())[:3]}"] if found.keys() - wanted.keys() else []
    )
    if ids != set(tables["rollouts"]["rollout_id"].to_pylist()) or len(ids) != len(samples):
        problems.append("samples and rollouts are not the same, each once")
    if short := [name for name in ids if scored[name] != len(section.rewards)]:
        problems.append(f"{len(short)} rollouts lack a reward, first {short[0]}")
    message = f"{len(samples)} rollouts of {len(wanted)} rounds, each with {len(section.rewards)} rewards"
    if problems:
        message = f"{'; '.join(problems[:5])}. Remove the run's folder below checkpoints/rounds and train again"
    return CheckOutcome("rollouts_recorded", not problems, message, figures={"rollouts": len(samples)})


def _advantages(section: RLSection, samples: list[dict[str, Any]]) -> CheckOutcome:
    """The recorded advantages are those of the recorded rewards, exactly."""
    wanted = group_advantages(
        [row["reward"] for row in samples],
        section.group_size,
        eps=section.advantage_eps,
        ddof=section.advantage_ddof,
        scale=section.scale_advantage,
    )
    torn = [g[0]["rollout_id"] for g in _groups(samples, section) if len({r["task_id"] for r in g}) != 1]
    wrong = [row["rollout_id"] for row, value in zip(samples, wanted, strict=True) if row["advantage"] != value]
    message = f"{len(samples)} advantages follow from their groups' rewards"
    if torn or wrong:
        message = f"{len(torn)} groups mix tasks, {len(wrong)} advantages are others, first {[*torn, *wrong][0]}"
    figures = {"samples": len(samples), "largest": max((abs(row["advantage"]) for row in samples), default=0.0)}
    return CheckOutcome("advantages_hold", not torn and not wrong, message, figures=figures)


def _agree(section: RLSection, reports: Mapping[int, Mapping[str, Any]]) -> CheckOutcome:
    served = [section.options["dtype"]] if "dtype" in section.options else []
    computed = [dtype for report in reports.values() for dtype in (report["dtype"], report["saved"]["dtype"])]
    bound = largest_gap(*served, *computed)
    gaps = [line["logprob_gap"] for report in reports.values() for line in report["log"]]
    known = [gap for gap in gaps if gap is not None]
    mean = sum(known) / len(known) if known else None
    passed = mean is not None and mean <= bound
    message = (
        f"rollout and trainer log-probabilities differ by {mean:.2g} nats a token (bound {bound})"
        if known
        else ("no log-probability was compared")
    )
    if not passed:
        message += "; the policy is rolled out with other weights, temperature or template than it is trained with"
    return CheckOutcome("logprobs_agree", passed, message, figures={"mean": mean, "bound": bound})


def _vary(section: RLSection, samples: list[dict[str, Any]]) -> CheckOutcome:
    groups = [[row["reward"] for row in group] for group in _groups(samples, section)]
    share = sum(max(group) == min(group) for group in groups) / max(1, len(groups))
    message = f"{share:.0%} of {len(groups)} groups have equal rewards and teach nothing (bound {CONSTANT_SHARE:.0%})"
    if share > CONSTANT_SHARE:
        message += "; take tasks that the start solves now and then, larger groups, or a reward with more steps"
    return CheckOutcome("groups_vary", share <= CONSTANT_SHARE, message, blocking=False, figures={"share": share})


def _groups(samples: list[dict[str, Any]], section: RLSection) -> list[list[dict[str, Any]]]:
    """The samples of a group together, as they stand one after the other."""
    return [samples[at : at + section.group_size] for at in range(0, len(samples), section.group_size)]
