"""Muon in float32: momentum whose update is orthogonalised (Jordan et al. 2024).

`torch.optim.Muon` differs in one point: it orthogonalises in bfloat16, which most CPUs emulate (see `precision`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz iteration; Jordan et al. chose them for the steepest slope at zero."""

STEPS = 5
EPSILON = 1e-7


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, each matrix's update orthogonalised and scaled by sqrt(max(1, rows / columns)).

    Args:
        parameters: matrices, float32.
        lr: learning rate. momentum: weight of the running mean of gradients.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], *, lr: float, momentum: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]: no closure computes a loss again
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            momentum = group["momentum"]
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                mean = state.setdefault("mean", torch.zeros_like(matrix))
                mean.lerp_(matrix.grad, 1 - momentum)
                update = orthogonal(matrix.grad.lerp(mean, momentum))
                rows, columns = matrix.shape
                matrix.add_(update, alpha=-group["lr"] * math.sqrt(max(1.0, rows / columns)))


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """About U V^T of a matrix U S V^T, in its dtype: singular values end between 0.5 and 1.5."""
    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=EPSILON)  # a spectral norm of 1 at most
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x
