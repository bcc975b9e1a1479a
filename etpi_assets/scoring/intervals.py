"""Rates and means with 95 % intervals clustered by task: the statistics of every figure that etpi reports.

Two agents of one pair, or two samples of one task, are not independent observations. A rate over such units gets a
Wilson score interval at its effective sample size n / deff, with the design effect estimated from the between-cluster
variance (Kish 1965, section 5.4; Wilson 1927). Where all units agree, the variance says nothing about the design
effect, so the effective size is the number of clusters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

Z = 1.959963984540054
"""The two-sided 95 % normal quantile."""


@dataclass(frozen=True)
class Estimate:
    """A value over `n` units in `clusters` clusters, with its 95 % interval and the name of the interval's method."""

    value: float
    n: int
    clusters: int
    ci_low: float
    ci_high: float
    interval: str


def wilson(successes: float, n: float) -> tuple[float, float]:
    """Return the Wilson score interval of a rate. `n` > 0 may be fractional: an effective sample size."""
    p = successes / n
    centre = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    # At 0 and 1 the limit is the rate itself; the difference of equal floats would leave 1e-17.
    return 0.0 if p == 0 else max(0.0, centre - half), 1.0 if p == 1 else min(1.0, centre + half)


def rate(hits: Sequence[float], clusters: Sequence[str], sizes: Sequence[float] | None = None) -> Estimate | None:
    """Estimate a rate over units grouped in clusters; None if there are no units.

    Args:
        hits: successes of each unit (0 or 1, or a count where `sizes` is given), shape (units,).
        clusters: each unit's cluster, shape (units,).
        sizes: trials of each unit, shape (units,); 1 each by default.
    """
    x = np.asarray(hits, dtype=np.float64)
    m = np.ones_like(x) if sizes is None else np.asarray(sizes, dtype=np.float64)
    n = float(m.sum())
    if n == 0:
        return None
    p = float(x.sum()) / n
    residual, count = _by_cluster(x - p * m, clusters)
    if count == len(x) and sizes is None:
        return Estimate(p, int(n), count, *wilson(p * n, n), "wilson")
    effective = float(min(n, count))
    if 0 < p < 1 and count > 1:
        variance = float((residual**2).sum()) / n**2 * count / (count - 1)
        effective = n if variance == 0 else min(n, p * (1 - p) / variance)
    return Estimate(p, int(n), count, *wilson(p * effective, effective), "wilson_clustered")


def rate_of(hits: Iterable[tuple[float | None, str]]) -> Estimate | None:
    """Estimate the rate of hits that are not null, each with its cluster."""
    counted = [(hit, cluster) for hit, cluster in hits if hit is not None]
    return rate([hit for hit, _ in counted], [cluster for _, cluster in counted])


def mean(totals: Sequence[float], clusters: Sequence[str], sizes: Sequence[float]) -> Estimate | None:
    """Estimate the ratio mean Σ totals / Σ sizes with a cluster-robust normal interval; None if Σ sizes is 0.

    Args:
        totals, sizes: sum and count of each unit, shape (units,).
        clusters: each unit's cluster, shape (units,).
    """
    x, m = np.asarray(totals, dtype=np.float64), np.asarray(sizes, dtype=np.float64)
    n = float(m.sum())
    if n == 0:
        return None
    value = float(x.sum()) / n
    residual, count = _by_cluster(x - value * m, clusters)
    half = math.inf if count < 2 else Z * math.sqrt(float((residual**2).sum()) / n**2 * count / (count - 1))
    return Estimate(value, int(n), count, value - half, value + half, "mean_clustered")


def difference(first: Estimate, second: Estimate, correlation: float = 0.0) -> Estimate:
    """Estimate first - second of two figures, by default independent ones.

    Each limit lies at the distance sqrt(a² + b² - 2 r a b), where a and b are the distances of the two figures to their
    own limits on that side (Newcombe 1998, method 10 for both papers; Zou and Donner 2008). Figures over the same tasks
    are positively correlated; without their correlation the interval is wider than it needs to be.

    Args:
        correlation: r, of the two figures' estimates, in [-1, 1].
    """
    value = first.value - second.value
    below = _distance(first.value - first.ci_low, second.ci_high - second.value, correlation)
    above = _distance(first.ci_high - first.value, second.value - second.ci_low, correlation)
    n, clusters = min(first.n, second.n), min(first.clusters, second.clusters)
    return Estimate(value, n, clusters, value - below, value + above, "newcombe_paired" if correlation else "newcombe")


