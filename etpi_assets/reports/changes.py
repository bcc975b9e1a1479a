"""Changes between two checkpoints: each metric paired by task, and the rules that put a change into words.

Every page, report and query shows these figures: the table `changes` of an experiment's report has them. `RULES` is the
whole of the judgement: no other sentence of a report or of the console calls a change good or bad.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations

import pyarrow as pa

from etpi_assets.evaluation.metrics import paired_changes
from etpi_assets.reports.facts import HEADLINE
from etpi_assets.scoring.published import BEHAVIOURS, COLUMNS
from etpi_resources.lake.schemas import from_rows

ALPHA = 0.05
"""The level of the sign test, beside the 95 % interval."""
OUTCOME = "solved"
"""The main metric, unless `metrics.main` names another."""
ORDER = ("base", "sft", "rl")
"""The roles that are compared, the earlier first."""
STORED = (*dict.fromkeys((*HEADLINE, *COLUMNS, *BEHAVIOURS)), "think_tokens_per_turn")
"""The metrics of the table `changes`."""


@dataclass(frozen=True)
class Change:
    """A metric of an earlier and a later checkpoint over the same tasks.

    Attributes:
        value_before, value_after: the metric pooled over the tasks.
        ci_low, ci_high: 95 % interval of the difference.
        higher, lower: tasks whose value rose and fell.
        sign_p: two-sided exact sign test of these counts.
    """

    metric: str
    decoding: str
    before: str
    after: str
    tasks: int
    value_before: float
    value_after: float
    difference: float
    ci_low: float
    ci_high: float
    higher: int
    lower: int
    sign_p: float

    @property
    def word(self) -> str:
        """Return the word of the first rule that applies."""
        return next(rule.word for rule in RULES if rule.applies(self))

    @property
    def undecided(self) -> bool:
        """Return whether the tasks are too few to tell the difference from chance."""
        return self.word in ("lower", "higher", "even")

    @property
    def tone(self) -> str:
        """Return good, bad or nothing, for the page's colours."""
        return {"improved": "good", "fell": "bad", "lower": "bad"}.get(self.word, "")

    def values(self) -> str:
        """Format the values before and after."""
        return f"{100 * self.value_before:.0f} % to {100 * self.value_after:.0f} %"

    def figures(self) -> str:
        """Format the values, the difference and its interval in percentage points, and the number of tasks."""
        interval = f" [{points(self.ci_low)}, {points(self.ci_high)}]"
        count = f"{self.tasks} task{'s'[: self.tasks != 1]}"
        return f"{self.values()} ({points(self.difference)} points{interval}, {count})"


@dataclass(frozen=True)
class Rule:
    """A word for a change, when it applies, and the condition in words, as reports print it."""

    word: str
    condition: str
    applies: Callable[[Change], bool]


RULES: tuple[Rule, ...] = (
    Rule("same", "no task's value changed", lambda c: c.higher == c.lower == 0),
    Rule(
        "improved",
        f"the 95 % interval of the difference lies above 0, and the sign test has p < {ALPHA}",
        lambda c: c.ci_low > 0 and c.sign_p < ALPHA,
    ),
    Rule(
        "fell",
        f"the interval lies below 0, and the sign test has p < {ALPHA}",
        lambda c: c.ci_high < 0 and c.sign_p < ALPHA,
    ),
    Rule("lower", "otherwise, if the later value is lower: a drop, undecided at this n", lambda c: c.difference < 0),
    Rule("higher", "otherwise, if it is higher: a rise, undecided at this n", lambda c: c.difference > 0),
    Rule("even", "otherwise: rises and falls that cancel out", lambda c: True),
)  # fmt: skip
"""The rules in order; the first that applies gives the word."""


def changes(rollouts: pa.Table, scores: pa.Table, agent_scores: pa.Table, metrics: Sequence[str]) -> list[Change]:
    """Return the changes of these metrics between every two roles that were evaluated, in the order of `metrics`.

    Args:
        rollouts, scores, agent_scores: tables of one experiment's evaluation.
    """
    evaluated = set(rollouts["checkpoint_role"].to_pylist())
    compared = []
    for before, after in combinations([role for role in ORDER if role in evaluated], 2):
        for paired in paired_changes(rollouts, scores, agent_scores, before, after):
            if paired.metric not in metrics:
                continue
            higher, lower = _count(paired.pairs)
            of = paired.change
            compared.append(
                Change(
                    paired.metric, paired.decoding, before, after, len(paired.pairs), paired.before, paired.after,
                    of.value, of.ci_low, of.ci_high, higher, lower, sign_test(higher, lower),
                )
            )  # fmt: skip
    return sorted(compared, key=lambda change: (metrics.index(change.metric), change.decoding))


