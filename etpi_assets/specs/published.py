"""Read the figures that others published of an experiment from its spec's `published`.

A key whose value is a number, or a table with a `value`, is a metric's figure. In a table, `hits` and `n` are the count
behind the value; without them no interval can be given. Text is provenance; other tables (`stated`, `teacher`) are not
about the student's held-out results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    """One figure: a metric's value as printed, and the count behind it if that was printed too."""

    metric: str
    value: float
    hits: int | None = None
    n: int | None = None


def figures(published: Mapping[str, Any]) -> list[Published]:
    """Return the figures of a spec's `published`, in its order.

    Raises:
        ValueError: a value that is not hits / n, to two digits.
    """
    collected = []
    for metric, stated in published.items():
        table = stated if isinstance(stated, Mapping) else {"value": stated}
        value = table.get("value")
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        figure = Published(metric, float(value), table.get("hits"), table.get("n"))
        if figure.hits is not None and figure.n and abs(figure.hits / figure.n - figure.value) > 0.005:
            raise ValueError(f"published.{metric}: {figure.hits} of {figure.n} is not {figure.value}")
        collected.append(figure)
    return collected
