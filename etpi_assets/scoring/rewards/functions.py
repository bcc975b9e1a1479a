"""The registry of reward functions: names as specs use them, versions, and scoring by a spec's reward terms.

`outcome`, `tool_call_reward` (TCR) and `overlong` are those of GRPO-TCR (docs/rl.md); `terminal` has the others.

A function's version is the number of the component `rewards`, or that of its plugin, so it distinguishes the values of
a changed function from earlier ones.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from etpi_assets.planning.versions import number, plugin_version
from etpi_assets.scoring.rewards import terminal
from etpi_assets.scoring.rewards.attempt import Attempt, attempt_of
from etpi_assets.specs.load import SpecError
from etpi_assets.specs.plugins import plugin, unknown
from etpi_assets.specs.training import RewardTerm
from etpi_assets.tasks.family import Task
from etpi_assets.trajectories.records import RolloutRecord


def outcome(attempt: Attempt, *, right: float = 1.0, wrong: float = -1.0) -> float:
    """Return `right` if the verifier's reward is 1, else `wrong`."""
    return right if attempt.known("outcome") == 1.0 else wrong


def tool_call_reward(attempt: Attempt, *, ceiling: float = -0.6, step: float = 0.1) -> float:
    """Return 1 if solved, else min(ceiling, -1 + (num_turns - 2) / 2 * step): wrong attempts lose less if they call.

    num_turns is tool-response turns + assistant turns + 1 for the first prompt. A call without effect earns as much as
    any other, up to the ceiling; reports therefore show accuracy beside the share of attempts that called a tool.
    """
    if attempt.known("outcome") == 1.0:
        return 1.0
    turns = attempt.known("tool_turns") + attempt.known("turns") + 1
    return min(ceiling, -1.0 + (turns - 2) / 2 * step)


def overlong(attempt: Attempt, *, limit: int = 10480, buffer: int = 3000, factor: float = 1.0) -> float:
    """Return min(-(length - (limit - buffer)) / buffer * factor, 0); the length includes observations.

    There is no lower bound.
    """
    length = attempt.known("response_tokens")
    return min(-(length - (limit - buffer)) / buffer * factor, 0.0)


Function = Callable[..., float]

FUNCTIONS: Mapping[str, Function] = {
    "format": terminal.form,
    "relevance": terminal.relevance,
    "conciseness": terminal.conciseness,
    "format_unhardened": terminal.form_unhardened,
    "relevance_unhardened": terminal.relevance_unhardened,
    "conciseness_unhardened": terminal.conciseness_unhardened,
    "outcome": outcome,
    "tool_call_reward": tool_call_reward,
    "overlong": overlong,
}


@dataclass(frozen=True)
class Score:
    """The value of a reward function for an attempt, with the function's version and its weight in the sum; `agent_id`
    if it is that of one agent's attempt."""

    function: str
    version: str
    weight: float
    value: float
    agent_id: str | None = None

    @property
    def weighted(self) -> float:
        return self.weight * self.value


def check_terms(terms: Sequence[RewardTerm]) -> None:
    """Raise SpecError if a term names an unknown function, or passes it an unknown parameter, or if terminal rewards
    look for different keywords: `format` would be 0.0 for the very verbs that `relevance` counts."""
    for term in terms:
        parameters = [
            name
            for name, p in inspect.signature(function_named(term.function)).parameters.items()
            if p.kind is p.KEYWORD_ONLY
        ]
        if unknown := sorted(set(term.params) - set(parameters)):
            raise SpecError(
                f"rl.rewards: {term.function} has no parameter {', '.join(unknown)}; its parameters are {parameters}"
            )
    default = {verb: list(words) for verb, words in terminal.KEYWORDS.items()}
    for one, other in pairwise(term for term in terms if term.function in ("format", "relevance", "conciseness")):
        if one.params.get("keywords", default) != other.params.get("keywords", default):
            raise SpecError(
                f"rl.rewards: {one.function} and {other.function} have different keywords, so a verb that one asks for "
                "counts against the other; give both the same params.keywords (default: docker, find, grep, tar, wc)"
            )


def function_named(name: str) -> Function:
    """Return the reward function of that name. Raises SpecError if there is none, or a plugin cannot be used."""
    if named := plugin("reward", name, FUNCTIONS):
        return named.load()
    if name not in FUNCTIONS:
        raise SpecError(f"rl.rewards: {unknown('reward', name, FUNCTIONS)}")
    return FUNCTIONS[name]


@cache
def version_of(name: str) -> str:
    """Return the version of a reward function's code."""
    if named := plugin("reward", name, FUNCTIONS):
        return plugin_version(named)
    function_named(name)  # it exists
    return str(number("rewards"))


def score_attempt(attempt: Attempt, terms: Sequence[RewardTerm]) -> list[Score]:
    """Score an attempt by every reward term, in the order of the spec.

    Raises:
        BadReward: a value is not finite, or an input is missing; the message names the row and the function.
    """
    scores = []
    for term in terms:
        value = function_named(term.function)(attempt, **term.params)
        if not isinstance(value, int | float) or not math.isfinite(value):
            wrong = f"the reward {term.function!r} is {value!r}"
            raise attempt.refused(f"{wrong}; fix the function, or its parameters in rl.rewards")
        scores.append(Score(term.function, version_of(term.function), term.weight, float(value)))
    return scores


def score_rollout(record: RolloutRecord, task: Task, terms: Sequence[RewardTerm]) -> list[Score]:
    """Score a rollout by the terms of rollouts, and each of its agents by those of agents. Raises BadReward."""
    scores = score_attempt(attempt_of(record, task), [term for term in terms if term.of == "rollout"])
    if of_agents := [term for term in terms if term.of == "agent"]:
        for agent_id in (agent.agent_id for agent in record.agents if agent.turns):
            of_agent = score_attempt(attempt_of(record, task, agent_id), of_agents)
            scores += [replace(score, agent_id=agent_id) for score in of_agent]
    return scores


def reward_of(scores: Sequence[Score]) -> tuple[float, dict[str, float]]:
    """Return a rollout's reward, and the rewards of agents that have scores of their own: the sum of the rollout's
    scores and theirs. The rollout's reward is then the mean of its agents'."""
    shared = sum(score.weighted for score in scores if score.agent_id is None)
    agents: dict[str, float] = {}
    for score in scores:
        if score.agent_id is not None:
            agents[score.agent_id] = agents.get(score.agent_id, shared) + score.weighted
    return sum(agents.values()) / len(agents) if agents else shared, agents