_Value = tuple[float, float]
"""(total, size) of a task's metric."""


def _count(pairs: Sequence[tuple[_Value, _Value]]) -> tuple[int, int]:
    """Return the number of tasks whose value rose, and that of those whose value fell."""
    # Compared as products: a quotient could differ between equal values.
    signs = [after[0] * before[1] - before[0] * after[1] for before, after in pairs]
    return sum(sign > _EQUAL for sign in signs), sum(sign < -_EQUAL for sign in signs)


_EQUAL = 1e-9
"""Two values of a task closer than this are equal; totals are sums of floats."""


def sign_test(higher: int, lower: int) -> float:
    """Return the two-sided p of the exact sign test (Dixon and Mood 1946); 1 without a difference."""
    n = higher + lower
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(min(higher, lower) + 1)) / 2**n)


def changes_table(experiment: str, changed: Sequence[Change]) -> pa.Table:
    return from_rows(
        "changes", [{"experiment": experiment, **asdict(change), "word": change.word} for change in changed]
    )


def between(changes: Sequence[Change], before: str, after: str) -> list[Change]:
    """Return the changes between two roles."""
    return [change for change in changes if (change.before, change.after) == (before, after)]


def roles(changes: Sequence[Change]) -> tuple[str, str] | None:
    """Return the first and the last role that were compared; None if there was nothing to compare."""
    pairs = {(change.before, change.after) for change in changes}
    return max(pairs, key=lambda pair: (ORDER.index(pair[1]) - ORDER.index(pair[0]), pair[1]), default=None)


def points(value: float) -> str:
    """Format a difference of rates in percentage points, with its sign; limits beyond 100 points are cut there."""
    return f"{max(-100.0, min(100.0, 100 * value)):+.0f}"


def summary(changed: Sequence[Change], main: str = OUTCOME) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the changes from the first to the last role, as (tone, sentence): of the main metric, and of the others.

    The main metric has a sentence for each decoding. Of the others, those that fell, those that are lower but undecided
    and those that improved have one. Only losses have a tone, so that the main metric decides the colour.
    """
    pair = roles(changed)
    if pair is None:
        return [], []
    compared = between(changed, *pair)
    outcome = [change for change in compared if change.metric == main]
    beside = [change for change in compared if change.metric != main]
    sentences = []
    for word, tone, verb in _SAID:
        if chosen := [change for change in beside if change.word == word]:
            sentences.append((tone, f"{verb}: {_by_metric(chosen, full=tone == 'bad')}."))
    stated = [*(_outcome(change) for change in outcome if change.word != "same"), *_same(outcome)]
    return sorted(stated, key=lambda sentence: ("bad", "good", "").index(sentence[0])), sentences


_SAID = (("fell", "bad", "Fell"), ("lower", "bad", "Lower, undecided at this n"), ("improved", "", "Improved"))
"""(word, tone, how a sentence begins) of the metrics beside the main one that a summary names."""


def tone_of(sentences: Sequence[tuple[str, str]]) -> str:
    """Return the tone of several sentences: bad if one is, else good if one is."""
    tones = {tone for tone, _ in sentences}
    return next((tone for tone in ("bad", "good") if tone in tones), "")


def _by_metric(chosen: Sequence[Change], full: bool) -> str:
    """List the changes, those of a metric together; `full` with differences and intervals."""
    decodings: dict[str, list[str]] = {}
    for change in chosen:
        figures = change.figures() if full else change.values()
        decodings.setdefault(change.metric, []).append(f"{figures} under {change.decoding}")
    return "; ".join(f"`{metric}` {', '.join(listed)}" for metric, listed in decodings.items())


def _same(outcome: Sequence[Change]) -> list[tuple[str, str]]:
    """Return a sentence for the decodings under which no task's value of the main metric changed."""
    decodings: dict[tuple[str, int], list[str]] = {}
    for change in outcome:
        if change.word == "same":
            value = f"`{change.metric}` is {100 * change.value_after:.0f} %"
            decodings.setdefault((value, change.tasks), []).append(change.decoding)
    return [
        ("", f"{value} under {' and '.join(under)}, the same on each of {tasks} tasks.")
        for (value, tasks), under in decodings.items()
    ]


def _outcome(change: Change) -> tuple[str, str]:
    """Return the sentence about the main metric under one decoding."""
    verb = {"improved": "rose from", "fell": "fell from", "lower": "fell from"}.get(change.word, "went from")
    p = f"sign test p = {change.sign_p:.2g}: {change.lower} lost, {change.higher} gained"
    decided = f"not significant at this n ({p})" if change.undecided else f"significant ({p})"
    return change.tone, f"`{change.metric}` {verb} {change.figures()} under {change.decoding}; {decided}."
