"""The live line of every experiment."""

from __future__ import annotations

from collections.abc import Sequence

from etpi.run.columns import GAP, aligned, shortened
from etpi_resources.process.progress import Activity

_RIGHT = (3, 5)
_DETAIL = 4
_SHORTEST_DETAIL = 8
"""Characters; in less space the detail is left out."""


def live_lines(activities: Sequence[Activity], width: int) -> list[str]:
    """Return a line of at most `width` characters for each activity, in columns; the detail gives way first."""
    if not activities:
        return []
    rows = [list(activity.cells()) for activity in activities]
    columns = [i for i in range(len(rows[0])) if any(row[i] for row in rows)]
    if _DETAIL in columns:
        rest = [i for i in columns if i != _DETAIL]
        room = width - sum(max(len(row[i]) for row in rows) + len(GAP) for i in rest)
        if room < _SHORTEST_DETAIL:
            columns = rest
        for row in rows:
            row[_DETAIL] = shortened(row[_DETAIL], room)
    shown = [[row[i] for i in columns] for row in rows]
    right = [at for at, i in enumerate(columns) if i in _RIGHT]
    return [shortened(line, width) for line in aligned(shown, right).split("\n")]
