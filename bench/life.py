"""Time of `etpi verify` and `etpi gc` on a lake of many versions, against `du` of the same folder.

    python bench/life.py [VERSIONS] [MEGABYTES]

The lake has VERSIONS versions (default 1,000) of data sets and trainings in ten experiments, past ones included, and
MEGABYTES (default 500) of checkpoints. Wall time, files warm.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from machine import machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from etpi_resources.lake.audit import audit
from etpi_resources.lake.lake import Lake
from etpi_resources.lake.removal import carry_out, plan_garbage
from tests.support import small_lake

EXPERIMENTS, CHECKPOINTS = 10, 20


def fill(lake: Lake, versions: int, megabytes: int) -> None:
    """Publish the versions, half data sets and half trainings; CHECKPOINTS checkpoints share the bytes."""
    for number in range(versions // 2):
        name = f"e{number % EXPERIMENTS}"
        made = small_lake.put(lake, "upweighted_dataset", name, small_lake.dataset(f"r{number}"))
        staged = lake.scratch("model")
        (staged / "config.json").write_text(str(number % CHECKPOINTS))
        if number < CHECKPOINTS:
            (staged / "model.safetensors").write_bytes(os.urandom(megabytes * 1_000_000 // CHECKPOINTS))
        checkpoint, _ = lake.adopt_checkpoint(staged)
        row = small_lake.checkpoint(checkpoint, name, "sft", dataset_version=made.version, seed=number)
        inputs = {f"upweighted_dataset/{name}": made.version}
        small_lake.put(lake, "sft_checkpoint", name, {"checkpoints": [row]}, inputs=inputs)


def timed(what: str, work: Callable[[], object], baseline: float | None = None) -> float:
    """Run and print the seconds, and their ratio to a baseline."""
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    print(f"{what:44}{seconds:8.2f} s" + (f"   {seconds / baseline:5.2f} x" if baseline else ""), flush=True)
    return seconds


def main(versions: int, megabytes: int) -> None:
    print(machine())
    with tempfile.TemporaryDirectory(prefix="etpi-life-") as folder:
        root = Path(folder)
        lake = Lake(root / "data")
        fill(lake, versions, megabytes)
        du = timed("du -s", lambda: subprocess.run(["du", "-s", lake.root], check=True, capture_output=True))
        timed("etpi verify", lambda: audit(lake), du)
        timed("etpi verify --deep", lambda: audit(lake, deep=True), du)
        timed("etpi gc, the plan", lambda: plan_garbage(lake, timedelta(0)), du)
        doomed = plan_garbage(lake, timedelta(0))
        timed(f"etpi gc, {len(doomed)} parts", lambda: carry_out(lake, doomed), du)
        print(f"damaged: {len(audit(lake).damages)}")


if __name__ == "__main__":
    given = [int(value) for value in sys.argv[1:]]
    main(*given, *(1000, 500)[len(given) :])
