"""Blocks on the idle CPUs of several nodes: the results of one process, in order, whatever dies."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from etpi_assets.curation import dataset_blocks, pair_blocks
from etpi_assets.importers import bulk
from etpi_assets.importers.bulk import ImportSource, import_in_bulk
from etpi_assets.trajectories import tables as trajectory_tables
from etpi_cluster import blocks
from etpi_cluster.fan_out import ClusterExecutor, OtherCode, WorkersDied
from etpi_resources.process import pool
from etpi_resources.process.pool import BLOCKS_AHEAD, WorkerDied, ordered_map, workers_for
from tests.support.curation import STEPS, CurationLake
from tests.support.ray_nodes import RayNodes
from tests.support.recorded_runs import PAIR_OPTIONS, native_messages, pair_run, verdict
from tests.support.waiting import until

pytestmark = pytest.mark.slow
WORKERS = 3
"""One here, and one on the only CPU of each node."""


@dataclass(frozen=True)
class Meeting:
    """A factory whose function waits until so many processes compute, and returns its rows and its process."""

    folder: Path
    processes: int = WORKERS

    def __call__(self) -> Callable[[pa.Table], tuple[pa.Table, int]]:
        return self.compute

    def compute(self, rows: pa.Table) -> tuple[pa.Table, int]:
        (self.folder / str(os.getpid())).touch()
        deadline = time.monotonic() + 90
        while len(list(self.folder.iterdir())) < self.processes and time.monotonic() < deadline:
            time.sleep(0.02)
        return rows.append_column("twice", pa.array([2 * turn for turn in rows["turn"].to_pylist()])), os.getpid()


@dataclass(frozen=True)
class Waiting:
    """A factory whose function waits until a file exists."""

    flag: Path

    def __call__(self) -> Callable[[int], int]:
        return self.compute

    def compute(self, number: int) -> int:
        deadline = time.monotonic() + 90
        while not self.flag.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return number


@dataclass(frozen=True)
class Slow:
    """A factory whose function takes a while, and kills its process or fails at one number."""

    deadly: int = -1
    faulty: int = -1

    def __call__(self) -> Callable[[int], int]:
        return self.compute

    def compute(self, number: int) -> int:
        time.sleep(0.1)
        if number == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == self.faulty:
            raise KeyError("no such turn")
        return number


def numbered(count: int) -> Iterator[tuple[str, int]]:
    return ((f"block {number}", number) for number in range(count))


def test_blocks_of_all_nodes_come_in_order_and_few_are_in_memory(on_cluster: RayNodes, tmp_path: Path) -> None:
    table = pa.table({"turn": range(60), "name": ["x"] * 60})
    read: list[int] = []

    def rows() -> Iterator[tuple[str, pa.Table]]:
        for start in range(0, 60, 5):
            read.append(start)
            yield f"from {start}", table.slice(start, 5)

    (tmp_path / "met").mkdir()
    results = ordered_map(Meeting(tmp_path / "met"), rows(), workers=WORKERS, reads=[tmp_path])
    first = next(results)
    assert len(read) <= BLOCKS_AHEAD * WORKERS
    over_nodes = [first, *results]
    alone = list(ordered_map(Meeting(tmp_path / "met", 0), rows(), workers=1))
    assert [part.to_pylist() for part, _ in over_nodes] == [part.to_pylist() for part, _ in alone]
    pids = {pid for _, pid in over_nodes}
    assert len(pids) == WORKERS and os.getpid() not in pids
    until(lambda: not any(on_cluster.pids(name, "ray::CallWorker") for name in ("one", "two")), 30, every=0.1)


def test_blocks_of_a_killed_node_are_computed_again(on_cluster: RayNodes, tmp_path: Path) -> None:
    log: list[str] = []
    on_cluster.add("three", cpus=2, address="127.0.0.6")

    def kill() -> None:
        until(lambda: on_cluster.pids("three", "ray::CallWorker.call"), every=0.02)
        on_cluster.kill("three", "raylet/raylet")
        (tmp_path / "flag").touch()

    killer = threading.Thread(target=kill)
    killer.start()
    assert list(ordered_map(Waiting(tmp_path / "flag"), numbered(40), workers=5, log=log.append)) == list(range(40))
    killer.join()
    assert any("a worker died" in line and "run again elsewhere" in line for line in log), log


def test_node_with_other_code_is_refused(on_cluster: RayNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "ClusterExecutor", partial(ClusterExecutor, code="0" * 16))
    with pytest.raises(OtherCode, match="0{16}"):
        list(ordered_map(Slow(), numbered(1_000_000), workers=WORKERS))


def test_nodes_that_do_not_see_the_files_are_not_used(on_cluster: RayNodes, tmp_path: Path) -> None:
    log: list[str] = []

    def say(line: str) -> None:
        log.append(line)
        (tmp_path / "flag").touch()

    factory, unseen = Waiting(tmp_path / "flag"), tmp_path / "elsewhere"
    assert list(ordered_map(factory, numbered(20), workers=WORKERS, reads=[unseen], log=say)) == list(range(20))
    assert any(f"does not see {unseen}, so it is not used" in line for line in log), log
    assert "0 of 20 blocks were computed on idle CPUs of the nodes" in log  # a slower node may say its line after it


def test_blocks_that_start_sandboxes_stay_on_nodes_where_these_work(on_cluster: RayNodes, tmp_path: Path) -> None:
    on_cluster.add("four", slots=0, cpus=2, address="127.0.0.7")
    try:
        for sandboxes, processes in ((True, WORKERS), (False, WORKERS + 1)):
            (folder := tmp_path / str(sandboxes)).mkdir()
            rows = ((f"block {n}", pa.table({"turn": [n]})) for n in range(60))
            results = ordered_map(Meeting(folder, processes), rows, workers=WORKERS + 2, sandboxes=sandboxes)
            pids = {pid for _, pid in results}
            assert (len(pids) == WORKERS) if sandboxes else (len(pids) > WORKERS)
    finally:
        on_cluster.end("four")


def test_error_names_its_block_and_a_block_that_kills_its_workers_is_one(on_cluster: RayNodes) -> None:
    with pytest.raises(KeyError, match="no such turn") as raised:
        list(ordered_map(Slow(faulty=3), numbered(9), workers=WORKERS))
    assert any("in block block 3" in note for note in raised.value.__notes__)
    with pytest.raises((WorkerDied, WorkersDied)) as died:
        list(ordered_map(Slow(deadly=3), numbered(9), workers=WORKERS))
    assert "block 3" in " ".join([str(died.value), *getattr(died.value, "__notes__", ())])


def test_work_is_spread_when_it_is_worth_a_worker(on_cluster: RayNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(pool.WORKERS_VARIABLE, raising=False)
    assert workers_for(1.9 * pool.START_SECONDS) == 1, "little work stays in the step's process"
    assert workers_for(500 * pool.START_SECONDS) == 500, "this node's cores are no bound"
    monkeypatch.setenv(pool.WORKERS_VARIABLE, "2")
    assert workers_for(500 * pool.START_SECONDS) == 2


def test_versions_and_imports_over_nodes_are_those_of_one_process(
    on_cluster: RayNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = CurationLake(tmp_path / "alone")
    alone.write("suites", "small", "title = 's'\nfamily = 'coop_tiny_shared'\n[params]\ntrain = 6\nheldout = 24\n")
    alone.rollout_set("good")
    alone.experiment("clean", more='[pairs]\ncapture = "native"\n')
    alone.make("tasks", "small")
    alone.make("raw_rollouts", "good")
    shutil.copytree(alone.folder, tmp_path / "spread")
    spread = CurationLake(tmp_path / "spread")
    for number in range(8):
        where = f"run_{number:02d}/coop/harbor_task/7/f1_f3"
        pair_run(tmp_path / "runs", where=where, messages=[native_messages()] * 2, verdict=verdict())
    windows: list[blocks._Window] = []
    started = blocks._Window.__post_init__
    monkeypatch.setattr(blocks._Window, "__post_init__", lambda self: windows.append(self) or started(self))
    monkeypatch.setattr(trajectory_tables, "_ROLLOUTS", 3)
    monkeypatch.setattr(dataset_blocks, "BLOCK_ROWS", 8)
    monkeypatch.setattr(pair_blocks, "_ROWS", 8)
    monkeypatch.setattr(bulk, "_PART_UNITS", 2)
    monkeypatch.setattr(pool, "START_SECONDS", 1e-9)  # as if there were a lot of work
    # The workers of the nodes get every block, though the worker here would be faster.
    monkeypatch.setattr(blocks._Window, "_feed", lambda self: None)
    made, imported = {}, {}
    runs = ImportSource("cooperbench", str(tmp_path / "runs"), PAIR_OPTIONS, "old", None)
    for workers, lake in (("1", alone), ("3", spread)):
        monkeypatch.setenv(pool.WORKERS_VARIABLE, workers)
        made[workers] = [lake.make(*step).manifest for step in STEPS if step[1] in ("good", "clean")]
        read = import_in_bulk(runs, tmp_path / f"spill{workers}", hashes={})
        imported[workers] = {
            name: [row for batch in batches for row in batch.to_pylist()] for name, batches in read.tables.items()
        }
    assert [(m.version, m.checks) for m in made["3"]] == [(m.version, m.checks) for m in made["1"]]
    assert imported["3"] == imported["1"] and len(imported["1"]["rollouts"]) == 8
    assert len(windows) == 5, "scores, pairs, leaks, rows and import"
    assert all(window.elsewhere == window.number > 0 for window in windows)
