"""The label convention of training sequences."""

from __future__ import annotations

IGNORE_INDEX = -100
"""The label of a token outside the loss, the default `ignore_index` of PyTorch's cross entropy."""
