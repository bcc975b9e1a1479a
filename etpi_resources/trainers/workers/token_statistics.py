"""Collect the log-probability and the entropy of every policy token of a round, from the passes that train on it.

Nothing is computed for them: the loss has both tensors. Of each pass they are copied to memory once, 8 bytes a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from etpi_resources.trainers.policy_link import Sample, TokenStatistics


class RoundStatistics:
    """The statistics of one round's samples; a pass adds some samples, in any order."""

    def __init__(self, samples: Sequence[Sample] = ()) -> None:
        self._masks = [np.array(sample.mask, dtype=bool) for sample in samples]
        self._values: dict[int, np.ndarray] = {}

    def add(self, places: torch.Tensor, in_loss: torch.Tensor, logprobs: torch.Tensor, entropies: torch.Tensor) -> None:
        """Add the samples of a pass.

        Args:
            places: (B,) int64, the position of each sample in the round.
            in_loss: (B,) bool; a sample that is not in the loss was not processed, and gets NaN.
            logprobs, entropies: (B, C), of the tokens after the prompt, padded on the right; nats.
        """
        both = torch.stack((logprobs.detach(), entropies.detach()), dim=1).float()
        values = torch.where(in_loss[:, None, None], both, float("nan")).cpu().numpy()
        for place, of_sample in zip(places.tolist(), values, strict=True):
            mask = self._masks[place]
            self._values[place] = of_sample[:, : len(mask)][:, mask]

    def take(self) -> TokenStatistics | None:
        """Return the statistics once every sample has been added, and forget them; None before and after that."""
        if not self._masks or len(self._values) < len(self._masks):
            return None
        flat = np.concatenate([self._values[place] for place in range(len(self._masks))], axis=1).astype("<f4")
        self._masks, self._values = [], {}
        return TokenStatistics(*(row.tobytes() for row in flat))
