"""`etpi lab power`: the table of a power calculation."""

from __future__ import annotations

from collections.abc import Sequence

from etpi.run.columns import aligned
from etpi_lab.analysis.power import MOST_SEEDS, planned, power_of, seeds_needed

TASKS = (24, 48, 96, 192, 384)


def table(difference: float, rate: float, seed_sd: float, tasks: Sequence[int], power: float) -> str:
    """Return, for each number of tasks, how many seeds a side show the difference, and the power of three seeds."""
    spread = planned(rate, seed_sd)
    rows = [["tasks", "seeds a side", "power", "power of 3 seeds"]]
    for number in sorted(tasks):
        size = seeds_needed(spread, difference, number, power)
        seeds = [str(size.seeds), f"{size.power:.2f}"] if size else [f"more than {MOST_SEEDS}", "-"]
        rows.append([str(number), *seeds, f"{power_of(spread, difference, 3, number):.2f}"])
    return (
        f"To show a difference of {difference:g} with probability {power:g}: two conditions at rates near {rate:g},\n"
        f"two independent groups of trainings whose rates differ by a standard deviation of {seed_sd:g}, all on the\n"
        f"same tasks.\n\n{aligned(rows, right=(0, 1, 2, 3))}\n\n"
        "Half of an attempt's variance is taken to lie between tasks (etpi_lab/analysis/power.py)."
    )
