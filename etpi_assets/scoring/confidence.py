"""Confidence sequences: intervals of a mean that stay valid however often one looks and whenever one stops.

An interval for a fixed number of tasks covers the truth in 95 % of evaluations only if that number was fixed before. A
confidence sequence covers it at all sample sizes at once with that probability, so its interval at a data-dependent
stop is valid. `intervals` has the fixed ones, `evaluation.stopping` the rule that stops.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from etpi_assets.scoring.intervals import Estimate

ALPHA = 0.05
BETTING = "betting_sequence"
"""The name of the interval's method in tables."""
_GRID = 2001
"""Candidate means in [0, 1]; the limits are rounded outwards to this grid, by at most 0.0005."""
_MOST_BET = 0.5
"""The largest share of its wealth that a bet may lose, c in the source."""


def task_order(task_id: str) -> str:
    """Return the key by which a sequential evaluation sorts its tasks: random with respect to the suite's order."""
    return hashlib.sha256(task_id.encode()).hexdigest()


def betting_sequence(values: Sequence[float], alpha: float = ALPHA) -> np.ndarray:
    """Return the confidence sequence of a mean of values in [0, 1]: limits after each value, shape (n, 2).

    The hedged capital process of Waudby-Smith and Ramdas (2023, "Estimating means of bounded random variables by
    betting", JRSS B 86:1, theorem 3). For a candidate mean m, a gambler bets on every value in turn:

        K+_t(m) = prod_i (1 + min(l_i, c / m) (x_i - m)),   K-_t(m) = prod_i (1 - min(l_i, c / (1 - m)) (x_i - m)),
        K_t(m) = max(K+_t(m), K-_t(m)) / 2,                 C_t = {m: K_t(m) < 1 / alpha},
        l_t = sqrt(2 log(2 / alpha) / (v_{t-1} t log(t + 1))),
        mean_t = (1/2 + sum_i x_i) / (t + 1),               v_t = (1/4 + sum_i (x_i - mean_i)^2) / (t + 1).

    Bets depend on earlier values only, so K_t at the true mean is bounded by a nonnegative martingale that starts at 1,
    and by Ville's inequality P(exists t: mean not in C_t) <= alpha. That needs values whose mean, given the earlier
    ones, is the mean that is estimated: independent tasks, or tasks in random order. No normal approximation is
    involved. The interval is about 1.5 times as wide as one for a fixed n.

    Raises:
        ValueError: a value lies outside [0, 1].
    """
    means = np.linspace(0.0, 1.0, _GRID)
    with np.errstate(divide="ignore"):
        most_up, most_down = _MOST_BET / means, _MOST_BET / (1 - means)
    up, down = np.zeros(_GRID), np.zeros(_GRID)
    total, squares, variance = 0.0, 0.25, 0.25
    limits = np.empty((len(values), 2))
    for t, x in enumerate(values, 1):
        if not 0 <= x <= 1:
            raise ValueError(f"value {t} is {x}; a confidence sequence needs values in [0, 1]")
        bet = math.sqrt(2 * math.log(2 / alpha) / (variance * t * math.log(t + 1)))
        up += np.log1p(np.minimum(bet, most_up) * (x - means))
        down += np.log1p(-np.minimum(bet, most_down) * (x - means))
        total += x
        squares += (x - (0.5 + total) / (t + 1)) ** 2
        variance = squares / (t + 1)
        kept = np.flatnonzero(np.maximum(up, down) - math.log(2) < -math.log(alpha))
        limits[t - 1] = means[max(0, kept[0] - 1)], means[min(_GRID - 1, kept[-1] + 1)]
    return limits


def sequential_mean(values: Sequence[float]) -> Estimate:
    """Estimate a mean of values in [0, 1], one per task in the order of evaluation, with its interval at any stop."""
    return _estimate(values, 0.0, 1.0)


def sequential_change(later: Sequence[float], earlier: Sequence[float]) -> Estimate:
    """Estimate the mean of later - earlier, values in [0, 1] of the same tasks, with its interval at any stop."""
    return _estimate([b - a for a, b in zip(earlier, later, strict=True)], -1.0, 1.0)


def _estimate(values: Sequence[float], least: float, most: float) -> Estimate:
    scaled = [min(1.0, max(0.0, (value - least) / (most - least))) for value in values]  # rounding of means
    low, high = betting_sequence(scaled)[-1] * (most - least) + least
    value = math.fsum(values) / len(values)
    return Estimate(value, len(values), len(values), min(value, float(low)), max(value, float(high)), BETTING)
