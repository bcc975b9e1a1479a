"""The loss of labels where they stand, without the logits of all of them at once.

Belongs here: from a model's last hidden states to the negative log-likelihood of labels, and which of them it ranks
first. Does not belong here: which labels and weights (`collate`), or the loss of a step (`weighted_trainer`).

Of a merged sequence a third of the tokens may be learnt, and a real vocabulary has 150,000 entries: their logits in
float32 would be the largest thing in memory. They are made a tile at a time, and again in the backward pass.
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

_RESCALED = (
    "final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier",
)  # fmt: skip
"""What a config has where a model does more to its hidden states than its output matrix."""


def add_label_head(model: PreTrainedModel) -> None:
    """Let `model(..., learnt=(P,), labels=(B, P))` return the negative log-likelihood of each label, (B, P) float32, 0
    where it is -100, predicted from the hidden state at position `learnt`, and whether the model ranks it first, (B, P)
    bool. Called without `learnt` it is as it was.

    Inside the forward pass, so that what wraps it (autocast, an adapter) wraps this too.
    """
    original = type(model).forward  # of whichever copy of the model it is called on
    config = model.config.get_text_config()
    plain = all(getattr(config, name, None) in (None, 1.0) for name in _RESCALED)

    def forward(
        self: Any, *args: Any, learnt: torch.Tensor | None = None, labels: torch.Tensor | None = None, **named: Any
    ) -> Any:
        if learnt is None:
            return original(self, *args, **named) if labels is None else original(self, *args, labels=labels, **named)
        assert labels is not None, "positions to learn at without labels"
        if not plain:
            return _told(original(self, *args, logits_to_keep=learnt, **named).logits, labels)
        hidden = self.base_model(*args, **named).last_hidden_state[:, learnt]
        head = self.get_output_embeddings()
        rows = max(1, TILE // (len(labels) * head.weight.shape[0]))
        if labels.shape[1] <= rows:
            return _told(head(hidden), labels)
        tiles = zip(hidden.split(rows, dim=1), labels.split(rows, dim=1), strict=True)
        nll, hits = zip(*(_again_in_backward(head, h, tile) for h, tile in tiles), strict=True)
        return torch.cat(nll, dim=1), torch.cat(hits, dim=1)

    # Trainers read the signature. Not functools.wraps: accelerate follows `__wrapped__` down to the class's own forward
    # and puts that back.
    given: Any = forward
    given.__signature__ = inspect.signature(type(model).forward)
    patched: Any = model
    patched.forward = types.MethodType(forward, model)


def _again_in_backward(
    head: torch.nn.Module, hidden: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    found: Any = checkpoint(lambda h: _told(head(h), labels), hidden, use_reentrant=False)
    return found


def _told(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    nll = cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    return nll.view_as(labels), logits.detach().argmax(-1) == labels
