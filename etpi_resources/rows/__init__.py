"""Iterate over the rows of JSON lines, a JSON array or object, or parquet, compressed or not.

`iter_rows` yields an Unreadable in place of a row that cannot be read. It always yields `count_rows` values: if the
rest of a file cannot be read, that rest is one value.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from etpi_resources.inside import require_file
from etpi_resources.rows.bounded import (
    MOST_ROW_BYTES,
    Unreadable,
    attempt,
    check_ratio,
    open_bytes,
    parse_json,
    read_errors,
    read_json,
    too_large,
)

Row = Mapping[str, Any]
_LINES = (".jsonl", ".ndjson")
_SUFFIXES = (*_LINES, ".json", ".parquet", ".arrow")
_BATCH_ROWS = 32
"""Rows of parquet that are converted to Python values at a time."""
MOST_PAGE_BYTES = 1 << 30
"""Memory limit for reading rows of parquet."""
_MOST_ROWS = 100_000_000


def row_files(files: Iterable[Path]) -> list[Path]:
    """Return the files whose suffix says that they hold rows."""
    return [path for path in files if _plain_name(path).endswith(_SUFFIXES)]


def files_below(root: Path, *endings: str) -> list[Path]:
    """Return the files below the root whose names have one of the endings, sorted; the root itself if it is a file."""
    if not root.is_dir():
        return [root]
    return sorted(path for path in root.rglob("*") if path.name.endswith(endings or "") and path.is_file())


def units(root: Path) -> list[Path]:
    """Return every file below the root that can hold rows, sorted; the root itself if it is a file."""
    return row_files(files_below(root)) if root.is_dir() else [root]


def is_table(path: Path) -> bool:
    """Return whether a file has columns, which give every row the keys of all, with nulls."""
    return _plain_name(path).endswith((".parquet", ".arrow"))


def iter_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (row number from 0, value) of every row; the value is an Unreadable if the row cannot be read."""
    if isinstance(fault := attempt(_require_file, path), Unreadable):
        yield 0, fault
    elif _plain_name(path).endswith(".parquet"):
        yield from _parquet_rows(path)
    elif path.name.endswith(".arrow"):
        yield from _arrow_rows(path)
    elif _plain_name(path).endswith(_LINES):
        yield from _line_rows(path)
    else:
        yield from _json_rows(path)


def count_rows(path: Path) -> int:
    """Count the values of `iter_rows`, without parsing lines or parquet."""
    if _plain_name(path).endswith(".parquet"):
        opened = _parquet(path)
        return 1 if isinstance(opened, Unreadable) else opened.metadata.num_rows
    if _plain_name(path).endswith(_LINES):
        return sum(1 for _ in raw_lines(path))
    return sum(1 for _ in iter_rows(path))


def _require_file(path: Path) -> None:
    with read_errors(path):
        require_file(path)


def _plain_name(path: Path) -> str:
    return path.name.lower().removesuffix(".gz").removesuffix(".zst")


