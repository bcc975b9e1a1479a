"""Formulas of one-line functions of `x`: their code, their values, and phrases that describe them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

NUMBERS = range(2, 100)


@dataclass(frozen=True)
class Operation:
    """`code`: expression with `{n}` for the number. `phrases`: completions of "it should …"."""

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
    """One operation with its number, such as x + 3."""

    operation: str
    number: int

    @property
    def code(self) -> str:
        """Return the expression that the function returns."""
        return OPERATIONS[self.operation].code.format(n=self.number)

    def __call__(self, x: int) -> int:
        return OPERATIONS[self.operation].compute(x, self.number)


def parse_formula(expression: str) -> Formula:
    """Parse an expression. Raises ValueError if it is no formula."""
    for operation, form in _FORMS.items():
        if match := form.fullmatch(expression):
            return Formula(operation, int(match[1]))
    raise ValueError(f"{expression!r} is no formula; formulas are {[o.code for o in OPERATIONS.values()]}")


def sample_formula(rng: random.Random, *, unlike: Formula | None = None) -> Formula:
    """Sample a formula whose operation and number differ from those of `unlike`."""
    operations = [name for name in OPERATIONS if unlike is None or name != unlike.operation]
    operation = rng.choice(operations)
    number = rng.choice(NUMBERS)
    while unlike is not None and number == unlike.number:
        number = rng.choice(NUMBERS)
    return Formula(operation, number)
