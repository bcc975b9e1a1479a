"""Influence of training tokens on a held-out objective: the change of their loss along the objective's gradient.

A small step of size s down the loss of a training token changes the held-out loss L by -s * (g . v), with g and v the
gradients of both. For one v, g . v of every token is the directional derivative of its loss, which two forward passes
give, with the weights moved by +e * v and by -e * v. No gradient of a single sample is computed, so rows may be packed
trees. Above 0, training on the token lowered L.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from etpi_resources.labels import IGNORE_INDEX
from etpi_resources.trainers.workers.collate import Sequences, collate
from etpi_resources.trainers.workers.plan import MicroBatch, make_pass
from etpi_resources.trainers.workers.weighted_trainer import nll_at_labels

RELATIVE_STEPS = (1e-5, 1e-4, 1e-3)
"""Lengths of a move of the weights over their norm. Full weights need a short one: in float32, influences at 1e-5 and
1e-4 agree with exact gradients (r above 0.9999), and at 1e-3 the loss is no longer linear (r = 0.38). An adapter has a
small norm, so that a short move drowns in rounding."""

Direction = list[tuple[torch.nn.Parameter, torch.Tensor]]


@dataclass(frozen=True)
class Rows:
    """Stored sequences as rows of forward passes: packed trees, or a padded row for each branch.

    Attributes:
        sequences: the stored ones, or their branches; owners: (rows,) the stored sequence of each.
        places: (tokens,) where each of their tokens is in the stored ones.
    """

    stored: Sequences
    sequences: Sequences
    owners: np.ndarray
    places: np.ndarray
    batches: Sequence[MicroBatch]
    micro_tokens: int
    pad_id: int

    @classmethod
    def of(cls, stored: Sequences, micro_tokens: int, pad_id: int, *, trees: bool) -> Rows:
        """Lay out all sequences; `trees`: the model can be trained on trees."""
        sequences, owners, places = stored, np.arange(len(stored)), np.arange(len(stored.ids))
        if not trees:
            sequences = stored.branches()
            owners = np.repeat(owners, [tree.leaves for tree in stored.trees])
            starts = zip(stored.offsets[:-1], stored.trees, strict=True)
            places = np.concatenate([start + path for start, tree in starts for path, _ in tree.branches()])
        batches = make_pass(sequences.lengths().tolist(), micro_tokens, np.random.default_rng(0), packed=trees)
        return cls(stored, sequences, owners, places, batches, micro_tokens, pad_id)

    def only(self, stored: Iterable[int]) -> Rows:
        """Return the rows of some of the stored sequences, by their numbers."""
        rows = np.flatnonzero(np.isin(self.owners, list(stored)))
        lengths, rng = self.sequences.lengths()[rows].tolist(), np.random.default_rng(0)
        chosen = make_pass(lengths, self.micro_tokens, rng, packed=self.batches[0].packed) if lengths else []
        return replace(self, batches=[replace(b, sequences=tuple(rows[[*b.sequences]].tolist())) for b in chosen])

    def named(self, name: str) -> Rows:
        """Return the rows of the stored sequences with a name."""
        return self.only([number for number, other in enumerate(self.stored.names) if other == name])

    def inputs(self, batch: MicroBatch, device: torch.device) -> dict[str, Any]:
        """Return the tensors of a batch, as `collate` does, on a device."""
        arrays = collate(batch, self.sequences, self.pad_id)
        return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in arrays.items()}


def gradient(model: Any, objective: Iterable[tuple[float, Rows]]) -> Direction:
    """Return the gradient of the sum of factor * w * nll over rows, of the weights that train."""
    model.zero_grad(set_to_none=True)
    for factor, rows in objective:
        for batch in rows.batches:
            inputs = rows.inputs(batch, model.device)
            nll, _ = nll_at_labels(model, inputs)
            (factor * (nll * inputs["weights"]).sum()).backward()
    direction = [(p, p.grad) for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return direction


def norm(tensors: Iterable[torch.Tensor]) -> float:
    """Return the Euclidean norm of tensors together, summed in float64."""
    return sum(float(x.detach().double().square().sum()) for x in tensors) ** 0.5


def along(direction: Direction, other: Direction) -> float:
    """Return the dot product of two gradients; a weight that one of them lacks counts as 0."""
    of = {id(parameter): value for parameter, value in other}
    return sum(float((value * of[id(p)]).sum(dtype=torch.float64)) for p, value in direction if id(p) in of)


@torch.no_grad()
def token_losses(model: Any, rows: Rows) -> np.ndarray:
    """Return w * nll of every stored token, (stored,) float64; 0 where it is no label or not in the rows."""
    losses = np.zeros(len(rows.stored.ids))
    for batch in rows.batches:
        inputs = rows.inputs(batch, model.device)
        nll, _ = nll_at_labels(model, inputs)
        # Of both layouts, the labels of a batch are in the order of its sequences and of their tokens.
        values = (nll * inputs["weights"]).double()[inputs["labels"] != IGNORE_INDEX].cpu().numpy()
        offsets = rows.sequences.offsets
        tokens = np.concatenate([np.arange(offsets[index], offsets[index + 1]) for index in batch.sequences])
        losses[rows.places[tokens[rows.sequences.labels[tokens] != IGNORE_INDEX]]] = values
    return losses


@torch.no_grad()
def influences(model: Any, rows: Rows, direction: Direction, relative_step: float = RELATIVE_STEPS[0]) -> np.ndarray:
    """Return g . v of every stored token, (stored,) float64, for the direction v.

    Args:
        relative_step: length of the move of the weights over their norm.
    """
    length = norm(value for _, value in direction)
    step = relative_step * norm(parameter for parameter, _ in direction) / length if length else 0.0
    if not step:
        return np.zeros(len(rows.stored.ids))
    losses = []
    for move in (step, -2 * step):
        for parameter, value in direction:
            parameter.add_(value, alpha=move)
        losses.append(token_losses(model, rows))
    for parameter, value in direction:
        parameter.add_(value, alpha=step)
    return (losses[0] - losses[1]) / (2 * step)
