"""plan_first, plan_content and follow_through of recorded rollouts, with the reason of every failure.

Belongs here: the three behaviours as DESIGN section 5 defines them, for live and imported rollouts alike. Does not
belong here: reading tables (`cast`) or names in text (`entities`), rewards (`rewards`), rates and intervals.

Readings where the definition leaves room:
- Turns without a readable action are no action; an agent whose every turn is such has `no readable action`.
- The plan is the first message an agent sends. Its paths need not occur in the task to be followed through (a file may
  be new), its functions must (any word with an underscore looks like one).
- A responder's acknowledgement names both paths where it names at least two (one, where the task names only one), and
  two, or all there are, of those in the messages that came before.
- "By turn 5" is turn <= 5, counted from 0. An agent that sends no message has no plan to follow through.
- All three are null where a single agent acts, and where infrastructure failed.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from etpi_assets.scoring.cast import Agent, Scene, before_first_turn, read_agents
from etpi_assets.scoring.entities import Files, Patterns, edited, touched
from etpi_assets.scoring.rewards.verdict import read_reward
from etpi_assets.scoring.structure import score_turns
from etpi_assets.specs.rollout_set import ScoringSection
from etpi_resources.chat.grammars import ThinkGrammar
from etpi_resources.lake.schemas import from_rows

EARLY_TURN = 5

_FOLLOW = ("follow_through", "follow_own", "follow_edited", "follow_by_turn_5")


def score(
    rollouts: pa.Table,
    agents: pa.Table,
    turns: pa.Table,
    tasks: pa.Table,
    scoring: ScoringSection,
    messages: pa.Table | None = None,
    entities: Mapping[str, Sequence[str]] | None = None,
    structure: ThinkGrammar | None = None,
    tools: bool = False,
) -> dict[str, pa.Table]:
    """Score every rollout.

    Args:
        rollouts, agents, turns: tables of those names; a rollout's `task_id` is looked up in `tasks`.
        tasks: the suite's tasks; of these the instruction is read.
        messages: the conversation. Messages before the first turn are read: mail (kind "inbox"), and the prompt as the
            task's text where the task is not among `tasks`.
        entities: task id -> files and functions of the task besides those its instruction names (`Family.entities`).
        structure: what think blocks are held against; None: nothing.
        tools: whether the agents were offered tools, so that turns with a call are counted; reads `turns.observation`.

    Returns:
        {"scores", "agent_scores", "turn_scores"}: a row a rollout, a row an agent and, with a structure, a row a turn,
        in the order of `rollouts`, `agents` and `turns`.
    """
    by_turn = score_turns(turns, structure)
    adherent = Counter((r["rollout_id"], r["agent_id"]) for r in by_turn.to_pylist() if r["adheres"])
    patterns = Patterns.of(scoring)
    instructions = dict(zip(tasks["task_id"].to_pylist(), tasks["instruction"].to_pylist(), strict=True))
    prompts, early = before_first_turn(messages)
    cast = read_agents(agents, turns, early, scoring, tools=tools)
    keywords = [_keyword(word) for word in scoring.keywords]
    scenes: dict[str, Scene] = {}
    rows: dict[str, list[dict[str, Any]]] = {"scores": [], "agent_scores": []}
    columns = ["rollout_id", "task_id", "repo", "exit_status", "outcome", "error"]
    for row in rollouts.select(columns).to_pylist():
        text = instructions.get(row["task_id"]) or prompts.get(row["rollout_id"]) or ""
        text = "\n".join([text, *(entities or {}).get(row["task_id"], ())]).strip()
        if text not in scenes:
            scenes[text] = Scene.of(text or None, patterns)
        reward = read_reward(row["outcome"], row["error"], row["rollout_id"])
        mine = cast.get(row["rollout_id"], [])
        judge = _Judge([agent for agent, _ in mine], scenes[text], patterns, keywords, scoring.window)
        judged = judge.nothing("infrastructure error") if reward.infrastructure else judge.verdicts()
        tokens = [agent.output_tokens for agent, _ in mine if agent.output_tokens is not None]
        rows["scores"].append(
            {
                "rollout_id": row["rollout_id"],
                "task_id": row["task_id"],
                "repo": row["repo"],
                "reward": reward.reward,
                "verdict": reward.verdict,
                **judged.pair,
                "output_tokens": sum(tokens) if tokens and len(tokens) == len(mine) else None,
                "turns": sum(agent.turns for agent, _ in mine),
                "exit_status": row["exit_status"],
                "infrastructure_error": reward.infrastructure,
            }
        )
        for (agent, fact), behaviour in zip(mine, judged.agents, strict=True):
            rows["agent_scores"].append(
                {
                    "rollout_id": row["rollout_id"],
                    "agent_id": agent.agent_id,
                    **behaviour,
                    "parse_rate": 1 - agent.unread / agent.turns if agent.turns else None,
                    "turns": agent.turns,
                    "output_tokens": agent.output_tokens,
                    "think_tokens": agent.think_tokens,
                    "post_think_tokens": agent.post_think_tokens,
                    "tool_turns": agent.tool_turns if tools else None,
                    "adherent_turns": None if structure is None else adherent[row["rollout_id"], agent.agent_id],
                    "exit_status": fact["exit_status"],
                }
            )
    return {name: from_rows(name, found) for name, found in rows.items()} | {"turn_scores": by_turn}


@dataclass(frozen=True)
class Judged:
    """Columns of `scores` and, an agent, of `agent_scores`."""

    pair: dict[str, Any]
    agents: list[dict[str, Any]]


class _Judge:
    """The behaviours of one rollout."""

    def __init__(
        self,
        agents: Sequence[Agent],
        scene: Scene,
        patterns: Patterns,
        keywords: Sequence[re.Pattern[str]],
        window: int | None,
    ) -> None:
        self.agents, self.scene, self.patterns, self.keywords, self.window = agents, scene, patterns, keywords, window
        self.plans = {a.agent_id: scene.entities(a.plan[1], patterns) if a.plan else [] for a in agents}

    def nothing(self, reason: str) -> Judged:
        """No behaviour can be read off this rollout."""
        pair = {"plan_first": None, "plan_first_reason": reason, "plan_content": None, "plan_content_reason": reason}
        return Judged(pair | {"follow_through": None}, [self._agent(a, None, None, {}, reason) for a in self.agents])

    def verdicts(self) -> Judged:
        if len(self.agents) < 2:
            return self.nothing("one agent alone" if self.agents else "missing agents")
        first = {agent.agent_id: self.plan_first(agent) for agent in self.agents}
        content = {agent.agent_id: self.plan_content(agent) for agent in self.agents}
        followed = [self.follow_through(agent) for agent in self.agents]
        rows = [
            self._agent(agent, first[agent.agent_id] is None, content[agent.agent_id] is None, follow, reason)
            for agent, (follow, reason) in zip(self.agents, followed, strict=True)
        ]
        share = sum(follow["follow_through"] for follow, _ in followed) / len(followed)
        pair = {**_pair("plan_first", first), **_pair("plan_content", content), "follow_through": share}
        return Judged(pair, rows)

    def plan_first(self, agent: Agent) -> str | None:
        """Why the agent did not plan first; None where it did."""
        if not agent.turns:
            return "missing assistant turns"
        if not agent.steps:
            return "no readable action"
        turn, action = agent.steps[0]
        if action["kind"] != "send_message":
            return "first action not send_message"
        if not action["pure"]:
            return "first action not a pure send_message"
        before = agent.received(turn)
        if before:
            return self._acknowledges(action["message"] or "", [text for _, _, text in before])
        bash = next((t for t, a in agent.steps if a["kind"] == "bash"), None)
        if not agent.received(agent.turns if bash is None else bash):
            return "no INBOX" if bash is None else "no INBOX before bash"
        return None

    def _acknowledges(self, answer: str, proposals: Sequence[str]) -> str | None:
        said = {self.scene.files.same(path) for path in self.patterns.paths(answer)}
        asked = {self.scene.files.same(path) for text in proposals for path in self.patterns.paths(text)}
        wanted = min(2, max(1, len(self.scene.paths | asked)))
        if len(said) >= wanted and len(said & asked) >= min(2, len(asked)):
            return None
        return f"acknowledgement names {min(len(said), len(said & asked) if asked else len(said))} of {wanted} paths"

    def plan_content(self, agent: Agent) -> str | None:
        """Why the agent's first message is no plan; None where it is one."""
        if not agent.turns:
            return "missing assistant turns"
        if agent.plan is None:
            return "no message sent"
        text = agent.plan[1]
        words = self.patterns.path.sub(" ", text.replace("\u2019", "'").replace("\u2018", "'"))
        found = sum(1 for keyword in self.keywords if keyword.search(words))
        reasons = [f"keywords {found} of 2"] if found < 2 else []
        if self.scene.text is None:
            reasons.append("the task is unknown, so no entity can be checked")
        elif not any(e in self.scene.functions or e in self.scene.files for e in self.plans[agent.agent_id]):
            reasons.append("no task entity named")
        return "; ".join(reasons) or None

    def follow_through(self, agent: Agent) -> tuple[dict[str, bool], str | None]:
        """The four readings, and why the headline failed."""
        union = {entity for plan in self.plans.values() for entity in plan}
        mine = set(self.plans[agent.agent_id])
        result: dict[str, bool] = dict.fromkeys(_FOLLOW, False)
        if agent.plan is None:
            return result, "no plan message" if agent.turns else "missing assistant turns"
        if not union:
            return result, "plan names no entity"
        after = [(t, a["command"]) for t, a in agent.steps[agent.plan[0] + 1 :] if a["kind"] == "bash"]
        if not after:
            return result, "no bash after the plan"
        allowed = sorted({turn for turn, _ in after})[: self.window]
        files = Files({*self.scene.paths, *union})
        marks = {entity.rsplit("/", 1)[-1] for entity in union}
        for turn, command in after:
            if not any(mark in command for mark in marks):
                continue
            hit = touched(command, self.patterns, files) & union
            if turn <= EARLY_TURN and hit:
                result["follow_by_turn_5"] = True
            if turn in allowed:
                result["follow_through"] |= bool(hit)
                result["follow_own"] |= bool(hit & mine)
                result["follow_edited"] |= bool(hit) and bool(edited(command, self.patterns, files) & union)
        if result["follow_through"]:
            return result, None
        return result, f"never touched: {', '.join(sorted(union)[:4])}"

    def _agent(
        self, agent: Agent, first: bool | None, content: bool | None, follow: Mapping[str, bool], reason: str | None
    ) -> dict[str, Any]:
        entities = self.plans[agent.agent_id]
        return {
            "plan_first": first,
            "plan_content": content,
            **{name: follow.get(name) for name in _FOLLOW},
            "reason": reason,
            "plan_entities": json.dumps(entities) if agent.plan else None,
        }


def _pair(name: str, reasons: Mapping[str, str | None]) -> dict[str, Any]:
    failed = [f"{agent_id}: {reason}" for agent_id, reason in reasons.items() if reason]
    return {name: not failed, f"{name}_reason": "; ".join(failed) or None}


def _keyword(word: str) -> re.Pattern[str]:
    """A whole word, case folded; the straight apostrophe is part of a word ("you" is not in "you'll")."""
    return re.compile(rf"(?<!\w)(?<!\w'){re.escape(word)}(?!\w|'\w)", re.IGNORECASE)