def _line_rows(path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(raw_lines(path)):
        yield number, line if isinstance(line, Unreadable) else attempt(parse_json, line, f"{path.name}, row {number}")


def raw_lines(path: Path) -> Iterator[bytes | Unreadable]:
    """Yield non-empty lines, and at the end an Unreadable if the rest cannot be read."""
    number = 0
    try:
        with read_errors(path), open_bytes(path) as file:
            while line := file.readline(MOST_ROW_BYTES + 1):
                if is_too_large := len(line) > MOST_ROW_BYTES:
                    while line and not line.endswith(b"\n"):
                        line = file.readline(MOST_ROW_BYTES)
                if is_too_large:
                    yield too_large(f"{path.name}, row {number}")
                    number += 1
                elif line := line.removeprefix(b"\xef\xbb\xbf").strip():
                    yield line
                    number += 1
            if number == 0:
                raise Unreadable("empty_file", f"{path.name} has no content")
    except Unreadable as refused:
        yield Unreadable(refused.reason, f"{refused.detail} (after {number} row(s))" if number else refused.detail)


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the items of an array, or of a `data` that has all rows; an object as one row; or one object per line."""
    value = attempt(read_json, path)
    if isinstance(value, Unreadable) and value.reason == "bad_json" and "Extra data" in value.detail:
        yield from _line_rows(path)
        return
    rows = value.get("data") if isinstance(value, dict) else None
    if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
        value = rows
    if isinstance(value, list):
        yield from enumerate(value)
        value = Unreadable("empty_file", f"{path.name} is an array of nothing") if not value else None
    if value is not None:
        yield 0, value


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a file; each row of the rest is an Unreadable where it cannot be read."""
    opened = _parquet(path)
    if isinstance(opened, Unreadable):
        yield 0, opened
        return
    read, fault = 0, None
    try:
        for values in _parquet_batches(opened):
            for value in values:
                yield read, value
                read += 1
    except MemoryError:
        fault = Unreadable("decompression_bomb", f"{path.name}, from row {read}: a page has over 1 GiB")
    except Exception as error:  # those of Arrow, and of values that Python does not have
        fault = Unreadable("bad_parquet", f"{path.name}, from row {read}: {error}; fetch the file again")
    yield from ((row, fault) for row in (range(read, opened.metadata.num_rows) if fault else ()))


def _arrow_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a stream of record batches, as `datasets` saves them (prepared sets of TRL and others)."""
    import pyarrow as pa

    read = 0
    try:
        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
            while (batch := _next_batch(reader)) is not None:
                batch.validate(full=True)  # its offsets are the file's
                for start in range(0, batch.num_rows, _BATCH_ROWS):
                    for value in batch.slice(start, _BATCH_ROWS).to_pylist():
                        yield read, value
                        read += 1
    except Exception as error:
        why = f"{error or 'over 1 GiB'}; fetch the file again"
        yield read, Unreadable("bad_arrow", f"{path.name}, from row {read}: {why}")


def _parquet_batches(file: Any) -> Iterator[list[Any]]:
    """Yield rows as Python values, so few at a time that they fit into `MOST_ROW_BYTES`: no value is larger than its
    row group, which may repeat one value in every row."""
    for group in range(file.num_row_groups):
        rows = max(1, min(_BATCH_ROWS, MOST_ROW_BYTES // max(1, _group_bytes(file, group))))
        batches = file.iter_batches(batch_size=rows, row_groups=[group], use_threads=False)
        while (batch := _next_batch(batches)) is not None:
            yield batch.to_pylist()


def _next_batch(batches: Iterator[Any]) -> Any:
    """Return the next batch, None at the end; a page's own header can contradict the file's footer."""
    with _headroom(MOST_PAGE_BYTES):
        return next(batches, None)


def _group_bytes(file: Any, group: int) -> int:
    return file.metadata.row_group(group).total_byte_size


@contextmanager
def _headroom(count: int) -> Iterator[None]:
    """Limit further allocations of this process; beyond the limit MemoryError is raised."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + count
    resource.setrlimit(resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(soft, limit), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _parquet(path: Path) -> Any:
    """Open the file; return an Unreadable if that fails."""
    import pyarrow.parquet as pq

    try:
        if path.name.endswith((".gz", ".zst")):
            raise Unreadable("unsupported_compression", f"{path.name}: parquet is compressed inside; decompress it")
        _require_file(path)
        opened = pq.ParquetFile(path)
        for group in range(opened.num_row_groups):
            check_ratio(_group_bytes(opened, group), path)
        if opened.metadata.num_rows > _MOST_ROWS:
            raise Unreadable("too_large", f"{path.name} has {opened.metadata.num_rows:,} rows; split it into rollouts")
    except Unreadable as refused:
        return refused
    except Exception as error:
        return Unreadable("bad_parquet", f"{path.name}: {error}; fetch the file again")
    if opened.metadata.num_rows == 0:
        return Unreadable("empty_file", f"{path.name} has no rows")
    return opened
