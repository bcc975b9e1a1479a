"""A cache of keys, values and recurrent states for many conversations, one slot each, and the attention that reads it.

A conversation keeps its slot, so a prompt that extends the slot's cached ids computes only the new ids. Keys and values
can be cut at any earlier position. The state of a recurrent layer cannot, so for a model with such layers a prompt that
differs from the cached ids is computed from its beginning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward


class SlotTable(ABC):
    """A fixed number of slots, each owned by one conversation until another needs it.

    Args:
        count: the number of slots.
        can_cut: whether a slot's cache can be cut at any earlier position; if not, a prompt that differs from the
            cached ids is computed from its beginning.

    Attributes:
        can_cut: as given.
        cached_ids: the ids that each slot has computed.
    """

    def __init__(self, count: int, *, can_cut: bool) -> None:
        self.can_cut = can_cut
        self.cached_ids: list[list[int]] = [[] for _ in range(count)]
        self._owner: OrderedDict[str, int] = OrderedDict()
        self._busy: set[int] = set()
        self._free = list(range(count))[::-1]

    @abstractmethod
    def reset(self, slot: int) -> None:
        """Forget what the slot has computed; its next prompt starts at the first id."""

    @property
    def free_count(self) -> int:
        """The number of slots that no request is using."""
        return len(self.cached_ids) - len(self._busy)

    def acquire(self, session: str) -> int:
        """Return the session's slot, or the least recently used one, and mark it busy until `release`.

        Raises:
            KeyError: the session has a request under way.
        """
        if session in self._owner:
            slot = self._owner.pop(session)
            if slot in self._busy:
                self._owner[session] = slot
                raise KeyError(session)
        elif self._free:
            slot = self._free.pop()
        else:
            oldest = next(name for name, slot in self._owner.items() if slot not in self._busy)
            slot = self._owner.pop(oldest)
            self.cached_ids[slot] = []
        self._owner[session] = slot
        self._busy.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Mark the slot as no longer busy; its cache stays for the session's next request."""
        self._busy.discard(slot)

    def match_prefix(self, slot: int, prompt: Sequence[int]) -> int:
        """Return how many leading ids of the prompt are cached, and drop the rest of the slot's cache.

        The last id never counts: the model must process it to give the next token's logits.
        """
        cached, most = self.cached_ids[slot], len(prompt) - 1
        matched = 0
        for a, b in zip(cached[:most], prompt, strict=False):
            if a != b:
                break
            matched += 1
        if not self.can_cut and matched < len(cached):
            matched = 0
        if not matched:
            self.reset(slot)
        self.cached_ids[slot] = cached[:matched]
        return matched

    def clear(self) -> None:
        """Drop every slot's cache: the model's weights have changed."""
        self.cached_ids = [[] for _ in self.cached_ids]


ATTENTION = "slots"
_GROWTH = 256
_GROWTH_ON_GPU = 1024
"""On a GPU growing costs more: the graphs of `decode_steps` are recorded again."""


RECURRENT = "linear_attention"
"""The name in `transformers` for a layer that keeps a state instead of keys and values."""
_SUPPORTED = frozenset({"full_attention", RECURRENT})


def layer_kinds(config: Any) -> list[str]:
    """Return the kind of each layer of a text model's configuration.

    Raises:
        ValueError: a layer is of a kind that the slots cannot cache.
    """
    kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
    if unsupported := sorted(set(kinds) - _SUPPORTED):
        raise ValueError(
            f"the model has layers of {', '.join(unsupported)}; slots cache {' and '.join(sorted(_SUPPORTED))}"
        )
    return kinds


