"""Formulas of one-line functions of `x`: their code and their values."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

NUMBERS = range(2, 100)


@dataclass(frozen=True)
class Operation:
    """`code`: expression with `{n}` for the number; `compute`: (x, number) -> value."""

    code: str
    compute: Callable[[int, int], int]


OPERATIONS: dict[str, Operation] = {
    "add": Operation("x + {n}", lambda x, n: x + n),
    "subtract": Operation("x - {n}", lambda x, n: x - n),
    "multiply": Operation("x * {n}", lambda x, n: x * n),
    "remainder": Operation("x % {n}", lambda x, n: x % n),
    "at_least": Operation("max(x, {n})", max),
    "at_most": Operation("min(x, {n})", min),
    "constant": Operation("{n}", lambda x, n: n),
}


@dataclass(frozen=True)
class Formula:
    """One operation with its number, such as x + 3."""

    operation: str
    number: int

    @property
    def code(self) -> str:
        return OPERATIONS[self.operation].code.format(n=self.number)

    def __call__(self, x: int) -> int:
        return OPERATIONS[self.operation].compute(x, self.number)


def sample_formula(rng: random.Random, *, unlike: Formula | None = None) -> Formula:
    """Sample a formula whose operation and number differ from those of `unlike`."""
    operations = [name for name in OPERATIONS if unlike is None or name != unlike.operation]
    operation = rng.choice(operations)
    number = rng.choice(NUMBERS)
    while unlike is not None and number == unlike.number:
        number = rng.choice(NUMBERS)
    return Formula(operation, number)
