"""Assignment of cache slots to conversations, and the ids that each slot has computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence


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
