"""Numbers of seeds and tasks for a comparison: power calculations for declared analyses and undecided findings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from etpi_lab.analysis.over_seeds import Spread
from etpi_lab.analysis.student_t import cdf, quantile

POWER = 0.8
MOST_SEEDS = 400


@dataclass(frozen=True)
class Size:
    """A design: seeds a side and tasks, with the probability that it shows the difference."""

    seeds: int
    tasks: int
    power: float


def planned(rate: float, seed_sd: float, *, between_tasks: float = 0.5) -> Spread:
    """Return the spread to plan with before anything ran.

    Args:
        rate: the rate expected in both conditions; 0.5 is the worst case.
        seed_sd: standard deviation of the rate of trainings that differ in the seed alone, tasks without end.
        between_tasks: share of the variance of an attempt, rate (1 - rate), that lies between tasks. It is common to
            all seeds; the rest is the chance of a single attempt, and more seeds average it.
    """
    attempt = rate * (1 - rate)
    return Spread(seeds=2 * seed_sd**2, tasks=2 * attempt * between_tasks, attempts=2 * attempt * (1 - between_tasks))


def power_of(spread: Spread, difference: float, seeds: int, tasks: int) -> float:
    """Return the probability that the 95 % interval of `seeds` a side and `tasks` tasks lies above 0, if the true
    difference is `difference`.

    V = (spread.seeds + a) / seeds + (spread.tasks + a) / tasks, as `over_seeds_and_tasks` estimates it. Luck of single
    attempts is in both parts: a = spread.attempts / tasks in the first and / seeds in the second. With the
    degrees of freedom of Welch and Satterthwaite, from 2 (seeds - 1) and tasks - 1, power = P(T > t_0.975 -
    difference / sqrt(V)): the calculation for crossed random participants and stimuli of Westfall, Kenny and Judd
    (2014, J. Exp. Psychol. Gen. 143:2020), with the central t in place of the noncentral one.
    """
    parts = (
        ((spread.seeds + spread.attempts / tasks) / seeds, 2 * (seeds - 1)),
        ((spread.tasks + spread.attempts / seeds) / tasks, tasks - 1),
    )
    total = sum(value for value, _ in parts)
    if total == 0:
        return 1.0
    df = total**2 / sum(value**2 / free for value, free in parts)
    return 1 - cdf(quantile(0.975, df) - difference / math.sqrt(total), df)


def seeds_needed(spread: Spread, difference: float, tasks: int, power: float = POWER) -> Size | None:
    """Return the fewest seeds a side, from two, that show `difference` with this power on `tasks` tasks; None if even
    `MOST_SEEDS` do not: then only more tasks help."""
    for seeds in range(2, MOST_SEEDS + 1):
        if (reached := power_of(spread, difference, seeds, tasks)) >= power:
            return Size(seeds, tasks, reached)
    return None


def designs(spread: Spread, difference: float, tasks: Sequence[int], power: float = POWER) -> Iterator[Size]:
    """Yield the design with the fewest seeds for each number of tasks; only those with fewer seeds than the last."""
    least = MOST_SEEDS + 1
    for number in tasks:
        size = seeds_needed(spread, difference, number, power)
        if size and size.seeds < least:
            least = size.seeds
            yield size
