"""Names built of syllables, so that every task has its own and a small vocabulary still spells them all.

Belongs here: drawing identifiers, and keeping held-out ones apart. Does not belong here: where in a repository they
stand.

Every possible identifier belongs to one of two pools by a hash of its spelling. Held-out tasks draw from one pool,
everything that a model may be trained on from the other, so no identifier can be in both, whatever the seeds are.
"""

from __future__ import annotations

import itertools
import random
from zlib import crc32

SYLLABLES = tuple(c + v for c in "bdfgklmnprstvz" for v in "aeiou")
HELDOUT_SHARE = 5
"""One identifier in so many belongs to the held-out pool."""


def is_heldout(identifier: str) -> bool:
    """Whether the identifier belongs to the pool of held-out tasks."""
    return crc32(identifier.encode()) % HELDOUT_SHARE == 0


class NameGenerator:
    """Draws identifiers of one pool for one task.

    No syllable stands in two of them, or twice in one: a model this small copies by the last two tokens, and loses its
    place in a name that repeats one.
    """

    def __init__(self, rng: random.Random, *, heldout: bool) -> None:
        self._rng = rng
        self._heldout = heldout
        self._left = list(SYLLABLES)

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
            drawn = self._rng.sample(self._left, k=sum(syllables))
            rest = iter(drawn)
            name = "_".join("".join(itertools.islice(rest, count)) for count in syllables)
            if is_heldout(name) is self._heldout:
                self._left = [syllable for syllable in self._left if syllable not in drawn]
                return name
