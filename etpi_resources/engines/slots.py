"""The memory of many conversations at once, a slot each.

Belongs here: where keys, values and recurrent states of a conversation lie, what of them is still good, the view of
them that a forward pass reads, and how it attends to them. Does not belong here: the model, or which tokens are drawn.

A conversation that grows keeps its slot, so a prompt that extends what the slot holds costs only its new ids. Keys and
values can be taken back to any earlier position; the state of a recurrent layer cannot, so there a prompt that departs
from what the slot holds is read from its beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ATTENTION = "slots"
_GROWTH = 256


RECURRENT = "linear_attention"
"""What `transformers` calls a layer that keeps a state instead of keys and values."""
_KNOWN = frozenset({"full_attention", RECURRENT})


def layer_kinds(config: Any) -> list[str]:
    """The kind of each layer of a text model's configuration.

    Raises:
        ValueError: a layer is of a kind whose memory is not kept here.
    """
    kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
    if other := sorted(set(kinds) - _KNOWN):
        raise ValueError(
            f"the model has layers of {', '.join(other)}, whose memory the in-process engine does not keep; it serves "
            f'models of {" and ".join(sorted(_KNOWN))}. Serve others with engine = "vllm"'
        )
    return kinds


class Slots:
    """`count` slots of keys and values, shape (count, heads, length, head dim) a layer, grown in length as needed; of a
    recurrent layer its convolution's last inputs, (count, channels, kernel), and its state, (count, heads, key dim,
    value dim), as the model first gives them.

    Args:
        kinds: of each layer, `layer_kinds`.
    """

    def __init__(
        self, count: int, kinds: Sequence[str], heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape = (count, heads, head_dim)
        self._options = {"dtype": dtype, "device": device}
        self.recurrent = RECURRENT in kinds
        self.length = 0
        attended = [layer for layer, kind in enumerate(kinds) if kind != RECURRENT]
        self.keys: dict[int, torch.Tensor] = {layer: torch.empty(0) for layer in attended}
        self.values: dict[int, torch.Tensor] = dict(self.keys)
        self.inputs: dict[int, torch.Tensor] = {}
        self.states: dict[int, torch.Tensor] = {}
        self.held: list[list[int]] = [[] for _ in range(count)]
        self._owner: OrderedDict[str, int] = OrderedDict()
        self._busy: set[int] = set()
        self._free = list(range(count))[::-1]
        self._grow(_GROWTH)

    @property
    def room(self) -> int:
        """Slots that no request is using."""
        return self._shape[0] - len(self._busy)

    def take(self, session: str) -> int:
        """The session's slot, or the one whose session has waited longest; it stays taken until `give`. A session that
        has a request under way gets no second slot: KeyError."""
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
            self.held[slot] = []
        self._owner[session] = slot
        self._busy.add(slot)
        return slot

    def give(self, slot: int) -> None:
        """End the request that took the slot; what it holds stays for the session's next one."""
        self._busy.discard(slot)

    def reuse(self, slot: int, prompt: Sequence[int]) -> int:
        """How many leading ids of the prompt the slot holds already; always fewer than all, for the last one's output
        is wanted. What does not match is forgotten."""
        held, most = self.held[slot], len(prompt) - 1
        same = 0
        for a, b in zip(held[:most], prompt, strict=False):
            if a != b:
                break
            same += 1
        if self.recurrent and same < len(held):
            same = 0
        if not same:
            for store in (*self.inputs.values(), *self.states.values()):
                store[slot] = 0
        self.held[slot] = held[:same]
        return same

    def forget(self) -> None:
        """Let go of all conversations: the weights that their keys and values came from have changed."""
        self.held = [[] for _ in self.held]

    def reserve(self, length: int) -> None:
        """Make every slot hold at least `length` positions."""
        if length > self.length:
            self._grow(-(-length // _GROWTH) * _GROWTH)

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
    """What `transformers` sees as the past of one forward pass.

    Args:
        rows: the slot of each row. Neighbouring slots in ascending order are read in place; any others are copied
            together first, which costs several times the attention itself.
        positions: where each new token goes, shape (batch, new tokens), int64.
        upto: positions read, the new ones included.
        apart: each row, of one new token, is attended to by itself (`slot_attention`).
    """

    def __init__(
        self, slots: Slots, rows: Sequence[int], positions: torch.Tensor, upto: int, *, apart: bool = False
    ) -> None:
        self._slots, self._positions, self._upto = slots, positions, upto
        self._apart = list(zip(rows, (positions[:, 0] + 1).tolist(), strict=True)) if apart else []
        self._rows = torch.tensor(rows, device=positions.device)
        neighbours = list(rows) == list(range(rows[0], rows[0] + len(rows)))
        self._read = slice(rows[0], rows[0] + len(rows)) if neighbours else self._rows
        self.layers = _Layers(slots, self._rows)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor | list[torch.Tensor], torch.Tensor | list[torch.Tensor]]:
        """Store new keys and values, shape (batch, heads, new tokens, head dim); return all that the rows hold: shape
        (batch, heads, positions, head dim), or a list of (heads, positions, head dim) of rows that are apart."""
        where = (self._rows[:, None], slice(None), self._positions)
        stores = self._slots.keys[layer], self._slots.values[layer]
        for store, new in zip(stores, (keys, values), strict=True):
            store[where] = new.transpose(1, 2)
        if self._apart:
            keys_of, values_of = ([store[slot, :, :upto] for slot, upto in self._apart] for store in stores)
            return keys_of, values_of
        return stores[0][self._read, :, : self._upto], stores[1][self._read, :, : self._upto]

    def has_previous_state(self, layer: int, state_idx: int = 0) -> bool:
        """Whether there is a state to go on from; that of a new conversation is zero, which is as good as none."""
        return layer in self._slots.states

    def update_conv_state(self, inputs: torch.Tensor, layer: int, conv_kernel_size: int) -> torch.Tensor:
        """Store the last of the convolution's inputs, shape (batch, channels, new tokens); return those that it reads:
        what was there and the new ones."""
        store = self._slots.inputs.get(layer)
        if store is None:
            shape = (len(self._slots.held), inputs.shape[1], conv_kernel_size)
            store = self._slots.inputs[layer] = inputs.new_zeros(shape)
        whole = torch.cat([store[self._rows], inputs], -1)
        self.layers[layer].conv_states[0] = whole[..., -conv_kernel_size:]
        return whole

    def update_recurrent_state(self, states: torch.Tensor, layer: int) -> None:
        """Store the layer's states after this pass, and the inputs that its convolution reads next: a step of a single
        token changes those in place."""
        if layer not in self._slots.states:
            self._slots.states[layer] = states.new_zeros((len(self._slots.held), *states.shape[1:]))
        self._slots.states[layer][self._rows] = states
        self._slots.inputs[layer][self._rows] = self.layers[layer].conv_states[0]


class _Layers(dict[int, "_Recurrent"]):
    """Layer -> its memory of the rows of one forward pass, copied together when it is asked for."""

    def __init__(self, slots: Slots, rows: torch.Tensor) -> None:
        self._slots, self._rows = slots, rows

    def __missing__(self, layer: int) -> _Recurrent:
        inputs, states = self._slots.inputs.get(layer), self._slots.states.get(layer)
        found = _Recurrent(
            {} if inputs is None else {0: inputs[self._rows]}, {} if states is None else {0: states[self._rows]}
        )
        self[layer] = found
        return found


@dataclass
class _Recurrent:
    """A recurrent layer as the model looks at it; 0 is its only state."""

    conv_states: dict[int, torch.Tensor]
    recurrent_states: dict[int, torch.Tensor]
    record_past: bool = False


def slot_attention(
    module: torch.nn.Module, query: torch.Tensor, key: Any, value: Any, attention_mask: torch.Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, **named: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention as transformers asks for it: query (batch, heads, new tokens, head dim) to (batch, new tokens, heads,
    head dim). Rows that are apart read what they hold, where it lies: no row pays for a longer one, and none is copied.
    """
    if isinstance(key, torch.Tensor):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **named)
    # The query heads that share a key head stand as its queries, so that its keys are read once.
    attended = [
        scaled_dot_product_attention(q.view(1, len(k), -1, q.shape[-1]), k[None], v[None], scale=scaling)
        for q, k, v in zip(query, key, value, strict=True)
    ]
    return torch.cat(attended).view(len(query), 1, query.shape[1], -1), None


AttentionInterface.register(ATTENTION, slot_attention)
