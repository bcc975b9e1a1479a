"""What an export format is, and how its files are written.

Belongs here: the one description that the registry, the command and docs/formats.md are made of. Does not belong here:
any format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from etpi_assets.exports.source import DATASET, ExportSource

_BATCH_ROWS = 256
SPLITS = ("train", "val")


@dataclass(frozen=True)
class Written:
    """What an exporter did.

    Attributes:
        rows: file, relative to the folder -> its rows.
        left_out: reason -> how many of the experiment's rollouts or agents are not in it.
        notes: what its reader has to know.
    """

    rows: dict[str, int]
    left_out: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Export:
    """One export format.

    Attributes:
        name: what the command's `--format` says.
        title: what it is, in one line.
        files: which files it writes.
        keeps, loses: what of the experiment arrives in them, and what does not.
        read_by: whose code reads it.
        importer: the importer that reads it back, None where none does.
        write: writes it into an empty folder.
        assets: what it holds of an experiment.
    """

    name: str
    title: str
    files: str
    keeps: str
    loses: str
    read_by: str
    importer: str | None
    write: Callable[[ExportSource, Path], Written]
    assets: tuple[str, ...] = DATASET


def write_parquet(path: Path, schema: pa.Schema, rows: Iterable[dict[str, Any]]) -> int:
    """Write rows as parquet, some at a time, and return how many; a file is written even where there are none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count, waiting = 0, []
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for row in rows:
            waiting.append(row)
            count += 1
            if len(waiting) == _BATCH_ROWS:
                writer.write_table(pa.Table.from_pylist(waiting, schema))
                waiting = []
        if waiting:
            writer.write_table(pa.Table.from_pylist(waiting, schema))
    return count


def write_splits(
    folder: Path, schema: pa.Schema, rows: Callable[[str], Iterable[dict[str, Any]]], under: str = "data"
) -> dict[str, int]:
    """`<under>/train.parquet` and, where there is any, `<under>/val.parquet`: file -> rows."""
    written = {}
    for split in SPLITS:
        path = folder / under / f"{split}.parquet"
        count = write_parquet(path, schema, rows(split))
        if count or split == "train":
            written[path.relative_to(folder).as_posix()] = count
        else:
            path.unlink()
    return written
