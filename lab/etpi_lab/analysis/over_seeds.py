"""Intervals of a difference over training seeds and tasks both, for findings that pool over seeds.

An interval over tasks says how the difference between *these* trained models varies from task to task. A claim about
the method also has to allow for another seed: two trainings that differ in the seed alone do not solve the same tasks.
Three seeds say little about how much seeds differ, so the interval over seeds and tasks is wide, by Student's t.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import variance

from etpi_assets.scoring.intervals import Estimate, Z
from etpi_lab.analysis.student_t import quantile

METHOD = "seeds_and_tasks"
ERROR = 0.05
"""Probability that the truth is outside of an interval, or of any of the intervals of several looks."""


@dataclass(frozen=True)
class Component:
    """One source of variance of a difference: its variance, with degrees of freedom (Welch-Satterthwaite)."""

    variance: float
    df: float


@dataclass(frozen=True)
class Spread:
    """The variance components of a difference of two conditions.

    Attributes:
        seeds: sum over the sides of the variance between seeds, of one seed a side; divide by the number of seeds.
        tasks: variance of one task's contribution; divide by the number of tasks.
        attempts: variance of a single attempt at a task; divide by seeds and tasks. 0 where it is part of the others.
        n_seeds, n_tasks: the sizes they were estimated from.
    """

    seeds: float
    tasks: float
    n_seeds: int = 0
    n_tasks: int = 0
    attempts: float = 0.0


def over_seeds_and_tasks(
    between: Estimate, more: Sequence[float], less: Sequence[float], *, paired: bool = False, looks: int = 1
) -> tuple[Estimate, Spread] | None:
    """Widen the interval of a difference over tasks by the spread between seeds.

    Seeds and tasks are crossed: every seed answers the same tasks. The variance of the difference is the sum of
    components, s_more^2 / S + s_less^2 / S from the seeds and (d / 1.96)^2 from the tasks, where s^2 is the sample
    variance of the seeds' values and d the distance to the limit over tasks. The limits lie t sqrt(V) away, with the
    degrees of freedom of Welch and Satterthwaite (Satterthwaite 1946), V^2 / sum(V_i^2 / df_i): a moment estimate of
    the model with random seeds and tasks (Searle, Casella and McCulloch 1992, chapter 4). The chance of a single
    rollout is in both components, so the interval is wider than it must be where seeds do not differ. A bootstrap that
    resamples three seeds and then tasks covers less than it says (lab/bench/intervals_over_seeds.py compares both).

    Args:
        between: more - less, a difference of rates, with its interval over tasks; `clusters` is the number of tasks.
        more, less: the value of every training seed of a side; empty for a condition without training, such as a base.
        paired: seeds correspond (two stages of the same trainings), so that a seed's difference is what varies.
        looks: how often the question may be looked at, with more seeds each time. Every look has an equal share of the
            error of 5 % (Bonferroni), whatever made one look again, so that all looks together err no more often.

    Returns:
        the estimate with its interval, and the spread; None if a side has one seed, which says nothing about seeds.
    """
    if len(more) == 1 or len(less) == 1 or not (more or less):
        return None
    sides = [[a - b for a, b in zip(more, less, strict=True)]] if paired else [side for side in (more, less) if side]
    seeds = [Component(variance(side) / len(side), len(side) - 1) for side in sides]
    tasks = max(2, between.clusters)
    limits, below = [], 1 - ERROR / 2 / looks
    for distance in (between.value - between.ci_low, between.ci_high - between.value):
        components = [*seeds, Component((distance / Z) ** 2, tasks - 1)]
        limits.append(max(distance, quantile(below, _df(components)) * math.sqrt(sum(c.variance for c in components))))
    widest = max(between.value - between.ci_low, between.ci_high - between.value)
    n_seeds = min(len(side) for side in sides)
    estimate = Estimate(
        between.value, between.n, between.clusters, max(-1.0, between.value - limits[0]),
        min(1.0, between.value + limits[1]), METHOD,
    )  # fmt: skip
    return estimate, Spread(n_seeds * sum(c.variance for c in seeds), tasks * (widest / Z) ** 2, n_seeds, tasks)


def _df(components: Sequence[Component]) -> float:
    total = sum(c.variance for c in components)
    return total**2 / sum(c.variance**2 / c.df for c in components) if total > 0 else min(c.df for c in components)
