"""Formulas in the texts of tasks: phrases that describe them, and their parser."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from etpi_assets.worlds.coop_tiny_shared.features import OPERATIONS, Formula

PHRASES: Mapping[str, Sequence[str]] = {
    "add": (
        "return its argument plus {n}",
        "add {n} to x and return the sum",
        "give {n} more than x",
        "return x plus {n}",
    ),
    "subtract": (
        "return its argument minus {n}",
        "take {n} away from x",
        "give {n} less than x",
        "return x minus {n}",
    ),
    "multiply": (
        "return its argument times {n}",
        "multiply x by {n} and return it",
        "give {n} times x",
        "return x times {n}",
    ),
    "remainder": (
        "return its argument modulo {n}",
        "return the remainder of x by {n}",
        "give what is left of x after dividing by {n}",
    ),
    "at_least": (
        "return the larger of x and {n}",
        "return x but at least {n}",
        "never go below {n} and else give x",
    ),
    "at_most": (
        "return the smaller of x and {n}",
        "return x but at most {n}",
        "never go above {n} and else give x",
    ),
    "constant": (
        "always return {n}",
        "ignore its argument and return {n}",
        "give {n} whatever x is",
    ),
}
"""Operation -> completions of "it should …"."""

_FORMS = {
    name: re.compile(re.escape(operation.code).replace(r"\{n\}", r"(\d+)")) for name, operation in OPERATIONS.items()
}


def parse_formula(expression: str) -> Formula:
    """Parse an expression. Raises ValueError if it is no formula."""
    for operation, form in _FORMS.items():
        if match := form.fullmatch(expression):
            return Formula(operation, int(match[1]))
    raise ValueError(f"{expression!r} is no formula; formulas are {[o.code for o in OPERATIONS.values()]}")
