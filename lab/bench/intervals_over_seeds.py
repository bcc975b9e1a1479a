"""Coverage and width of intervals of a difference when three trainings a side differ by chance.

Simulated, with fixed random seeds: S trainings a side answer the same tasks; the truth is a difference of 0 over other
trainings and tasks. Compared: the interval over tasks alone, a hierarchical bootstrap (resample seeds of each side,
then tasks), and `over_seeds_and_tasks`.

    python lab/bench/intervals_over_seeds.py [rounds]
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

from etpi_assets.scoring.intervals import Estimate, difference, rate
from etpi_lab.analysis.over_seeds import over_seeds_and_tasks

Limits = tuple[float, float]


def attempts(random: np.random.Generator, seeds: int, tasks: int, seed_sd: float, task_sd: float) -> np.ndarray:
    """Return hits of both sides, shape (2, seeds, tasks): chance = 0.5 + seed's effect + task's effect."""
    effects = random.normal(0, task_sd, tasks) + random.normal(0, seed_sd, (2, seeds, 1))
    return (random.random((2, seeds, tasks)) < np.clip(0.5 + effects, 0.02, 0.98)).astype(float)


def over_tasks(hits: np.ndarray) -> Estimate:
    """Return the interval over tasks, as findings compute it from the metrics of both sides."""
    names = [str(task) for _ in range(hits.shape[1]) for task in range(hits.shape[2])]
    more, less = (rate(side.ravel().tolist(), names) for side in hits)
    assert more and less
    return difference(more, less)


def tasks_alone(hits: np.ndarray, random: np.random.Generator) -> Limits:
    return (of := over_tasks(hits)).ci_low, of.ci_high


def bootstrap(hits: np.ndarray, random: np.random.Generator, rounds: int = 500) -> Limits:
    """Return the percentile interval of a bootstrap that resamples each side's seeds, then the common tasks."""
    _, seeds, tasks = hits.shape
    chosen = random.integers(seeds, size=(rounds, 2, seeds))
    weights = random.multinomial(tasks, [1 / tasks] * tasks, size=rounds) / tasks
    means = [np.einsum("rst,rt->r", hits[side][chosen[:, side]], weights) / seeds for side in (0, 1)]
    low, high = np.quantile(means[0] - means[1], [0.025, 0.975])
    return float(low), float(high)


def seeds_and_tasks(hits: np.ndarray, random: np.random.Generator) -> Limits:
    values = hits.mean(axis=2)
    wider = over_seeds_and_tasks(over_tasks(hits), values[0].tolist(), values[1].tolist())
    assert wider
    return wider[0].ci_low, wider[0].ci_high


METHODS: dict[str, Callable[[np.ndarray, np.random.Generator], Limits]] = {
    "over tasks": tasks_alone, "bootstrap": bootstrap, "seeds and tasks": seeds_and_tasks,
}  # fmt: skip


def coverage(
    method: str, seeds: int, tasks: int, seed_sd: float, task_sd: float = 0.2, rounds: int = 400
) -> tuple[float, float]:
    """Return (share of rounds whose interval contains 0, mean width)."""
    random = np.random.default_rng(0)
    limits = np.array(
        [METHODS[method](attempts(random, seeds, tasks, seed_sd, task_sd), random) for _ in range(rounds)]
    )
    return float(((limits[:, 0] <= 0) & (limits[:, 1] >= 0)).mean()), float((limits[:, 1] - limits[:, 0]).mean())


def main(rounds: int = 400) -> None:
    print("| seeds | tasks | sd of seeds | " + " | ".join(f"{name}: covers, width" for name in METHODS) + " |")
    print("| --- " * (3 + len(METHODS)) + "|")
    for seeds, tasks in ((3, 48), (5, 48), (3, 192)):
        for seed_sd in (0.0, 0.05, 0.15):
            cells = (coverage(name, seeds, tasks, seed_sd, rounds=rounds) for name in METHODS)
            print(f"| {seeds} | {tasks} | {seed_sd} | " + " | ".join(f"{c:.2f}, {w:.2f}" for c, w in cells) + " |")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
