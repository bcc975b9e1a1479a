"""The registry of reward functions: names as specs use them, versions, and scoring by a spec's reward terms.

A function's version is the number of the component `rewards`, or that of its plugin, so it distinguishes the values of
a changed function from earlier ones.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from etpi_assets.planning.versions import number, plugin_version
from etpi_assets.scoring.rewards import terminal, tools, unhardened
from etpi_assets.scoring.rewards.attempt import Attempt, BadReward
from etpi_assets.specs.load import SpecError
from etpi_assets.specs.plugins import plugin, unknown
from etpi_assets.specs.training import RewardTerm

Function = Callable[..., float]

FUNCTIONS: Mapping[str, Function] = {
    "format": terminal.form,
    "relevance": terminal.relevance,
    "conciseness": terminal.conciseness,
    "format_unhardened": unhardened.form,
    "relevance_unhardened": unhardened.relevance,
    "conciseness_unhardened": unhardened.conciseness,
    "outcome": tools.outcome,
    "tool_call_reward": tools.tool_call_reward,
    "overlong": tools.overlong,
}


@dataclass(frozen=True)
class Score:
    """The value of a reward function for an attempt, with the function's version and its weight in the sum."""

    function: str
    version: str
    weight: float
    value: float

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
            raise BadReward(
                f"rollout {attempt.rollout_id} of task {attempt.task_id}: the reward {term.function!r} is {value!r}; "
                "fix the function, or its parameters in rl.rewards"
            )
        scores.append(Score(term.function, version_of(term.function), term.weight, float(value)))
    return scores
