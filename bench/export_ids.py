"""Measure the exports of token ids of a large data set: CPU seconds and peak memory of a process for each format.

    ETPI_TRAJECTORIES=FOLDER python bench/export_ids.py [TURNS] [--lake FOLDER]

FOLDER has recorded runs; varied copies of them, with ids as if captured, are curated as in `curation_scale.py`. With
--lake the lake is kept, and used if it is there: run an earlier commit over it for a baseline. The sha256 of the files'
contents is printed, so that two commits can be compared.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq
from curation_scale import STUDY, measured
from machine import machine

from etpi_assets.exports import export
from etpi_assets.resources import Resources
from etpi_resources.lake.lake import Lake

FORMATS = ("tito", "trl")


def one(folder: Path, name: str, to: Path) -> None:
    """Export in this process and print what it took."""
    began, cpu = time.monotonic(), time.process_time()
    export(STUDY, name, to, Resources(lake=Lake(folder / "lake"), specs_folder=folder / "specs"))
    seconds, spent = time.monotonic() - began, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    digest, rows, ids = hashlib.sha256(), 0, 0
    for path in sorted(to.rglob("*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches(64):
            digest.update(str(batch["input_ids"].flatten().to_numpy().tobytes()).encode())
            rows, ids = rows + len(batch), ids + len(batch["input_ids"].flatten())
    print(
        f"{name:5} {spent:7.1f} s of CPU, {seconds:7.1f} s of wall time, peak {peak:6.0f} MB; {rows:,} rows, {ids:,} "
        f"ids, {digest.hexdigest()[:12]}",
        flush=True,
    )


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        one(Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("turns", nargs="?", type=int, default=20_000)
    parser.add_argument("--lake", type=Path)
    options = parser.parse_args()
    print(machine(), f"load {os.getloadavg()[0]:.0f}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.lake or Path(scratch) / "set"
        if not folder.exists():
            measured(folder, options.turns, "native")
        for name in FORMATS:
            command = [sys.executable, __file__, "--one", str(folder), name, str(Path(scratch) / name)]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
