"""plan_first, plan_content and follow_through of recorded rollouts, with the reason of every failure.

docs/own_data.md ("Behaviours") defines the three. Where the definition is open, this module decides:
- A turn without a readable action has no action. An agent with only such turns has `no readable action`.
- The plan is the first message an agent sends. Following through on a path counts even if the task does not name it,
  since the file may be a new one. Functions must occur in the task, because any word with an underscore looks like one.
- A responder's acknowledgement must name two paths (one, where the task and the messages name only one), and two (or
  all, if fewer) of the paths in the messages it had received.
- "By turn 5" means turn <= 5, counted from 0. An agent that sends no message has no plan to follow through.
- All three behaviours are null where a single agent acts, and after an infrastructure error.

The readings of the published report are in `published`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from etpi_assets.checks import outcome
from etpi_assets.scoring import published
from etpi_assets.scoring.agent_traces import AgentTrace, TaskEntities, before_first_turn, read_traces
from etpi_assets.scoring.entities import KnownFiles, Patterns, edited, touched
from etpi_assets.scoring.published import PublishedReading
from etpi_assets.scoring.rewards.verdict import Reward, read_reward
from etpi_assets.scoring.structure import score_turns
from etpi_assets.specs.rollout_set import ScoringSection
from etpi_resources.chat.grammars import ThinkGrammar
from etpi_resources.lake.check_outcome import CheckOutcome
from etpi_resources.lake.schemas import from_rows

EARLY_TURN = 5

_FOLLOW = ("follow_through", "follow_own", "follow_edited", "follow_by_turn_5")
PAIR_RATES = ("plan_first", "plan_content", "plan_first_published", "plan_content_published")
AGENT_RATES = (*_FOLLOW, "follow_through_published")
"""The columns of `scores` and of `agent_scores` that are rates."""
_ROLLOUT_COLUMNS = ["rollout_id", "task_id", "repo", "exit_status", "outcome", "error"]


@dataclass(frozen=True)
class ScoringOptions:
    """Options of scoring rollouts.

    Attributes:
        section: the patterns, keywords and window of the spec.
        entities: task id -> files and functions of the task beyond those in its instruction (`Family.entities`).
        structure: the structure think blocks are checked against; None checks none.
        tools: whether agents were offered tools; counts the turns that call one, from `turns.observation`.
    """

    section: ScoringSection
    entities: Mapping[str, Sequence[str]] = field(default_factory=dict)
    structure: ThinkGrammar | None = None
    tools: bool = False


def score(
    rollouts: pa.Table,
    agents: pa.Table,
    turns: pa.Table,
    tasks: pa.Table,
    options: ScoringOptions,
    messages: pa.Table | None = None,
) -> dict[str, pa.Table]:
    """Score every rollout.

    Args:
        rollouts, agents, turns: tables of those names.
        tasks: the suite's tasks; only `task_id` and `instruction` are read.
        messages: the captured conversation. Only messages before the first turn are used: those of kind "inbox", and
            the prompt, which is the task's text if `tasks` lacks the task.

    Returns:
        {"scores", "agent_scores", "turn_scores"}: a row per rollout, per agent and, if there is a structure, per turn,
        in the order of `rollouts`, `agents` and `turns`.
    """
    patterns, reading = Patterns.of(options.section), PublishedReading.of(options.section)
    turn_scores = score_turns(turns, options.structure)
    adherent = Counter((r["rollout_id"], r["agent_id"]) for r in turn_scores.to_pylist() if r["adheres"])
    instructions = dict(zip(tasks["task_id"].to_pylist(), tasks["instruction"].to_pylist(), strict=True))
    prompts, early_messages = before_first_turn(messages)
    traces = read_traces(agents, turns, early_messages, options.section, tools=options.tools)
    keywords = [_keyword(word) for word in options.section.keywords]
    entities_of_text: dict[str, TaskEntities] = {}
    rows: dict[str, list[dict[str, Any]]] = {"scores": [], "agent_scores": []}
    for rollout in rollouts.select(_ROLLOUT_COLUMNS).to_pylist():
        text = instructions.get(rollout["task_id"]) or prompts.get(rollout["rollout_id"]) or ""
        text = "\n".join([text, *options.entities.get(rollout["task_id"], ())]).strip()
        if text not in entities_of_text:
            entities_of_text[text] = TaskEntities.of(text or None, patterns)
        reward = read_reward(rollout["outcome"], rollout["error"], rollout["rollout_id"])
        team = traces.get(rollout["rollout_id"], [])
        scorer = _RolloutScorer(team, entities_of_text[text], patterns, keywords, options.section.window, reading)
        behaviours = scorer.not_applicable("infrastructure error") if reward.infrastructure else scorer.behaviours()
        rows["scores"].append(_rollout_row(rollout, reward, team, behaviours.rollout))
        for trace, behaviour in zip(team, behaviours.agents, strict=True):
            adherent_turns = adherent[rollout["rollout_id"], trace.agent_id] if options.structure is not None else None
            row = _agent_row(rollout["rollout_id"], trace, behaviour, tools=options.tools)
            rows["agent_scores"].append(row | {"adherent_turns": adherent_turns})
    return {name: from_rows(name, of_table) for name, of_table in rows.items()} | {"turn_scores": turn_scores}


def every_rollout_scored(
    rollouts: pa.Table, agents: pa.Table, scores: pa.Table, agent_scores: pa.Table
) -> CheckOutcome:
    """Check that every rollout and agent is scored exactly once; count infrastructure errors."""
    expected = Counter(rollouts["rollout_id"].to_pylist()), Counter(_agent_keys(agents))
    scored = Counter(scores["rollout_id"].to_pylist()), Counter(_agent_keys(agent_scores))
    errors = sum(scores["infrastructure_error"].to_pylist())
    figures = {"rollouts": len(rollouts), "agents": len(agents), "infrastructure_errors": errors}
    wrong = [str(k) for a, b in zip(expected, scored, strict=True) for k in sorted((a - b) + (b - a))]
    return outcome("every_rollout_scored", not wrong, figures, wrong=len(wrong), first=wrong[:3])


def _agent_keys(table: pa.Table) -> list[tuple[str, str]]:
    return list(zip(table["rollout_id"].to_pylist(), table["agent_id"].to_pylist(), strict=True))


def _rollout_row(
    rollout: Mapping[str, Any], reward: Reward, team: Sequence[AgentTrace], behaviours: Mapping[str, Any]
) -> dict[str, Any]:
    tokens = [trace.output_tokens for trace in team if trace.output_tokens is not None]
    return {
        "rollout_id": rollout["rollout_id"],
        "task_id": rollout["task_id"],
        "repo": rollout["repo"],
        "reward": reward.reward,
        "verdict": reward.verdict,
        **behaviours,
        "output_tokens": sum(tokens) if tokens and len(tokens) == len(team) else None,
        "turns": sum(trace.turns for trace in team),
        "exit_status": rollout["exit_status"],
        "infrastructure_error": reward.infrastructure,
        "judge": reward.judge,
        "verdict_trust": reward.trust,
    }


def _agent_row(rollout_id: str, trace: AgentTrace, behaviour: Mapping[str, Any], *, tools: bool) -> dict[str, Any]:
    return {
        "rollout_id": rollout_id,
        "agent_id": trace.agent_id,
        **behaviour,
        "parse_rate": 1 - trace.unreadable_turns / trace.turns if trace.turns else None,
        "turns": trace.turns,
        "output_tokens": trace.output_tokens,
        "think_tokens": trace.think_tokens,
        "post_think_tokens": trace.post_think_tokens,
        "tool_turns": trace.tool_turns if tools else None,
        "exit_status": trace.exit_status,
    }


@dataclass(frozen=True)
class _Behaviours:
    """The behaviour columns of a rollout's row in `scores`, and of its agents' rows in `agent_scores`."""

    rollout: dict[str, Any]
    agents: list[dict[str, Any]]


class _RolloutScorer:
    """Computes the behaviours of one rollout."""

    def __init__(
        self,
        agents: Sequence[AgentTrace],
        task: TaskEntities,
        patterns: Patterns,
        keywords: Sequence[re.Pattern[str]],
        window: int | None,
        reading: PublishedReading,
    ) -> None:
        self.agents, self.task, self.patterns, self.keywords, self.window = agents, task, patterns, keywords, window
        self.reading = reading
        self.plans = {a.agent_id: task.named_in(a.plan[1], patterns) if a.plan else [] for a in agents}

    def not_applicable(self, reason: str) -> _Behaviours:
        """Return null for every behaviour, with the reason."""
        pair = {"plan_first": None, "plan_first_reason": reason, "plan_content": None, "plan_content_reason": reason}
        rows = [self._agent_columns(a, None, None, {}, reason) for a in self.agents]
        return _Behaviours(pair | {"follow_through": None} | dict.fromkeys(published.COLUMNS), rows)

    def behaviours(self) -> _Behaviours:
        """Return every behaviour of the rollout and its agents."""
        if len(self.agents) < 2:
            return self.not_applicable("one agent alone" if self.agents else "missing agents")
        first = {agent.agent_id: self.plan_first(agent) for agent in self.agents}
        content = {agent.agent_id: self.plan_content(agent) for agent in self.agents}
        followed = [self.follow_through(agent) for agent in self.agents]
        rows = [
            self._agent_columns(agent, first[agent.agent_id] is None, content[agent.agent_id] is None, follow, reason)
            for agent, (follow, reason) in zip(self.agents, followed, strict=True)
        ]
        share = sum(follow["follow_through"] for follow, _ in followed) / len(followed)
        pair = {**_pair("plan_first", first), **_pair("plan_content", content), "follow_through": share}
        as_published = self.reading.of_agents(self.agents)
        rows = [row | columns for row, columns in zip(rows, as_published, strict=True)]
        return _Behaviours(pair | published.of_rollout(as_published), rows)

    def plan_first(self, agent: AgentTrace) -> str | None:
        """Return why the agent did not plan first; None if it did."""
        if not agent.turns:
            return "missing assistant turns"
        if not agent.actions:
            return "no readable action"
        turn, action = agent.actions[0]
        if action["kind"] != "send_message":
            return "first action not send_message"
        if not action["pure"]:
            return "first action not a pure send_message"
        before = agent.received(turn)
        if before:
            return self._acknowledges(action["message"] or "", [text for _, _, text in before])
        bash = next((t for t, a in agent.actions if a["kind"] == "bash"), None)
        if not agent.received(agent.turns if bash is None else bash):
            return "no INBOX" if bash is None else "no INBOX before bash"
        return None

    def _acknowledges(self, answer: str, proposals: Sequence[str]) -> str | None:
        named = {self.task.files.canonical(path) for path in self.patterns.paths(answer)}
        proposed = {self.task.files.canonical(path) for text in proposals for path in self.patterns.paths(text)}
        wanted = min(2, max(1, len(self.task.paths | proposed)))
        if len(named) >= wanted and len(named & proposed) >= min(2, len(proposed)):
            return None
        count = min(len(named), len(named & proposed) if proposed else len(named))
        return f"acknowledgement names {count} of {wanted} paths"

    def plan_content(self, agent: AgentTrace) -> str | None:
        """Return why the agent's first message is not a plan; None if it is one."""
        if not agent.turns:
            return "missing assistant turns"
        if agent.plan is None:
            return "no message sent"
        text = agent.plan[1]
        words = self.patterns.path.sub(" ", text.replace("\u2019", "'").replace("\u2018", "'"))
        matches = sum(1 for keyword in self.keywords if keyword.search(words))
        reasons = [f"keywords {matches} of 2"] if matches < 2 else []
        if self.task.text is None:
            reasons.append("the task is unknown, so no entity can be checked")
        elif not any(e in self.task.functions or e in self.task.files for e in self.plans[agent.agent_id]):
            reasons.append("no task entity named")
        return "; ".join(reasons) or None

    def follow_through(self, agent: AgentTrace) -> tuple[dict[str, bool], str | None]:
        """Return the four follow-through columns, and why `follow_through` failed; None if it did not."""
        union = {entity for plan in self.plans.values() for entity in plan}
        own_entities = set(self.plans[agent.agent_id])
        result: dict[str, bool] = dict.fromkeys(_FOLLOW, False)
        if agent.plan is None:
            return result, "no plan message" if agent.turns else "missing assistant turns"
        if not union:
            return result, "plan names no entity"
        after = [(t, a["command"]) for t, a in agent.actions[agent.plan[0] + 1 :] if a["kind"] == "bash"]
        if not after:
            return result, "no bash after the plan"
        allowed = sorted({turn for turn, _ in after})[: self.window]
        files = KnownFiles({*self.task.paths, *union})
        names = {entity.rsplit("/", 1)[-1] for entity in union}
        for turn, command in after:
            if turn > EARLY_TURN and result["follow_own"] and result["follow_edited"]:
                break  # nothing that a later command could add
            if not any(name in command for name in names):
                continue
            hit = touched(command, self.patterns, files) & union
            if turn <= EARLY_TURN and hit:
                result["follow_by_turn_5"] = True
            if turn in allowed and hit:
                result["follow_through"] = True
                result["follow_own"] |= bool(hit & own_entities)
                if not result["follow_edited"]:
                    result["follow_edited"] = bool(edited(command, self.patterns, files) & union)
        if result["follow_through"]:
            return result, None
        return result, f"never touched: {', '.join(sorted(union)[:4])}"

    def _agent_columns(
        self,
        agent: AgentTrace,
        first: bool | None,
        content: bool | None,
        follow: Mapping[str, bool],
        reason: str | None,
    ) -> dict[str, Any]:
        entities = self.plans[agent.agent_id]
        return {
            "plan_first": first,
            "plan_content": content,
            **{name: follow.get(name) for name in _FOLLOW},
            **dict.fromkeys(published.COLUMNS),
            "reason": reason,
            "plan_entities": json.dumps(entities) if agent.plan else None,
        }


def _pair(name: str, reasons: Mapping[str, str | None]) -> dict[str, Any]:
    failed = [f"{agent_id}: {reason}" for agent_id, reason in reasons.items() if reason]
    return {name: not failed, f"{name}_reason": "; ".join(failed) or None}


def _keyword(word: str) -> re.Pattern[str]:
    """Match a whole word in any case; the straight apostrophe is part of a word ("you" is not in "you'll")."""
    return re.compile(rf"(?<!\w)(?<!\w'){re.escape(word)}(?!\w|'\w)", re.IGNORECASE)
