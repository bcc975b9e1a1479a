"""The cache of models that `slots` cannot hold: one `transformers` cache per conversation, one row per forward pass.

It serves any causal language model, with sliding windows, attention sinks or shared keys, because the model itself
computes its attention. Conversations do not share a forward pass, so throughput does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from etpi_resources.engines.slot_table import SlotTable


class ModelCaches(SlotTable):
    """`count` slots, each with a cache as the model's configuration asks for."""

    def __init__(self, count: int, config: Any) -> None:
        super().__init__(count, can_cut=False)
        self._config = config
        self._caches: dict[int, DynamicCache] = {}

    def reset(self, slot: int) -> None:
        self._caches.pop(slot, None)

    def last_logits(self, model: Any, slot: int, ids: Sequence[int]) -> torch.Tensor:
        """Append the ids to the slot's cache; return the logits after the last one, (1, vocabulary), float32."""
        cache = self._caches.get(slot)
        if cache is None:
            cache = self._caches[slot] = DynamicCache(config=self._config)
        new = torch.tensor([list(ids)], device=model.device)
        return model(input_ids=new, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
