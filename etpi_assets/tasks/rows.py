"""Rows of data sets, and the tasks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from etpi_assets.tasks.family import RejectedInput, Task
from etpi_resources.rows import iter_rows, row_files, units
from etpi_resources.rows.bounded import Unreadable


def tasks_of(
    path: Path, read: Callable[[str, Mapping[str, Any]], Task | RejectedInput | None]
) -> Iterator[Task | RejectedInput]:
    """Return the task or the rejection of each row in order, one task an id; iterating raises as `read_rows` does.

    Args:
        read: ("file:row", row) -> its task or rejection; None: the params leave it out. KeyError, TypeError, ValueError
            and IndexError reject the row.
    """

    def items() -> Iterator[tuple[str, Task | RejectedInput]]:
        for source, row in read_rows(path):
            try:
                if isinstance(row, str):
                    raise ValueError(row)
                item = read(source, row)
            except (KeyError, TypeError, ValueError, IndexError) as error:
                detail = f"no field {error}" if isinstance(error, KeyError) else str(error)
                item = RejectedInput(source, "unreadable_row", detail)
            if item is not None:
                yield source, item

    return one_each(items())


def one_each(items: Iterable[tuple[str, Task | RejectedInput]]) -> Iterator[Task | RejectedInput]:
    """Yield the items of (source, item); of tasks with one id the first, and a rejection for the others."""
    seen: dict[str, str] = {}
    for source, item in items:
        if isinstance(item, Task) and seen.setdefault(item.task_id, source) != source:
            item = RejectedInput(source, "repeated_task", f"{item.task_id} is at {seen[item.task_id]} already")
        yield item


def read_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any] | str]]:
    """Yield ("file:row", the row, or the reason why it is unreadable) for a file, or for a folder's files in order.

    Raises FileNotFoundError if there is no file of rows, ValueError for any other suffix."""
    files = units(path)
    if not files or not files[0].is_file():
        raise FileNotFoundError(f"{path}: no .jsonl, .json or .parquet file of rows")
    if not row_files(files):
        raise ValueError(f"{path}: rows are read from .jsonl, .json and .parquet")
    for file in files:
        for number, row in enumerate(_rows(file), 1):
            unread = str(row) if isinstance(row, Unreadable) else "no JSON object"
            yield f"{file.name}:{number}", row if isinstance(row, dict) else unread


def _rows(file: Path) -> Iterator[Any]:
    """Yield the rows of a file, of which an object in JSON may have each under its id."""
    for _, row in iter_rows(file):
        named = (
            file.suffix == ".json" and isinstance(row, dict) and all(isinstance(each, dict) for each in row.values())
        )
        yield from row.values() if named else [row]
