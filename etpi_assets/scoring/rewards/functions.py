"""Every reward function by the name that a spec uses, with its version.

Belongs here: the registry, checking a spec's reward terms, and scoring attempts by them. Does not belong here: the
functions. A version is a hash of the function's code and all that it calls, so that a changed reward is told apart from
what scored earlier rollouts.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from etpi_assets.scoring.rewards import terminal, tools, unhardened
from etpi_assets.scoring.rewards.attempt import Attempt, BadReward
from etpi_assets.specs.load import SpecError
from etpi_assets.specs.training import RewardTerm
from etpi_assets.versioning.keys import definition_version
from etpi_assets.versioning.source import digest_of

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
    """One function's word on one attempt: its name, version, weight, value, and the product that is summed."""

    function: str
    version: str
    weight: float
    value: float

    @property
    def weighted(self) -> float:
        return self.weight * self.value


def check_terms(terms: Sequence[RewardTerm]) -> None:
    """Raise SpecError where a term names no function, or gives it a parameter that it does not have."""
    for term in terms:
        if term.function not in FUNCTIONS:
            near = difflib.get_close_matches(term.function, FUNCTIONS, n=1, cutoff=0.0)[0]
            raise SpecError(
                f"rl.rewards: there is no reward function {term.function!r}; the nearest is {near!r} (there are "
                f"{', '.join(FUNCTIONS)})"
            )
        known = [
            name
            for name, p in inspect.signature(FUNCTIONS[term.function]).parameters.items()
            if p.kind is p.KEYWORD_ONLY
        ]
        if unknown := sorted(set(term.params) - set(known)):
            raise SpecError(f"rl.rewards: {term.function} has no parameter {', '.join(unknown)}; it has {known}")


@cache
def version_of(name: str) -> str:
    """12 hex digits that change when the function's code does, or that of anything of etpi that it calls. A function
    from elsewhere counts with its source text."""
    function = FUNCTIONS[name]
    target = f"{function.__module__}:{function.__qualname__}"
    return (definition_version(target) or digest_of(inspect.getsource(function)))[:12]


def score_attempt(attempt: Attempt, terms: Sequence[RewardTerm]) -> list[Score]:
    """Every term's word on an attempt, in the order of the spec.

    Raises:
        BadReward: a value is not finite, or an input never arrived; names the row and the function.
    """
    scores = []
    for term in terms:
        value = FUNCTIONS[term.function](attempt, **term.params)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise BadReward(
                f"rollout {attempt.rollout_id} of task {attempt.task_id}: the reward {term.function!r} is {value!r}; "
                "mend the function, or its parameters in rl.rewards"
            )
        scores.append(Score(term.function, version_of(term.function), term.weight, float(value)))
    return scores
