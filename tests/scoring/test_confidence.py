"""Confidence sequences cover the mean however often one looks, and intervals of a fixed n do not."""

from __future__ import annotations

import numpy as np
import pytest

from etpi_assets.scoring.confidence import betting_sequence, sequential_change, sequential_mean, task_order
from etpi_assets.scoring.intervals import wilson

ROUNDS, TASKS = 200, 120


def _misses(limits: np.ndarray, mean: float) -> bool:
    return bool(((limits[:, 0] > mean) | (limits[:, 1] < mean)).any())


@pytest.mark.parametrize("chances", [(0.5, 0.0, 0.5), (0.1, 0.5, 0.4), (0.02, 0.9, 0.08)])
def test_sequence_covers_the_mean_at_every_task_at_once(chances):
    """Paired differences of -1, 0 and 1, looked at after every task: of 200 evaluations, at most 5 % may ever miss."""
    random, values = np.random.default_rng(7), np.array([0.0, 0.5, 1.0])
    mean = float(np.dot(chances, values))
    missed = sum(_misses(betting_sequence(random.choice(values, TASKS, p=chances)), mean) for _ in range(ROUNDS))
    assert missed <= 0.05 * ROUNDS


def test_interval_of_a_fixed_n_misses_far_more_often_when_looked_at_repeatedly():
    """Why the sequence is needed: the Wilson interval at every look from 12 tasks on."""
    random, missed = np.random.default_rng(7), 0
    for _ in range(ROUNDS):
        hits = np.cumsum(random.random(TASKS) < 0.5)
        limits = np.array([wilson(float(hits[n - 1]), n) for n in range(12, TASKS + 1)])
        missed += _misses(limits, 0.5)
    assert missed > 0.15 * ROUNDS


def test_sequence_narrows_and_its_width_is_near_that_of_a_fixed_n():
    random = np.random.default_rng(1)
    limits = betting_sequence(random.choice([0.0, 0.5, 1.0], 192, p=[0.1, 0.5, 0.4]))
    width = limits[:, 1] - limits[:, 0]
    assert width[23] > width[95] > width[191]
    fixed = 2 * 1.96 * 0.32 / np.sqrt(192)
    assert fixed < width[191] < 1.8 * fixed


def test_change_is_that_of_the_tasks_within_minus_one_and_one():
    change = sequential_change([1.0] * 20, [0.0] * 20)
    assert (change.value, change.n) == (1.0, 20) and 0.3 < change.ci_low < 1.0 == change.ci_high
    none = sequential_change([1.0, 0.0] * 20, [1.0, 0.0] * 20)
    assert none.ci_low < 0 == none.value < none.ci_high
    rate = sequential_mean([1.0, 0.0] * 20)
    assert 0 <= rate.ci_low < rate.value == 0.5 < rate.ci_high <= 1


def test_value_outside_the_unit_interval_is_refused():
    with pytest.raises(ValueError, match=r"value 2 is 1.5"):
        betting_sequence([0.5, 1.5])


def test_order_of_tasks_mixes_repositories_and_stays():
    tasks = [f"{repo}-{i}" for repo in "ab" for i in range(50)]
    ordered = sorted(tasks, key=task_order)
    first = [task[0] for task in ordered[:20]]
    assert 5 <= first.count("a") <= 15
