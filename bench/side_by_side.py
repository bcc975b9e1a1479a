"""What it costs to run jobs by each arrangement that Dagster offers: seconds and CPU seconds, in the same minutes.

    python bench/side_by_side.py LAKE [--rounds 2]

LAKE is the `data` folder of `make demo`; a copy of it is used. Two loads: `catalog`, a job of three steps, and
`datasets`, the datasets of the demo's two experiments built again at once, without training. Arrangements:

    pool          a process of etpi's pool for each experiment, in which jobs run by the in-process executor
    multiprocess  the same processes, with Dagster's multiprocess executor: a process for each step
    launcher      `dagster job launch` for each, run by the instance's DefaultRunLauncher, as the web page does
    queue         the same with QueuedRunCoordinator, two runs at once, and a daemon that was started before
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import dagster as dg

EXPERIMENTS = ("plan_first_tiny", "plan_first_tiny_weak")
LOADS = {"catalog": [("publish_catalog", "")], "datasets": [("build_dataset", name) for name in EXPERIMENTS]}
DATASET = ("selected_trajectories", "tito_pairs", "upweighted_dataset")
IN_THIS_FILE = [sys.executable, str(Path(__file__).resolve())]
QUEUE = """
telemetry: {enabled: false}
run_coordinator:
  module: dagster._core.run_coordinator
  class: QueuedRunCoordinator
  config: {max_concurrent_runs: 2, dequeue_interval_seconds: 1}
"""


def job_of_many_processes() -> dg.JobDefinition:
    """Return the job that BENCH_JOB names, with the multiprocess executor; a process for a step imports this too."""
    dg.in_process_executor = dg.multiprocess_executor  # before the definitions take it
    from etpi_assets.definitions import defs

    return defs.resolve_job_def(os.environ["BENCH_JOB"])


def run_in_process(job: str, key: str) -> bool:
    from etpi_assets.runs.runner import Runner

    from etpi_assets.specs.load import load_specs

    return not Runner(load_specs()).run(job, key or None)


def run_in_many_processes(job: str, key: str) -> bool:
    os.environ["BENCH_JOB"] = job
    sys.path.insert(0, str(Path(__file__).parent))
    from side_by_side import job_of_many_processes  # pyright: ignore[reportMissingImports] - steps import it by this name

    tags = {"dagster/partition": key} if key else {}
    with dg.DagsterInstance.get() as instance:
        return dg.execute_job(dg.reconstructable(job_of_many_processes), instance, tags=tags).success


def launch(jobs: Sequence[tuple[str, str]]) -> None:
    """Launch the jobs and wait until all have ended."""
    with dg.DagsterInstance.get() as instance:
        before = instance.get_runs_count()
        for job, key in jobs:
            command = ["-m", "dagster", "job", "launch", "-m", "etpi_assets.definitions", "-j", job]
            tags = ["--tags", f'{{"dagster/partition": "{key}"}}'] if key else []
            _start([sys.executable, *command, *tags])
        for process in _STARTED:
            assert process.wait() == 0
        while True:
            runs = instance.get_runs(limit=instance.get_runs_count() - before)
            if len(runs) == len(jobs) and all(run.is_finished for run in runs):
                assert all(run.is_success for run in runs), [run.status for run in runs]
                return
            time.sleep(0.1)


_STARTED: list[subprocess.Popen[bytes]] = []


def _start(command: Sequence[str]) -> None:
    with Path("log").open("ab") as log:
        _STARTED.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log))


def run_processes(kind: str, jobs: Sequence[tuple[str, str]]) -> None:
    for job, key in jobs:
        _start([*IN_THIS_FILE, kind, job, key])
    for process in _STARTED:
        assert process.wait() == 0, Path("log").read_text()[-2000:]


def forget_datasets(lake: Path) -> None:
    """Remove the datasets, so that they are built again."""
    for asset in DATASET:
        for name in EXPERIMENTS:
            for folder in lake.glob(f"{asset}/**/experiment={name}"):
                shutil.rmtree(folder)


def measure(load: str, lake: Path, run: Callable[[Sequence[tuple[str, str]]], None]) -> tuple[float, float]:
    """Return wall seconds, and CPU seconds of the processes that were started here (a launcher's are not)."""
    if load == "datasets":
        forget_datasets(lake)
    _STARTED.clear()
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    run(LOADS[load])
    after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - start
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compare(lake: Path, rounds: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="etpi-side-"))
    os.chdir(folder)
    data = folder / "data"
    shutil.copytree(lake, data, ignore=shutil.ignore_patterns(".dagster_home"))
    homes = {name: folder / name for name in ("plain", "queue")}
    for name, home in homes.items():
        home.mkdir()
        settings = Path(__file__).parents[1] / "etpi" / "dagster.yaml"
        (home / "dagster.yaml").write_text(QUEUE if name == "queue" else settings.read_text())
    os.environ |= {"ETPI_DATA": str(data), "DAGSTER_HOME": str(homes["plain"])}
    daemon_environment = {**os.environ, "DAGSTER_HOME": str(homes["queue"])}
    daemon = subprocess.Popen(
        [sys.executable, "-m", "dagster._daemon", "run", "-m", "etpi_assets.definitions"],
        env=daemon_environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    arrangements: dict[str, Callable[[Sequence[tuple[str, str]]], None]] = {
        "pool": lambda jobs: run_processes("pool", jobs),
        "multiprocess": lambda jobs: run_processes("multiprocess", jobs),
        "launcher": launch,
        "queue": launch,
    }
    try:
        time.sleep(30)
        for number in range(rounds):
            for load in LOADS:
                baseline = None
                for name, run in arrangements.items():
                    os.environ["DAGSTER_HOME"] = str(homes["queue" if name == "queue" else "plain"])
                    seconds, cpu = measure(load, data, run)
                    baseline = baseline or seconds
                    spent = f"{cpu:5.1f} CPU s" if name in ("pool", "multiprocess") else "  - CPU s"
                    print(
                        f"round {number} {load:9} {name:13} {seconds:6.1f} s {spent}  x{seconds / baseline:.1f}"
                        f"  load {os.getloadavg()[0]:.0f}",
                        flush=True,
                    )
    finally:
        daemon.terminate()
        daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    if len(sys.argv) == 4 and sys.argv[1] in ("pool", "multiprocess"):
        kind, job, key = sys.argv[1:]
        return 0 if (run_in_process if kind == "pool" else run_in_many_processes)(job, key) else 1
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lake", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    compare(options.lake.resolve(), options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
