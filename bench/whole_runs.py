"""Measure `make demo`, its second run, `make demo-all`, `make test` and `make test-all` in a fresh clone, by stage.

    python bench/whole_runs.py demo [demo-all] [test] [test-all] [--emulate-avx2] [--keep FOLDER]

The script clones the checkout's last commit into a temporary folder (or FOLDER/clone, which stays), installs it with
`make setup`, and runs each command there with its own .venv, data and Dagster home. For runs it prints the wall and CPU
seconds of every asset partition, slowest first, from Dagster's event log, and for trainings also the worker's report.
CPU seconds are those of a run's own process and of every process it waited for. For tests it prints the slowest
files.

`--emulate-avx2` sets ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA, so that a newer CPU computes much like one with AVX2.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
from machine import machine

ROOT = Path(__file__).resolve().parent.parent
RUNS = {"demo": ("demo", "demo"), "demo-all": ("demo-all",), "test": ("test",), "test-all": ("test-all",)}
"""Targets of make, in the order in which they run."""
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
SLOWEST_FILES = 25
OWN_VARIABLES = ("ETPI_DATA", "ETPI_CATALOG", "ETPI_SPECS", "DAGSTER_HOME", "VIRTUAL_ENV")
"""Variables that would make a clone write outside its folder."""


@dataclass(frozen=True)
class Stage:
    """One asset partition of one run: seconds of wall and CPU time."""

    asset: str
    key: str
    wall: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description="Whole runs in a fresh clone, stage by stage.")
    parser.add_argument("commands", nargs="+", choices=list(RUNS))
    parser.add_argument("--emulate-avx2", action="store_true", help="compute as a CPU with AVX2 does")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="clone into FOLDER, and leave it there")
    options = parser.parse_args()
    if options.emulate_avx2:
        os.environ.update(AVX2)
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        clone = folder / "clone"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        make(clone, "setup")
        for command in options.commands:
            for target in RUNS[command]:
                began = time.time()
                make(clone, target)
                show_stages(clone, began)
            if command.startswith("test"):
                show_test_files(clone)


def make(clone: Path, target: str) -> None:
    """Run `make TARGET` in the clone, with its output in TARGET.log beside the clone, and print its time.

    Raises:
        SystemExit: it failed; the message ends with the last lines of its output.
    """
    environment = {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES}
    if target.startswith("test"):
        environment["PYTEST_ADDOPTS"] = f"--junitxml={_junit(clone)}"
    log = clone.parent / f"{target}.log"
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with log.open("a") as file:
        status = subprocess.run(["make", target], cwd=clone, env=environment, stdout=file, stderr=file).returncode
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"\nmake {target}: {wall:.1f} s, {cpu:.1f} s of CPU", flush=True)
    if status:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        sys.exit(f"make {target} failed with status {status}; the last lines of {log}:\n{last}")


def show_stages(clone: Path, began: float) -> None:
    """Print the asset partitions materialized since `began` (seconds since the epoch), by Dagster's event log."""
    home = clone / ".dagster_home"
    if not home.is_dir():
        return
    os.environ["DAGSTER_HOME"] = str(home)
    with dg.DagsterInstance.get() as instance:
        stages = sorted(stages_of(instance, began), key=lambda stage: -stage.wall)
    trainings = dict(trainings_of(clone / "data", began))
    for stage in stages:
        if stage.wall >= 0.5:
            print(f"  {stage.wall:8.1f} s {stage.cpu:8.1f} s CPU  {stage.asset} of {stage.key}")
    rest = [stage for stage in stages if stage.wall < 0.5]
    print(f"  {sum(s.wall for s in rest):8.1f} s {sum(s.cpu for s in rest):8.1f} s CPU  {len(rest)} more partitions")
    for name, seconds in trainings.items():
        print(f"  training {name}: " + ", ".join(f"{stage} {value:.1f} s" for stage, value in seconds.items()))
    sys.stdout.flush()


def stages_of(instance: dg.DagsterInstance, began: float) -> Iterator[Stage]:
    """Return every materialization since `began` that is not a skip."""
    for asset in instance.get_asset_keys():
        cursor = None
        while True:
            found = instance.fetch_materializations(
                dg.AssetRecordsFilter(asset_key=asset, after_timestamp=began), limit=500, cursor=cursor
            )
            for record in found.records:
                event = record.asset_materialization
                if event and not event.metadata["skipped"].value:
                    wall, cpu = (float(str(event.metadata[name].value)) for name in ("seconds", "cpu_seconds"))
                    yield Stage(asset.path[-1], event.partition or "all", wall, cpu)
            cursor = found.cursor
            if not found.has_more:
                break


def trainings_of(lake: Path, began: float) -> Iterator[tuple[str, dict[str, float]]]:
    """Return key -> seconds by stage, as its worker reported them, of each training stored since `began`."""
    for path in sorted((lake / "checkpoints" / "trained").glob("*.json")):
        if path.stat().st_mtime >= began:
            seconds = json.loads(path.read_text())["seconds"]
            yield path.stem[:12], seconds if isinstance(seconds, dict) else {"all": seconds}


def show_test_files(clone: Path) -> None:
    """Print the test files that took longest, with setup and teardown."""
    seconds: dict[str, float] = {}
    for case in ElementTree.parse(_junit(clone)).iter("testcase"):
        name = case.attrib["classname"]
        seconds[name] = seconds.get(name, 0.0) + float(case.attrib["time"])
    for name, took in sorted(seconds.items(), key=lambda item: -item[1])[:SLOWEST_FILES]:
        print(f"  {took:8.1f} s  {name}")


def _junit(clone: Path) -> Path:
    return clone.parent / "tests.xml"


if __name__ == "__main__":
    main()
