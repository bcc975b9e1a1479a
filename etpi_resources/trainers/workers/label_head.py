"""The negative log-likelihood of labels, computed without holding the logits of all positions in memory.

A third of a merged sequence's tokens may be labels, and a real vocabulary has 150,000 entries: their logits in float32
would be the largest tensor of all. They are computed a tile at a time, and again in the backward pass; or by Liger's
fused kernel, on a GPU.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from etpi_resources.labels import IGNORE_INDEX

TILE = 1 << 25
"""Logits of one tile: 128 MiB in float32."""

_PROBE_IDS = 8
_ROUNDING = {torch.float32: 1e-4}
"""Largest relative difference of equal logits by dtype; 1e-2 in 16 bits."""


def add_label_head(model: PreTrainedModel, *, liger: bool = False) -> None:
    """Let `model(..., label_positions=(P,), labels=(B, P))` return, of each label, its negative log-likelihood, (B, P)
    float32, 0 where it is -100, and whether the model ranks it first, (B, P) bool. A label is predicted from the hidden
    state at its position. Without `label_positions` the model is called as before.

    It replaces `forward`, so that the wrappers of forward (autocast, an adapter) apply.

    Args:
        liger: compute with Liger's kernel, which needs Triton.

    Raises:
        ValueError: with `liger`, of a model that changes hidden states before its output matrix, or logits after it.
    """
    original = type(model).forward  # unbound, so that copies of the model work too
    plain, cuts = _is_plain(model), "logits_to_keep" in inspect.signature(original).parameters
    if liger and not plain:
        raise ValueError(
            f"{model.config.model_type} has more than a matrix between its last hidden states and its logits, which "
            "Liger's kernel does not compute; remove train.loss_kernel"
        )

    def forward(
        self: Any,
        *args: Any,
        label_positions: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **named: Any,
    ) -> Any:
        if label_positions is None:
            return original(self, *args, **named) if labels is None else original(self, *args, labels=labels, **named)
        assert labels is not None, "label_positions without labels"
        if not plain:
            kept = {"logits_to_keep": label_positions} if cuts else {}
            logits = original(self, *args, **kept, **named).logits
            return _score(logits if cuts else logits[:, label_positions], labels)
        hidden = self.base_model(*args, **named).last_hidden_state[:, label_positions]
        head = self.get_output_embeddings()
        if liger:
            return _score_with_liger(head, hidden, labels)
        rows = max(1, TILE // (len(labels) * head.weight.shape[0]))
        if labels.shape[1] <= rows:
            return _score(head(hidden), labels)
        tiles = zip(hidden.split(rows, dim=1), labels.split(rows, dim=1), strict=True)
        nll, hits = zip(*(_score_checkpointed(head, h, tile) for h, tile in tiles), strict=True)
        return torch.cat(nll, dim=1), torch.cat(hits, dim=1)

    # Trainers read the signature. functools.wraps would not do: accelerate follows `__wrapped__` to the class's own
    # forward and restores that.
    patch: Any = forward
    patch.__signature__ = inspect.signature(type(model).forward)
    patched: Any = model
    patched.forward = types.MethodType(forward, model)


@torch.no_grad()
def _is_plain(model: Any) -> bool:
    """Return whether a model's logits are the products of its last hidden states and its output matrix, measured."""

    def compare(self: Any, ids: torch.Tensor) -> bool:
        logits = type(model).forward(self, input_ids=ids, use_cache=False).logits
        try:
            products = self.get_output_embeddings()(self.base_model(input_ids=ids, use_cache=False).last_hidden_state)
            gap = (products - logits).abs().max() / logits.abs().max()
        except (AttributeError, TypeError, RuntimeError):
            return False
        return float(gap) < _ROUNDING.get(logits.dtype, 1e-2)

    forward = model.forward
    model.forward = types.MethodType(compare, model)  # within it the weights of a sharded model are gathered
    try:
        return model(torch.arange(_PROBE_IDS, device=model.device)[None])
    finally:
        model.forward = forward


def _score_checkpointed(
    head: torch.nn.Module, hidden: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_score` of the head's logits, which the backward pass computes again."""
    scores: Any = checkpoint(lambda h: _score(head(h), labels), hidden, use_reentrant=False)
    return scores


def _score_with_liger(head: Any, hidden: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_score` of the head's logits, by a kernel that never holds them."""
    from liger_kernel.transformers.functional import (  # pyright: ignore[reportMissingImports]
        liger_fused_linear_cross_entropy,
    )

    done = liger_fused_linear_cross_entropy(
        hidden.flatten(0, 1),
        head.weight,
        labels.flatten(),
        bias=head.bias,
        ignore_index=IGNORE_INDEX,
        reduction="none",
        return_token_accuracy=True,
    )
    return done.loss.float().view_as(labels), done.token_accuracy.detach().view_as(labels) > 0


def _score(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (negative log-likelihood of each label in float32, whether it has the largest logit)."""
    nll = cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    return nll.view_as(labels), logits.detach().argmax(-1) == labels