def _distance(a: float, b: float, correlation: float) -> float:
    # A mean over one cluster has no limits; inf * 0 is not a number.
    return math.inf if math.isinf(a + b) else math.sqrt(max(0.0, a * a + b * b - 2 * correlation * a * b))


def paired_difference(
    first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]], *, rates: bool = True
) -> Estimate:
    """Estimate first - second of two ratios that were measured in the same clusters: each task is its own control.

    The value is the difference of the pooled ratios. The correlation of the two comes from the residuals of the
    clusters; it is 0 where one of them has none, because all of its units agree.

    Args:
        first, second: (total, size) of each cluster, shape (clusters, 2), in the same order; sizes above 0.
        rates: whether totals count successes, so that a figure's own interval is a rate's; else it is a mean's.
    """
    one, two = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    names = [str(i) for i in range(len(one))]
    estimate = rate if rates else mean
    earlier, later = (estimate(side[:, 0].tolist(), names, side[:, 1].tolist()) for side in (two, one))
    assert earlier is not None and later is not None, "a cluster has a size above 0"
    residuals = [side[:, 0] - of.value * side[:, 1] for side, of in ((one, later), (two, earlier))]
    scale = math.sqrt(float((residuals[0] ** 2).sum() * (residuals[1] ** 2).sum()))
    correlation = float((residuals[0] * residuals[1]).sum()) / scale if scale > 0 else 0.0
    return difference(later, earlier, min(1.0, max(-1.0, correlation)))


def permutation_p(
    values: Sequence[float], groups: Sequence[str], clusters: Sequence[str], rounds: int = 1999
) -> float | None:
    """Return the probability that the means of groups differ as much by chance; None for a single group.

    Groups are exchanged between units of one cluster; where every cluster is of one group, between whole clusters.
    """
    x = np.asarray(values, dtype=np.float64)
    _, group = np.unique(np.asarray(groups), return_inverse=True)
    _, first, cluster = np.unique(np.asarray(clusters), return_index=True, return_inverse=True)
    if group.max(initial=0) == 0:
        return None
    whole, rng = bool((group == group[first][cluster]).all()), np.random.default_rng(0)

    def spread(group: np.ndarray) -> float:
        sums, sizes = np.bincount(group, weights=x - x.mean()), np.bincount(group)
        return float((sums**2 / np.maximum(sizes, 1)).sum())

    def exchanged() -> np.ndarray:
        if whole:
            return rng.permutation(group[first])[cluster]
        order = np.lexsort((np.arange(len(x)), cluster))
        shuffled = group.copy()
        shuffled[order] = group[np.lexsort((rng.random(len(x)), cluster))]
        return shuffled

    observed = spread(group) * (1 - 1e-9)
    return (1 + sum(spread(exchanged()) >= observed for _ in range(rounds))) / (rounds + 1)


def clears(ci_low: float, ci_high: float, threshold: float) -> bool | None:
    """Return whether an interval lies on or above a threshold; None if it contains the threshold."""
    return True if ci_low >= threshold else False if ci_high < threshold else None


def decide(estimate: Estimate, threshold: float) -> tuple[bool | None, str]:
    """Return whether a rate clears a threshold, None if n is too small to decide, and a sentence with the figures."""
    size = f"n = {estimate.n}" + (f" in {estimate.clusters} clusters" if estimate.clusters != estimate.n else "")
    figure = f"{estimate.value:.3f} [{estimate.ci_low:.3f}, {estimate.ci_high:.3f}], {size}, threshold {threshold:.2f}"
    verdict = clears(estimate.ci_low, estimate.ci_high, threshold)
    if verdict is not None:
        return verdict, f"{'clears' if verdict else 'below'}: {figure}"
    side = "above" if estimate.value >= threshold else "below"
    return None, f"undecided at this n (the estimate is {side}): {figure}"


def _by_cluster(values: np.ndarray, clusters: Sequence[str]) -> tuple[np.ndarray, int]:
    names, index = np.unique(np.asarray(clusters), return_inverse=True)
    return np.bincount(index, weights=values, minlength=len(names)), len(names)
