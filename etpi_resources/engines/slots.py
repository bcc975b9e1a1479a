"""Key-value memory of many conversations at once, a slot each.

Belongs here: where keys and values of a conversation lie, what of them is still good, and the view of them that a
forward pass reads. Does not belong here: the model, or which tokens are drawn.

A conversation that grows keeps its slot, so a prompt that extends what the slot holds costs only its new ids.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

_GROWTH = 256


class Slots:
    """`count` slots of keys and values, shape (count, heads, length, head dim) a layer, grown in length as needed."""

    def __init__(
        self, count: int, layers: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape = (count, heads, head_dim)
        self._options = {"dtype": dtype, "device": device}
        self.length = 0
        self.keys: list[torch.Tensor] = [torch.empty(0)] * layers
        self.values: list[torch.Tensor] = [torch.empty(0)] * layers
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
            for layer, old in enumerate(store):
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
    """

    def __init__(self, slots: Slots, rows: Sequence[int], positions: torch.Tensor, upto: int) -> None:
        self._slots, self._positions, self._upto = slots, positions, upto
        self._rows = torch.tensor(rows, device=positions.device)
        neighbours = list(rows) == list(range(rows[0], rows[0] + len(rows)))
        self._read = slice(rows[0], rows[0] + len(rows)) if neighbours else self._rows

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values, shape (batch, heads, new tokens, head dim); return all that the rows hold."""
        where = (self._rows[:, None], slice(None), self._positions)
        stores = self._slots.keys[layer], self._slots.values[layer]
        for store, new in zip(stores, (keys, values), strict=True):
            store[where] = new.transpose(1, 2)
        return stores[0][self._read, :, : self._upto], stores[1][self._read, :, : self._upto]
