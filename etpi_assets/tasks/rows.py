"""Rows of data sets (.jsonl, .json and .parquet files), and the tasks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from etpi_assets.tasks.family import RejectedInput, Task
from etpi_resources.outside import loads


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
    files = sorted(p for p in path.rglob("*") if p.suffix in _READERS) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise FileNotFoundError(f"{path}: no .jsonl, .json or .parquet file of rows")
    for file in files:
        if file.suffix not in _READERS:
            raise ValueError(f"{file}: rows are read from .jsonl, .json and .parquet")
        for number, row in enumerate(_READERS[file.suffix](file), 1):
            yield f"{file.name}:{number}", row


def _jsonl(file: Path) -> Iterable[Mapping[str, Any] | str]:
    with file.open(encoding="utf-8", errors="replace") as lines:
        yield from (_row(line) for line in lines if line.strip())


def _row(text: str) -> Mapping[str, Any] | str:
    try:
        row = loads(text)
    except ValueError as error:
        return str(error)
    return row if isinstance(row, dict) else "no JSON object"


def _json(file: Path) -> Iterable[Mapping[str, Any] | str]:
    rows = loads(file.read_bytes())
    rows = list(rows.values()) if isinstance(rows, dict) else rows if isinstance(rows, list) else [rows]
    yield from (row if isinstance(row, dict) else "no JSON object" for row in rows)


def _parquet(file: Path) -> Iterable[Mapping[str, Any] | str]:
    for batch in pq.ParquetFile(file).iter_batches(64):
        yield from batch.to_pylist()


_READERS = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet}
