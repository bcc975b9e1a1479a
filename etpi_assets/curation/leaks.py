"""Search the stored pairs for steering, on all cores.

It is a second reading of the pairs, because only all rollouts together say which texts are steering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etpi_assets.curation.default_prompt import student_format
from etpi_assets.curation.integrity import steering_figures
from etpi_assets.curation.steering import SteeringNgrams
from etpi_assets.specs.experiment import ExperimentSpec
from etpi_assets.trajectories.rollout_checks import merged
from etpi_resources.lake.parquet import RowRanges
from etpi_resources.lake.stored import Stored
from etpi_resources.process.pool import ordered_map, workers_for

_COLUMNS = ["rollout_id", "agent_id", "turn", "prefix_turn", "pair_id", "suffix_ids", "output_ids"]
_ROWS = 4096
"""Pairs that are searched at a time, at least."""
_SECONDS_PER_PAIR = 3e-4
"""Estimated seconds of one core to search a pair."""


def steering_leaks(pairs: Stored, figures: Mapping[str, Any], spec: ExperimentSpec) -> dict[str, Any]:
    """Return `steering_figures` of all pairs, given the figures of their blocks; raises as `SteeringNgrams.build`."""
    if not figures["steering"]:
        return {"pairs": len(pairs), "leaks": 0, "first": []}
    ranges = ((f"pairs {start} to {stop}", (start, stop)) for start, stop in _ranges(figures["rows"]))
    factory = _LeakFactory(pairs, spec, sorted({*figures["steering"]}), sorted({*figures["systems"]}))
    workers = workers_for(len(pairs) * _SECONDS_PER_PAIR)
    return merged(ordered_map(factory, ranges, workers=workers, reads=pairs.paths))


@dataclass(frozen=True)
class _LeakFactory:
    """Inputs of a worker process that searches ranges of the pairs: the texts, from which it builds the n-grams."""

    pairs: Stored
    spec: ExperimentSpec
    steering: Sequence[str]
    systems: Sequence[str]

    def __call__(self) -> Callable[[tuple[int, int]], dict[str, Any]]:
        ranges = RowRanges(self.pairs.name, self.pairs.paths, _COLUMNS)
        ngrams = SteeringNgrams.build(self.steering, self.systems, student_format(self.spec))
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
