"""The group-relative advantage.

Belongs here: from the rewards of a group to advantages. Does not belong here: rewards, or the loss.

(R - mean) / (std + eps) within a group (Shao et al., 2024), in float64, and exactly 0 where all rewards of the group
are equal: in float32 the rounding of the mean over an eps of 1e-8 gives such groups advantages in the tens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def group_advantages(
    rewards: Sequence[float], group_size: int, *, eps: float, ddof: int, scale: bool = True
) -> list[float]:
    """Advantages of groups that stand one after the other, `group_size` rewards each.

    Args:
        eps: added to the standard deviation.
        ddof: 1 for the sample's, 0 for the population's.
        scale: whether to divide by the deviation at all.

    Raises:
        ValueError: the rewards are no whole groups, the groups too small for ddof, or a reward is not finite; names it.
    """
    if len(rewards) % group_size or group_size <= ddof:
        raise ValueError(f"{len(rewards)} rewards are no whole groups of {group_size} with ddof = {ddof}")
    if bad := [index for index, reward in enumerate(rewards) if not math.isfinite(reward)]:
        raise ValueError(f"reward {bad[0]} of {len(rewards)} is {rewards[bad[0]]}; no advantage can be computed")
    groups = np.asarray(rewards, dtype=np.float64).reshape(-1, group_size)
    centred = groups - groups.mean(axis=1, keepdims=True)
    if scale:
        centred = centred / (groups.std(axis=1, ddof=ddof, keepdims=True) + eps)
    return np.where(constant(groups)[:, None], 0.0, centred).ravel().tolist()


def constant_share(rewards: Sequence[float], group_size: int) -> float:
    """The share of groups whose rewards are all equal: they teach nothing."""
    return float(constant(np.asarray(rewards, dtype=np.float64).reshape(-1, group_size)).mean())


def constant(groups: np.ndarray) -> np.ndarray:
    """(groups,) bool: max == min."""
    return groups.max(axis=1) == groups.min(axis=1)
