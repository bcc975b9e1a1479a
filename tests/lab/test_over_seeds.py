"""Intervals over seeds and tasks, and the power calculations that rest on their variance components."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from etpi_assets.scoring.intervals import Estimate
from etpi_lab.analysis.over_seeds import Spread, over_seeds_and_tasks
from etpi_lab.analysis.power import designs, planned, power_of, seeds_needed
from etpi_lab.analysis.student_t import cdf, quantile
from lab.bench.intervals_over_seeds import coverage

BETWEEN = Estimate(0.3, 144, 48, 0.2, 0.4, "newcombe")


@pytest.mark.parametrize(
    ("df", "expected"), [(1, 12.7062), (2, 4.3027), (4, 2.7764), (10, 2.2281), (30, 2.0423), (100, 1.9840)]
)
def test_quantiles_are_those_of_the_tables(df, expected):
    assert quantile(0.975, df) == pytest.approx(expected, abs=1e-4)
    assert cdf(-expected, df) == pytest.approx(0.025, abs=1e-5)
    assert quantile(0.975, 1e6) == pytest.approx(NormalDist().inv_cdf(0.975))


def test_interval_covers_where_trainings_differ_and_the_one_over_tasks_does_not():
    covered, width = coverage("seeds and tasks", 3, 96, 0.15, rounds=120)
    alone, narrow = coverage("over tasks", 3, 96, 0.15, rounds=120)
    assert covered >= 0.94 > 0.7 > alone
    assert width > 2 * narrow


def test_equal_seeds_leave_the_interval_over_tasks_nearly_as_it_is():
    wider = over_seeds_and_tasks(BETWEEN, [0.8, 0.8, 0.8], [0.5, 0.5, 0.5])
    assert wider
    t = quantile(0.975, 47)
    assert wider[0].ci_low == pytest.approx(0.3 - 0.1 * t / 1.959964)
    assert wider[1] == Spread(0.0, pytest.approx(48 * (0.1 / 1.959964) ** 2), 3, 48)


def test_few_seeds_that_differ_give_a_t_interval_with_their_degrees_of_freedom():
    certain = Estimate(0.3, 10**6, 10**6, 0.3 - 1e-6, 0.3 + 1e-6, "newcombe")
    more, less = [0.7, 0.8, 0.9], [0.4, 0.5, 0.6]
    wider = over_seeds_and_tasks(certain, more, less)
    assert wider and wider[0].ci_low == pytest.approx(0.3 - quantile(0.975, 4) * math.sqrt(2 * 0.01 / 3), abs=1e-4)
    paired = over_seeds_and_tasks(certain, more, less, paired=True)
    assert paired and paired[0].ci_low == pytest.approx(0.3, abs=1e-5), "every seed changes by the same"
    against_base = over_seeds_and_tasks(certain, more, [])
    assert against_base and against_base[0].ci_low == pytest.approx(
        0.3 - quantile(0.975, 2) * 0.1 / math.sqrt(3), abs=1e-4
    )


def test_two_looks_together_err_no_more_often_than_one_interval_may():
    """Simulated trainings without a difference: three seeds, and six wherever the first three show none."""

    def errors(looks: int) -> float:
        random, wrong, rounds = np.random.default_rng(5), 0, 4000
        for seeds in random.normal(0, 0.1, (rounds, 6)):
            limits = []
            for n in (3, 6):
                value = seeds[:n].mean()
                certain = Estimate(value, 10**6, 10**6, value - 1e-9, value + 1e-9, "known")
                wider = over_seeds_and_tasks(certain, seeds[:n].tolist(), [], looks=looks)
                limits.append(wider[0] if wider else certain)
            wrong += any(of.ci_low > 0 or of.ci_high < 0 for of in limits)
        return wrong / rounds

    assert errors(2) <= 0.05 < 0.07 < errors(1)


def test_one_seed_says_nothing_about_seeds():
    assert over_seeds_and_tasks(BETWEEN, [0.8], [0.5]) is None
    assert over_seeds_and_tasks(BETWEEN, [0.8, 0.9], [0.5]) is None
    assert over_seeds_and_tasks(BETWEEN, [], []) is None


def test_power_agrees_with_simulated_experiments():
    spread, difference, seeds, tasks = Spread(2 * 0.1**2, 0.1, 0, 0), 0.2, 4, 60
    random, shown, rounds = np.random.default_rng(3), 0, 1000
    sd_tasks = math.sqrt(spread.tasks / tasks)
    for _ in range(rounds):
        sides = random.normal(0, 0.1, (2, seeds))
        value = difference + sides[0].mean() - sides[1].mean() + random.normal(0, sd_tasks)
        between = Estimate(value, tasks, tasks, value - 1.96 * sd_tasks, value + 1.96 * sd_tasks, "known")
        wider = over_seeds_and_tasks(between, sides[0].tolist(), sides[1].tolist())
        shown += wider is not None and wider[0].ci_low > 0
    assert power_of(spread, difference, seeds, tasks) == pytest.approx(shown / rounds, abs=0.07)


def test_more_seeds_are_needed_for_smaller_differences_and_noisier_trainings():
    few, many = (seeds_needed(planned(0.5, sd), 0.2, 96) for sd in (0.03, 0.12))
    assert few and many and few.seeds < many.seeds
    assert few.power >= 0.8 > power_of(planned(0.5, 0.03), 0.2, few.seeds - 1, 96)
    smaller = seeds_needed(planned(0.5, 0.12), 0.15, 96)
    assert smaller is None or smaller.seeds > many.seeds
    assert seeds_needed(planned(0.5, 0.1), 0.05, 10) is None, "ten tasks never show it, however many seeds"


def test_designs_trade_tasks_for_seeds():
    sizes = list(designs(planned(0.5, 0.08), 0.2, (60, 120, 240)))
    assert [size.tasks for size in sizes] == sorted({size.tasks for size in sizes})
    assert [size.seeds for size in sizes] == sorted((size.seeds for size in sizes), reverse=True) and len(sizes) > 1
