"""The in-process engines over the weights of a policy in training, or a copy of them.

They add two things to `transformers`: they clear the cache when the weights change, and their log-probabilities can be
compared with the trainer's.
"""

from __future__ import annotations

import copy
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
        self._clear()
        try:
            yield
        finally:
            self._model.set_attn_implementation(attention)
            self._model.train(training)

    def _clear(self) -> None:
        """Forget what was computed from other weights."""
        self._slots.clear()
        if self._decode_steps is not None:
            self._decode_steps.clear()

    def _logprobs(self, rows: Sequence[_BatchRow], logits: torch.Tensor) -> torch.Tensor:
        # Greedy decoding samples from no distribution, so its log-probabilities are those at temperature 1.
        temperature = [row.request.sampler.temperature or 1.0 for row in rows]
        return torch.log_softmax(logits / torch.tensor(temperature, device=logits.device)[:, None], -1)


class CopyEngine(LiveEngine):
    """Generates from a copy of the policy, also while the policy is trained; weights that are not trained are shared.

    Inside `generating` it keeps the policy's weights under their version; `load` has it generate from kept ones.
    """

    def __init__(self, model: Any, name: str, chat: ChatFormat) -> None:
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._kept: dict[int, list[torch.Tensor]] = {}
        frozen = {id(parameter): parameter for parameter in model.parameters() if not parameter.requires_grad}
        copied = copy.deepcopy(model, frozen)
        vars(copied).pop("forward", None)  # a trainer's wrapper around the original's
        self._copies = [parameter for parameter in copied.parameters() if parameter.requires_grad]
        super().__init__(copied.eval(), name, chat)
        copied.set_attn_implementation(self._attention)

    @contextmanager
    def generating(self, step: int) -> Iterator[None]:
        """Keep the weights after `step` optimiser steps until they are loaded."""
        self._kept[step] = [parameter.detach().to("cpu", copy=True) for parameter in self._trained]
        yield

    @torch.no_grad()
    def load(self, version: int) -> None:
        """Generate from the kept weights of this version, and drop older ones; nothing may be generated meanwhile."""
        for parameter, kept in zip(self._copies, self._kept[version], strict=True):
            parameter.copy_(kept)
        for older in [number for number in self._kept if number < version]:
            del self._kept[older]
        self.name = f"{self._policy}+{version}"
        self._clear()
