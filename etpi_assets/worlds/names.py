"""Identifiers built of syllables: new ones for each task, which a small vocabulary can still spell.

A hash of its spelling assigns every possible identifier to one of two pools. Held-out tasks sample from one pool, all
training data from the other, so the splits share no identifier, whatever the seeds.
"""

from __future__ import annotations

import itertools
import random
from zlib import crc32

SYLLABLES = tuple(c + v for c in "bdfgklmnprstvz" for v in "aeiou")
HELDOUT_SHARE = 5
"""One in this many identifiers belongs to the held-out pool."""


def is_heldout(identifier: str) -> bool:
    """Return whether the identifier belongs to the held-out pool."""
    return crc32(identifier.encode()) % HELDOUT_SHARE == 0


class NameGenerator:
    """Samples identifiers of one pool for one task.

    No syllable occurs twice, within or across identifiers: a model this small copies by matching the last two tokens,
    and a repeated syllable would be ambiguous.
    """

    def __init__(self, rng: random.Random, *, heldout: bool) -> None:
        self._rng = rng
        self._heldout = heldout
        self._unused = list(SYLLABLES)

    def function(self) -> str:
        """Sample two words of two syllables."""
        return self._sample(2, 2)

    def module(self) -> str:
        """Sample one word of three syllables, or two of two."""
        return self._sample(3) if self._rng.random() < 0.7 else self._sample(2, 2)

    def directory(self) -> str:
        """Sample one word of three syllables."""
        return self._sample(3)

    def word(self) -> str:
        """Sample one word of two syllables."""
        return self._sample(2)

    def _sample(self, *syllables: int) -> str:
        while True:
            chosen = self._rng.sample(self._unused, k=sum(syllables))
            rest = iter(chosen)
            name = "_".join("".join(itertools.islice(rest, count)) for count in syllables)
            if is_heldout(name) is self._heldout:
                self._unused = [syllable for syllable in self._unused if syllable not in chosen]
                return name
