"""The live line of every experiment, and the display that knows which asset of its chain an experiment is at."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import replace

from etpi_assets.runs.columns import GAP, aligned, shortened
from etpi_resources.process.progress import Activity, Display

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


class ChainDisplay:
    """Adds to each activity the experiment that this process works for, and the asset's position in its chain.

    The position is the number of the chain's assets that were shown so far or need not run; so it only grows, whatever
    the order in which Dagster runs them.
    """

    def __init__(self, display: Display, run: str, chain: Collection[str], skipped: Collection[str]) -> None:
        """`chain`: labels of the assets of the experiment's chain; `skipped`: those whose jobs do not run."""
        self._display, self._run, self._chain = display, run, frozenset(chain)
        self._seen = {label: i for i, label in enumerate(dict.fromkeys(skipped), 1)}
        self._lock = threading.Lock()

    def line(self, text: str) -> None:
        self._display.line(text)

    def show(self, activity: Activity | None, source: str = "") -> None:
        if activity is not None:
            activity = replace(activity, run=self._run)
            if activity.label in self._chain:
                with self._lock:
                    step = self._seen.setdefault(activity.label, len(self._seen) + 1)
                activity = replace(activity, step=step, steps=len(self._chain))
        self._display.show(activity, source)
