"""The description of an export format (docs/reference/formats.md), and the writers of parquet files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from etpi_assets.exports.experiment_data import DATASET, ExportSource

_BATCH_ROWS = 256
SPLITS = ("train", "val")


@dataclass(frozen=True)
class Written:
    """The result of an exporter.

    Attributes:
        rows: path relative to the folder -> number of rows.
        left_out: reason -> number of the experiment's rollouts or agents that were left out.
        notes: what readers of the files must know.
    """

    rows: dict[str, int]
    left_out: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Export:
    """One export format.

    Attributes:
        name: the value of the command's `--format`.
        title: the format, in one line.
        files: the files it writes.
        keeps, loses: the data of an experiment that the files contain, and that they lack.
        read_by: the code that reads the files.
        write: writes the files into an empty folder.
        importer: the importer that reads the files back; None if there is none.
        assets: the exported assets.
    """

    name: str
    title: str
    files: str
    keeps: str
    loses: str
    read_by: str
    write: Callable[[ExportSource, Path], Written]
    importer: str | None = None
    assets: Sequence[str] = DATASET


def write_parquet(path: Path, schema: pa.Schema, rows: Iterable[dict[str, Any]]) -> int:
    """Write rows as parquet in batches and return their number; writes a file even if there are no rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count, remaining = 0, iter(rows)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while batch := list(islice(remaining, _BATCH_ROWS)):
            writer.write_table(pa.Table.from_pylist(batch, schema))
            count += len(batch)
    return count


def write_splits(
    folder: Path, schema: pa.Schema, rows: Callable[[str], Iterable[dict[str, Any]]], under: str = "data"
) -> dict[str, int]:
    """Write `<under>/train.parquet` and, unless it is empty, `<under>/val.parquet`; return file -> number of rows."""
    written = {}
    for split in SPLITS:
        path = folder / under / f"{split}.parquet"
        count = write_parquet(path, schema, rows(split))
        if count or split == "train":
            written[path.relative_to(folder).as_posix()] = count
        else:
            path.unlink()
    return written
