"""The in-process engine over the weights of a policy while it is trained.

Belongs here: what generating from live weights adds to `transformers`: forgetting what was computed with older ones,
and log-probabilities that the trainer's can be compared with. Does not belong here: training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from etpi_resources.chat.format import ChatFormat
from etpi_resources.engines.slots import ATTENTION
from etpi_resources.engines.transformers import TransformersEngine, _Row


class LiveEngine(TransformersEngine):
    """Generates from a model that somebody else trains; only within `generating`, while no step is taken.

    Unlike its parent it reports the log-probability of each id under the distribution it was drawn from, temperature
    included: the one a policy-gradient loss computes.

    Args:
        model: a causal language model, adapters in place.
        name: what the policy goes by.

    Raises:
        ValueError: the model has layers whose memory is not kept (`slots.layer_kinds`).
    """

    def __init__(self, model: Any, name: str, chat: ChatFormat) -> None:
        self._start(model, name, chat)
        self._policy = name

    @contextmanager
    def generating(self, step: int) -> Iterator[None]:
        """The model in evaluation mode, nothing of earlier weights remembered; its mode is restored.

        Args:
            step: optimiser steps done; completions are of the model "name+step".
        """
        self.name = f"{self._policy}+{step}"
        training, attention = self._model.training, self._model.config._attn_implementation
        self._model.eval()
        self._model.set_attn_implementation(ATTENTION)
        self._slots.forget()
        try:
            yield
        finally:
            self._model.set_attn_implementation(attention)
            self._model.train(training)

    def _logprobs(self, rows: Sequence[_Row], logits: torch.Tensor) -> torch.Tensor:
        # A greedy draw has no distribution of its own.
        temperature = [row.request.sampler.temperature or 1.0 for row in rows]
        return torch.log_softmax(logits / torch.tensor(temperature, device=logits.device)[:, None], -1)
