"""The trainer's log-probability and entropy of each token that the policy generated: a file beside each round's.

A file has two rows of little-endian float32, log-probabilities and entropies in nats: the samples of the round in
order, and of each its turns' `output_ids` one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from etpi_resources.lake.check_outcome import BadData
from etpi_resources.lake.files import write_atomically
from etpi_resources.trainers.policy_link import TokenStatistics

SUFFIX = ".tokens"


def write_statistics(round_path: Path, statistics: TokenStatistics) -> None:
    """Write the statistics of a round whose file is `round_path`."""
    write_atomically(round_path.with_suffix(SUFFIX), statistics.logprobs + statistics.entropies)


def read_statistics(round_path: Path, tokens: Sequence[int]) -> list[np.ndarray | None]:
    """Return (2, n) float32 for each sample, log-probabilities and entropies; None where they were not computed, as for
    samples that are left out of the loss, or a round from before they were kept.

    Args:
        tokens: how many tokens of the policy each sample of the round has.

    Raises:
        BadData: the file is of another round.
    """
    path = round_path.with_suffix(SUFFIX)
    if not path.exists():
        return [None] * len(tokens)
    values = np.fromfile(path, dtype="<f4")
    if len(values) != 2 * sum(tokens):
        raise BadData(
            f"{path} has {len(values)} values, its round has {sum(tokens)} tokens of the policy, two values each; "
            "remove the run's folder below checkpoints/rounds and train again"
        )
    rows = np.split(values.reshape(2, -1), np.cumsum(tokens)[:-1], axis=1)
    return [None if np.isnan(row).all() else row for row in rows]
