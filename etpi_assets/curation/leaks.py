"""Search the stored pairs for steering, on all cores.

It is a second reading of the pairs, because only all rollouts together say which texts are steering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from etpi_assets.curation.default_prompt import student_format
from etpi_assets.curation.integrity import STEERING_COLUMNS, steering_figures
from etpi_assets.curation.steering import SteeringNgrams
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.trajectories.rollout_checks import merged
from etpi_resources.lake.parquet import RowRanges
from etpi_resources.lake.stored import Stored
from etpi_resources.process.pool import ordered_map, workers_for

_ROWS = 4096
"""Pairs that are searched at a time, at least."""
_SECONDS_PER_PAIR = 3e-4
"""Estimated seconds of one core to search a pair."""


def steering_leaks(pairs: Stored, figures: Mapping[str, Any], spec: ExperimentSpec) -> dict[str, Any]:
    """Return `steering_figures` of all pairs, given the figures of their blocks; raises as `SteeringNgrams.build`."""
    if not figures["steering"]:
        return {"pairs": len(pairs), "leaks": 0, "first": []}
    ranges = ((f"pairs {start} to {stop}", (start, stop)) for start, stop in _ranges(figures["rows"]))
    factory = partial(_searcher, pairs, spec, sorted({*figures["steering"]}), sorted({*figures["systems"]}))
    workers = workers_for(len(pairs) * _SECONDS_PER_PAIR)
    return merged(ordered_map(factory, ranges, workers=workers, reads=pairs.paths))


def _searcher(
    pairs: Stored, spec: ExperimentSpec, steering: Sequence[str], systems: Sequence[str]
) -> Callable[[tuple[int, int]], dict[str, Any]]:
    """Return the function that searches a range of the pairs for the n-grams of the texts."""
    ranges = RowRanges(pairs.name, pairs.paths, STEERING_COLUMNS)
    ngrams = SteeringNgrams.build(steering, systems, student_format(spec))
    return lambda bounds: steering_figures(ranges.read(*bounds), ngrams)


def _ranges(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of at least `_ROWS` pairs that end with a block; at least one."""
    start = stop = 0
    for of_block in rows:
        stop += of_block
        if stop - start >= _ROWS:
            yield start, stop
            start = stop
    if stop > start or not stop:
        yield start, stop