class Slots(SlotTable):
    """The cache: `count` slots.

    A layer with attention has keys and values of shape (count, heads, length, head dim); `length` grows as needed. A
    recurrent layer has the last inputs of its convolution, (count, channels, kernel), and its state, (count, heads, key
    dim, value dim); both are allocated when the model first stores them.

    Args:
        kinds: the result of `layer_kinds`.

    Attributes:
        recurrent: whether any layer is recurrent.
    """

    def __init__(
        self, count: int, kinds: Sequence[str], heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(count, can_cut=RECURRENT not in kinds)
        self._shape = (count, heads, head_dim)
        self._options = {"dtype": dtype, "device": device}
        self.recurrent = RECURRENT in kinds
        self.length = 0
        attended = [layer for layer, kind in enumerate(kinds) if kind != RECURRENT]
        self.keys: dict[int, torch.Tensor] = {layer: torch.empty(0) for layer in attended}
        self.values: dict[int, torch.Tensor] = dict(self.keys)
        self.conv_inputs: dict[int, torch.Tensor] = {}
        self.states: dict[int, torch.Tensor] = {}
        self._growth = _GROWTH_ON_GPU if device.type == "cuda" else _GROWTH
        self._grow(self._growth)

    def reset(self, slot: int) -> None:
        for store in (*self.conv_inputs.values(), *self.states.values()):
            store[slot] = 0

    def reserve(self, length: int) -> None:
        """Grow every slot to at least `length` positions."""
        if length > self.length:
            self._grow(-(-length // self._growth) * self._growth)

    def _grow(self, length: int) -> None:
        count, heads, head_dim = self._shape
        for store in (self.keys, self.values):
            for layer, old in store.items():
                new = torch.zeros(count, heads, length, head_dim, **self._options)
                if self.length:
                    new[:, :, : self.length] = old
                store[layer] = new
        self.length = length


class SlotView:
    """The `past_key_values` of one forward pass, as `transformers` calls it.

    Args:
        rows: the slot of each row. Adjacent slots in ascending order are read in place; others are first copied into
            one tensor, which costs several times the attention itself. A tensor (rows,), int64, on the model's device
            has all slots in order, or some.
        positions: the position of each new token, shape (batch, new tokens), int64.
        upto: the number of positions to read, the new ones included.
        by_row: compute the attention row by row (`slot_attention`); every row has one new token.
    """

    def __init__(
        self,
        slots: Slots,
        rows: Sequence[int] | torch.Tensor,
        positions: torch.Tensor,
        upto: int,
        *,
        by_row: bool = False,
    ) -> None:
        self._slots, self._positions, self._upto = slots, positions, upto
        self._lengths_by_row = list(zip(rows, (positions[:, 0] + 1).tolist(), strict=True)) if by_row else []
        if isinstance(rows, torch.Tensor):
            self._rows, everything = rows, len(rows) == len(slots.cached_ids)
            self._read = slice(None) if everything else rows
        else:
            self._rows = torch.tensor(rows, device=positions.device)
            adjacent = list(rows) == list(range(rows[0], rows[0] + len(rows)))
            self._read = slice(rows[0], rows[0] + len(rows)) if adjacent else self._rows
        self.layers = _RecurrentLayers(slots, self._rows)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor | list[torch.Tensor], torch.Tensor | list[torch.Tensor]]:
        """Store new keys and values, shape (batch, heads, new tokens, head dim); return those of all positions: shape
        (batch, heads, positions, head dim), or with `by_row` a list of (heads, positions, head dim), one per row."""
        where = (self._rows[:, None], slice(None), self._positions)
        stores = self._slots.keys[layer], self._slots.values[layer]
        for store, new in zip(stores, (keys, values), strict=True):
            store[where] = new.transpose(1, 2)
        if self._lengths_by_row:
            keys_of, values_of = ([store[slot, :, :upto] for slot, upto in self._lengths_by_row] for store in stores)
            return keys_of, values_of
        keys, values = (store[:, :, : self._upto][self._read] for store in stores)
        return keys, values

    def has_previous_state(self, layer: int, state_idx: int = 0) -> bool:
        """Say whether the layer has a state. A new conversation's state is zero, which equals no state."""
        return layer in self._slots.states

    def update_conv_state(self, inputs: torch.Tensor, layer: int, conv_kernel_size: int) -> torch.Tensor:
        """Store the last inputs of the convolution, from shape (batch, channels, new tokens); return all inputs that it
        reads: the stored ones followed by the new ones."""
        store = self._slots.conv_inputs.get(layer)
        if store is None:
            shape = (len(self._slots.cached_ids), inputs.shape[1], conv_kernel_size)
            store = self._slots.conv_inputs[layer] = inputs.new_zeros(shape)
        whole = torch.cat([store[self._rows], inputs], -1)
        self.layers[layer].conv_states[0] = whole[..., -conv_kernel_size:]
        return whole

    def update_recurrent_state(self, states: torch.Tensor, layer: int) -> None:
        """Store the layer's states after this pass, and the inputs that its convolution reads next, which a pass of one
        token per row changes in place."""
        if layer not in self._slots.states:
            self._slots.states[layer] = states.new_zeros((len(self._slots.cached_ids), *states.shape[1:]))
        self._slots.states[layer][self._rows] = states
        self._slots.conv_inputs[layer][self._rows] = self.layers[layer].conv_states[0]


class _RecurrentLayers(dict[int, "_RecurrentLayer"]):
    """Layer -> its state for the rows of one forward pass, copied from the slots at the first access."""

    def __init__(self, slots: Slots, rows: torch.Tensor) -> None:
        self._slots, self._rows = slots, rows

    def __missing__(self, layer: int) -> _RecurrentLayer:
        inputs, states = self._slots.conv_inputs.get(layer), self._slots.states.get(layer)
        self[layer] = _RecurrentLayer(
            {} if inputs is None else {0: inputs[self._rows]}, {} if states is None else {0: states[self._rows]}
        )
        return self[layer]


@dataclass
class _RecurrentLayer:
    """A recurrent layer's state in the form that the model reads; the key 0 is its only state."""

    conv_states: dict[int, torch.Tensor]
    recurrent_states: dict[int, torch.Tensor]
    record_past: bool = False


def attention_by_products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """As `scaled_dot_product_attention` with a boolean mask, by two matrix products."""
    return ((query * scale) @ key.transpose(-1, -2)).masked_fill(~mask, float("-inf")).softmax(-1) @ value


def slot_attention(
    module: torch.nn.Module, query: torch.Tensor, key: Any, value: Any, attention_mask: torch.Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, **named: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute attention for `transformers`: query (batch, heads, new tokens, head dim) to (batch, new tokens, heads,
    head dim). If `key` and `value` are lists, each row reads its own slot in place: nothing is padded or copied."""
    # Of one new token, query heads that share a key head become its queries, so that its keys are read once.
    if isinstance(key, torch.Tensor):
        if query.shape[2] > 1 or attention_mask is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **named)
        shared = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
        if query.is_cuda and query.dtype == torch.float32:
            # On an H200 twice as fast as the kernel for a mask in float32, which has few queries to share out.
            attended = attention_by_products(shared, key, value, attention_mask, scaling or query.shape[-1] ** -0.5)
        else:
            attended = scaled_dot_product_attention(shared, key, value, attn_mask=attention_mask, scale=scaling)
        return attended.reshape(len(query), 1, query.shape[1], -1), None
    attended = [
        scaled_dot_product_attention(q.view(1, len(k), -1, q.shape[-1]), k[None], v[None], scale=scaling)
        for q, k, v in zip(query, key, value, strict=True)
    ]
    return torch.cat(attended).view(len(query), 1, query.shape[1], -1), None


AttentionInterface.register(ATTENTION, slot_attention)


class ModelCaches(SlotTable):
    """`count` slots, each with a cache as the model's configuration asks for: one row per forward pass.

    It serves the models that `Slots` cannot hold, with sliding windows, attention sinks or shared keys, because the
    model itself computes its attention. Throughput does not grow with the number of conversations.
    """

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
