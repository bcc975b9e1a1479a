"""Names built of syllables, so that every task has its own and a small vocabulary still spells them all.

Belongs here: drawing identifiers, and keeping held-out ones apart. Does not belong here: where in a repository they
stand.

Every possible identifier belongs to one of two pools by a hash of its spelling. Held-out tasks draw from one pool,
everything that a model may be trained on from the other, so no identifier can be in both, whatever the seeds are.
"""

from __future__ import annotations

import random
from zlib import crc32

SYLLABLES = tuple(c + v for c in "bdfgklmnprstvz" for v in "aeiou")
HELDOUT_SHARE = 5
"""One identifier in so many belongs to the held-out pool."""


def is_heldout(identifier: str) -> bool:
    """Whether the identifier belongs to the pool of held-out tasks."""
    return crc32(identifier.encode()) % HELDOUT_SHARE == 0


class Names:
    """Draws identifiers of one pool for one task; none is drawn twice, none is the beginning of another."""

    def __init__(self, rng: random.Random, *, heldout: bool) -> None:
        self._rng = rng
        self._heldout = heldout
        self._drawn: list[str] = []

    def function(self) -> str:
        """Two words of two syllables."""
        return self._draw(2, 2)

    def module(self) -> str:
        """One word of three syllables, or two of two."""
        return self._draw(3) if self._rng.random() < 0.7 else self._draw(2, 2)

    def directory(self) -> str:
        """One word of three syllables."""
        return self._draw(3)

    def _draw(self, *syllables: int) -> str:
        while True:
            name = "_".join("".join(self._rng.choices(SYLLABLES, k=count)) for count in syllables)
            if is_heldout(name) is self._heldout and not any(
                name.startswith(other) or other.startswith(name) for other in self._drawn
            ):
                self._drawn.append(name)
                return name
