"""The group-relative advantage of GRPO: (R - mean) / (std + eps) within a group (Shao et al., 2024).

Computed in float64, and exactly 0 where all rewards of a group are equal: in float32, the rounding error of the mean
divided by an eps of 1e-8 gives such groups advantages in the tens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def group_advantages(
    rewards: Sequence[float], group_size: int, *, eps: float, ddof: int, scale: bool = True
) -> list[float]:
    """Return the advantage of every reward.

    Args:
        rewards: consecutive groups of `group_size` rewards each.
        eps: added to the standard deviation.
        ddof: 1 for the sample standard deviation, 0 for the population's.
        scale: whether to divide by the standard deviation at all.

    Raises:
        ValueError: the rewards do not divide into whole groups, a group is too small for `ddof`, or a reward is not
            finite; the message gives its index.
    """
    if len(rewards) % group_size or group_size <= ddof:
        raise ValueError(f"{len(rewards)} rewards do not divide into groups of {group_size} with ddof = {ddof}")
    if not_finite := [index for index, reward in enumerate(rewards) if not math.isfinite(reward)]:
        raise ValueError(f"reward {not_finite[0]} of {len(rewards)} is {rewards[not_finite[0]]}; it has no advantage")
    groups = np.asarray(rewards, dtype=np.float64).reshape(-1, group_size)
    centred = groups - groups.mean(axis=1, keepdims=True)
    if scale:
        centred = centred / (groups.std(axis=1, ddof=ddof, keepdims=True) + eps)
    return np.where(constant(groups)[:, None], 0.0, centred).ravel().tolist()


def constant(groups: np.ndarray) -> np.ndarray:
    """Return whether all rewards of a group are equal, shape (groups,), bool."""
    return groups.max(axis=1) == groups.min(axis=1)
