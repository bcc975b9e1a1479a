"""Rows that are parts of runs, and files that describe the rows beside them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from etpi_resources.rows import count_rows, iter_rows
from etpi_resources.rows.bounded import Unreadable

Part = tuple[Callable[[Any], bool], str]
"""(a test for items of a run, such as messages; the column that a row has for these items)."""
MANIFEST = "etpi_export"
"""Key that marks the manifest of an etpi export among the files of a data set."""


def is_manifest(value: Mapping[str, Any]) -> bool:
    """Return whether a value describes the files beside it: etpi's manifest, or the schema that `datasets` writes."""
    return MANIFEST in value or {"features", "citation"} <= value.keys()


def iter_runs(path: Path, part: Part) -> Iterator[tuple[int, Any]]:
    """Yield `iter_rows`; in a file of parts of runs, the parts of a run are one row, which has them in a column.

    A file has parts if one of its first rows is a part. Parts with the same id of a conversation (`_RUN_IDS`) are a
    run; those without one are one run together. Other rows of the file are yielded as they are.
    """
    numbered = iter_rows(path)
    head = list(itertools.islice(numbered, FIRST_ROWS))
    numbered = itertools.chain(head, numbered)
    is_part, column = part
    if not any(is_part(row) for _, row in head):
        yield from numbered
        return
    runs: dict[Any, tuple[int, list[Any]]] = {}
    damaged: tuple[int, Any] | None = None
    for number, row in numbered:
        if isinstance(row, Unreadable):
            damaged = damaged or (number, row)
        elif is_part(row):
            run_id = next((str(row[key]) for key in _RUN_IDS if row.get(key) is not None), None)
            runs.setdefault(run_id, (number, []))[1].append(row)
        else:
            yield number, row
    if damaged and len(runs) == 1:  # the run lacks a part
        yield next(iter(runs.values()))[0], damaged[1]
        return
    for number, parts in runs.values():
        single = f"{path.name} holds one item of a run's `{column}`; write all of them into one array, in their order"
        yield number, {column: parts} if len(parts) > 1 else Unreadable("unknown_form", single)
    if damaged:
        yield damaged


FIRST_ROWS = 20
"""Rows at the beginning of a file that say what it holds: the first ones may be damaged, or a header."""
_RUN_IDS = ("conversation_id", "session_id", "dialogue_id", "thread_id", "chat_id", "trajectory_id", "episode_id",
            "run_id")  # fmt: skip
"""Keys of messages that name their conversation."""


def count_runs(path: Path, part: Part) -> int:
    """Count the values of `iter_runs`."""
    has_parts = any(part[0](row) for _, row in itertools.islice(iter_rows(path), FIRST_ROWS))
    return sum(1 for _ in iter_runs(path, part)) if has_parts else count_rows(path)
