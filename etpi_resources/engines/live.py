"""The in-process engine over the weights of a policy in training.

It adds two things to `transformers`: it clears the cache when the weights change, and its log-probabilities can be
compared with the trainer's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from etpi_resources.chat.format import ChatFormat
from etpi_resources.engines.transformers import TransformersEngine, _BatchRow


class LiveEngine(TransformersEngine):
    """Generates from a model that the caller trains, only inside `generating`, between optimiser steps.

    Unlike TransformersEngine, it reports the log-probability of each id under the distribution it was sampled from,
    temperature included: the one that a policy-gradient loss computes.

    Args:
        model: a causal language model, adapters in place.
        name: the policy's name.
    """

    def __init__(self, model: Any, name: str, chat: ChatFormat) -> None:
        self._start(model, name, chat)
        self._policy = name

    @contextmanager
    def generating(self, step: int) -> Iterator[None]:
        """Put the model into evaluation mode and clear the cache of earlier weights; restore the mode afterwards.

        Args:
            step: optimiser steps done; completions name the model "name+step".
        """
        self.name = f"{self._policy}+{step}"
        training, attention = self._model.training, self._model.config._attn_implementation
        self._model.eval()
        self._model.set_attn_implementation(self._attention)
        self._slots.clear()
        if self._decode_steps is not None:
            self._decode_steps.clear()
        try:
            yield
        finally:
            self._model.set_attn_implementation(attention)
            self._model.train(training)

    def _logprobs(self, rows: Sequence[_BatchRow], logits: torch.Tensor) -> torch.Tensor:
        # Greedy decoding samples from no distribution, so its log-probabilities are those at temperature 1.
        temperature = [row.request.sampler.temperature or 1.0 for row in rows]
        return torch.log_softmax(logits / torch.tensor(temperature, device=logits.device)[:, None], -1)
