"""Finished parts of a version that is being computed, on disk: an asset that was killed continues after them.

    <folder>/<input key>/<part>/<table>.parquet

The input key covers specs, inputs and code, so computing a part again would give the same.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from etpi_resources.lake.manifest import DamagedFile
from etpi_resources.lake.parquet import opened


class Parts:
    """The parts of one version; one process at a time uses them.

    Attributes:
        folder: on the lake's disk, so every node of a cluster sees it.
    """

    def __init__(self, folder: Path, input_key: str) -> None:
        """Take the partition's folder and the key of the version; parts of other keys are removed."""
        self.folder, self._key = folder, input_key[:16]
        for path in folder.glob("*"):
            if path.name != self._key:
                shutil.rmtree(path, ignore_errors=True)

    def get(self, name: str, compute: Callable[[], Mapping[str, pa.Table]]) -> dict[str, pa.Table]:
        """Return the tables of a part: from disk if it was finished before, else computed and stored.

        A part that cannot be read, after a power cut or on a bad disk, is computed again.
        """
        part = self.folder / self._key / name
        try:
            return {path.stem: _read(path) for path in part.iterdir()}
        except FileNotFoundError:
            pass
        except DamagedFile:
            shutil.rmtree(part)
        tables = dict(compute())
        beside = part.with_name(f".{name}.{uuid.uuid4().hex}")
        beside.mkdir(parents=True)
        for table, rows in tables.items():
            # Read at most once, so that it is written fast rather than small.
            pq.write_table(
                rows, beside / f"{table}.parquet", compression="lz4", use_dictionary=False, write_statistics=False,
                write_page_checksum=True,
            )  # fmt: skip
        try:
            beside.rename(part)
        except OSError:
            if not part.is_dir():
                raise
            shutil.rmtree(beside)  # a worker of the run that was killed has just finished it too
        return tables

    def remove(self) -> None:
        """Remove all parts, because the version is published."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _read(path: Path) -> pa.Table:
    with opened(path) as file:
        return file.read()
