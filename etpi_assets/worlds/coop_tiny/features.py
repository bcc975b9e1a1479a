"""Behaviours of a one-line function of `x`: how they are written, computed and said in words.

Belongs here: the operations and their phrases. Does not belong here: where a feature stands, or whole task texts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

NUMBERS = range(2, 100)


@dataclass(frozen=True)
class Operation:
    """`code` is the expression with `{n}` for its number; each of `phrases` completes "it should …"."""

    code: str
    compute: Callable[[int, int], int]
    phrases: tuple[str, ...]


OPERATIONS: dict[str, Operation] = {
    "add": Operation(
        "x + {n}",
        lambda x, n: x + n,
        (
            "return its argument plus {n}",
            "add {n} to x and return the sum",
            "give {n} more than x",
            "return x plus {n}",
        ),
    ),
    "subtract": Operation(
        "x - {n}",
        lambda x, n: x - n,
        ("return its argument minus {n}", "take {n} away from x", "give {n} less than x", "return x minus {n}"),
    ),
    "multiply": Operation(
        "x * {n}",
        lambda x, n: x * n,
        ("return its argument times {n}", "multiply x by {n} and return it", "give {n} times x", "return x times {n}"),
    ),
    "remainder": Operation(
        "x % {n}",
        lambda x, n: x % n,
        (
            "return its argument modulo {n}",
            "return the remainder of x by {n}",
            "give what is left of x after dividing by {n}",
        ),
    ),
    "at_least": Operation(
        "max(x, {n})",
        max,
        ("return the larger of x and {n}", "return x but at least {n}", "never go below {n} and else give x"),
    ),
    "at_most": Operation(
        "min(x, {n})",
        min,
        ("return the smaller of x and {n}", "return x but at most {n}", "never go above {n} and else give x"),
    ),
    "constant": Operation(
        "{n}",
        lambda x, n: n,
        ("always return {n}", "ignore its argument and return {n}", "give {n} whatever x is"),
    ),
}

_FORMS = {
    name: re.compile(re.escape(operation.code).replace(r"\{n\}", r"(\d+)")) for name, operation in OPERATIONS.items()
}


@dataclass(frozen=True)
class Formula:
    """One operation with its number."""

    operation: str
    number: int

    @property
    def code(self) -> str:
        """The expression the function returns."""
        return OPERATIONS[self.operation].code.format(n=self.number)

    def __call__(self, x: int) -> int:
        return OPERATIONS[self.operation].compute(x, self.number)

    def phrase(self, rng: random.Random) -> str:
        """The behaviour in words, as the completion of "it should …"."""
        return rng.choice(OPERATIONS[self.operation].phrases).format(n=self.number)


def parse_formula(expression: str) -> Formula:
    """The behaviour an expression is the code of; ValueError where it is none of them."""
    for operation, form in _FORMS.items():
        if match := form.fullmatch(expression):
            return Formula(operation, int(match[1]))
    raise ValueError(f"{expression!r} is the code of no behaviour; they read {[o.code for o in OPERATIONS.values()]}")


def sample_formula(rng: random.Random, *, unlike: Formula | None = None) -> Formula:
    """A behaviour, of another operation and number than `unlike`."""
    operations = [name for name in OPERATIONS if unlike is None or name != unlike.operation]
    operation = rng.choice(operations)
    number = rng.choice(NUMBERS)
    while unlike is not None and number == unlike.number:
        number = rng.choice(NUMBERS)
    return Formula(operation, number)
