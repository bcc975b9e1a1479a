"""A share of a list of experiments: what one of several calls or machines runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from etpi_assets.specs.section import SpecError


@dataclass(frozen=True)
class Share:
    """The `number`-th of `of` shares, counted from 1."""

    number: int = 1
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "2/3". Raises SpecError if it is none."""
        match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
        if match is None or int(match[1]) > int(match[2]):
            raise SpecError(f"{text!r} is not a share; write the second of three as 2/3")
        return cls(int(match[1]), int(match[2]))

    def take(self, names: Sequence[str]) -> list[str]:
        """Return every `of`-th name. The shares together are all names, and no two have one in common."""
        return list(names)[self.number - 1 :: self.of]
