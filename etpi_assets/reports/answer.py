"""The answer that an experiment's page, report and model card begin with: the student's verdicts in one sentence, and
one task as an example."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.reports import facts
from etpi_assets.reports.changes import ORDER
from etpi_assets.scoring.rewards.verdict import INFRASTRUCTURE, UNKNOWN, read_reward
from etpi_resources.links import REPORTED_VIEW, rollout_page, task_page

ROLES = {"base": "the base", "sft": "the fine-tuned checkpoint (sft)", "rl": "the reinforced checkpoint (rl)"}
REASONS = {
    "no_patch": "no agent changed a file that counts",
    "failed_tests": "the work was graded and is wrong",
    "low_reward": "the recorded reward is below 1",
    "merge_conflict": "git could not merge the agents' changes",
    "cheated": "the patch also passed tests that were made wrong on purpose",
    "broken_by_agent": "the agent's files or commands broke its sandbox or the judge",
    "infrastructure": "something outside the model failed, so it does not count",
    "unknown": "nothing judged it",
}
"""Verdict -> its reason in words."""
MOST_STEPS = 6
"""Steps of an attempt in the example."""
_LONGEST = 160


def last_role(roles: Iterable[str | None]) -> str | None:
    """Return the last of the evaluated roles; None without one."""
    return max((role for role in roles if role in ORDER), key=ORDER.index, default=None)


def dominant(verdicts: Mapping[str, int]) -> str | None:
    """Return the most frequent verdict of counted rollouts that did not pass; None if all passed."""
    failed = {verdict: count for verdict, count in verdicts.items() if verdict not in ("passed", INFRASTRUCTURE)}
    return max(failed, key=lambda verdict: (failed[verdict], verdict), default=None)


def why(role: str, verdicts: Mapping[str, int], teacher: Mapping[str, int]) -> str:
    """Return the sentence about a role's verdicts: how many passed, and the most frequent failure with its reason.

    No total includes infrastructure errors; a separate sentence counts the role's.

    Args:
        verdicts, teacher: verdict -> rollouts, of the role in all decodings and of the experiment's rollout sets.
    """
    verdict, uncounted = dominant(verdicts), verdicts.get(INFRASTRUCTURE, 0)
    apart = f" {uncounted} more ended as `{INFRASTRUCTURE}`: {REASONS[INFRASTRUCTURE]}." if uncounted else ""
    passed = f"{verdicts.get('passed', 0)} of {_counted(verdicts)} rollouts of {ROLES[role]} passed"
    if role == "base" and verdicts.get("passed", 0) in (0, _counted(verdicts)):
        apart += f" Tasks that are {'never' if verdict else 'always'} solved give reinforcement no advantage."
    if verdict is None:
        return f"{passed}.{apart}"
    reason = f": {REASONS[verdict]}" if verdict in REASONS else ""
    same = f", as did {teacher[verdict]} of the teacher's {_counted(teacher)}" if teacher.get(verdict) else ""
    return f"{passed}; {verdicts[verdict]} ended as `{verdict}`{reason}{same}.{apart}"


def _counted(verdicts: Mapping[str, int]) -> int:
    return sum(verdicts.values()) - verdicts.get(INFRASTRUCTURE, 0)


def verdicts_of(scores: pa.Table, rollouts: pa.Table, role: str | None) -> Counter[str]:
    """Count the verdicts of a role's evaluated rollouts, in all decodings."""
    ids = set(rollouts.filter(pc.field("checkpoint_role") == pa.scalar(role, pa.string()))["rollout_id"].to_pylist())
    return Counter(row["verdict"] or UNKNOWN for row in scores.to_pylist() if row["rollout_id"] in ids)


def verdicts_of_outcomes(outcomes: Sequence[str | None]) -> Counter[str]:
    """Count the verdicts among the column `outcome` of a rollout set."""
    return Counter(read_reward(outcome, None).verdict for outcome in outcomes if outcome)


def pick(pairs: Sequence[Mapping[str, Any]], verdict: str | None) -> Mapping[str, Any] | None:
    """Return the pair of rollouts that shows the answer: one that was gained if most are, else one with the verdict.

    Args:
        pairs: with the keys change (lost, gained, both solved or neither solved), student_verdict, decoding, task_id.
        verdict: the student's most frequent failure.
    """
    changes = Counter(pair["change"] for pair in pairs)
    gained = changes["gained"] > len(pairs) / 2
    wanted = [p for p in pairs if (p["change"] == "gained" if gained else p["student_verdict"] == verdict)]
    return min(wanted or pairs, key=lambda pair: (pair["decoding"] or "", pair["task_id"]), default=None)


def example(experiment: str, rollouts: pa.Table, scores: pa.Table, turns: pa.Table) -> dict[str, Any] | None:
    """Return a task that the first and the last evaluated role worked on, under one decoding; None without such a task.

    Args:
        turns: of the evaluation, with rollout_id, agent_id, turn and actions.

    Returns:
        task_id, decoding, link; attempts: role, verdict, exit_status, link of each role's rollout, and its first steps,
        each of which is a command or a message.
    """
    pairs = facts.run_query("pages/changes.sql", {"rollouts": rollouts, "scores": scores}, {})
    role = last_role(rollouts["checkpoint_role"].to_pylist())
    chosen = pick(pairs, dominant(verdicts_of(scores, rollouts, role)))
    if chosen is None:
        return None
    attempts = [
        {
            "role": of_side,
            "verdict": chosen[f"{side}_verdict"] or UNKNOWN,
            "exit_status": chosen[f"{side}_exit"] or "",
            "steps": _steps(turns, chosen[f"{side}_rollout"]),
            "link": REPORTED_VIEW + rollout_page("eval", experiment, chosen[f"{side}_rollout"]),
        }
        for side, of_side in (("base", "base"), ("student", chosen["student_role"]))
    ]
    link = REPORTED_VIEW + task_page(experiment, chosen["task_id"])
    return {"task_id": chosen["task_id"], "decoding": chosen["decoding"], "link": link, "attempts": attempts}


def _steps(turns: pa.Table, rollout_id: str) -> list[str]:
    """Return the first steps of a rollout, turn by turn."""
    rows = [row for row in turns.select(_TURN).to_pylist() if row["rollout_id"] == rollout_id]
    steps = []
    for row in sorted(rows, key=lambda row: (row["turn"], row["agent_id"]))[:MOST_STEPS]:
        actions = json.loads(row["actions"] or "[]")
        texts = [action.get("message") or action.get("command") or action["kind"] for action in actions]
        text = " ".join("; ".join(texts).split()) or "no readable action"
        steps.append(f"{row['agent_id']}: {text[:_LONGEST]}{'…' if len(text) > _LONGEST else ''}")
    return steps


_TURN = ["rollout_id", "agent_id", "turn", "actions"]
