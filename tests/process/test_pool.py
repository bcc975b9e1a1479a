"""Blocks computed in worker processes: results in order, errors that name the block, no worker left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest

from etpi_resources.process import pool
from etpi_resources.process.pool import WorkerDied, ordered_map, worker_count, workers_for
from tests.support.waiting import until

FEW = 3
MANY = 40


@dataclass(frozen=True)
class Doubled:
    """A factory whose function doubles numbers; what else it does, tests choose by a block."""

    factor: int = 2

    def __call__(self) -> Callable[[int], int]:
        return lambda number: self.factor * number


class Stubborn(Exception):
    """An error that cannot be pickled."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(f"{number} {why}")


@dataclass(frozen=True)
class Faulty:
    def __call__(self) -> Callable[[int], int]:
        return self.compute

    def compute(self, number: int) -> int:
        if number == FEW:
            raise KeyError("no such turn")
        if number == FEW + 1:
            raise Stubborn(number, "is odd")
        if number == MANY:
            os.kill(os.getpid(), signal.SIGKILL)
        return number


@dataclass(frozen=True)
class Slow:
    def __call__(self) -> Callable[[float], int]:
        return self.compute

    def compute(self, seconds: float) -> int:
        time.sleep(seconds)
        return os.getpid()


@dataclass(frozen=True)
class Rows:
    def __call__(self) -> Callable[[pa.Table], pa.Table]:
        return lambda table: table.slice(1)


def numbered(numbers: range) -> Iterator[tuple[str, int]]:
    return ((f"block {number}", number) for number in numbers)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_come_in_order_whatever_the_number_of_workers(workers: int) -> None:
    doubled = list(ordered_map(Doubled(), numbered(range(MANY)), workers=workers))
    assert doubled == [2 * number for number in range(MANY)]


def test_blocks_are_computed_side_by_side_in_other_processes() -> None:
    seconds = ((f"{number}", 0.3) for number in range(4))
    pids = list(ordered_map(Slow(), seconds, workers=2))
    assert len(set(pids)) == 2 and os.getpid() not in pids


def test_blocks_are_read_as_they_are_needed() -> None:
    read: list[int] = []

    def blocks() -> Iterator[tuple[str, int]]:
        for name, number in numbered(range(MANY)):
            read.append(number)
            yield name, number

    results = ordered_map(Doubled(), blocks(), workers=2)
    assert next(results) == 0
    assert len(read) == 2 * pool.BLOCKS_AHEAD
    results.close()  # pyright: ignore[reportAttributeAccessIssue]


def test_slice_of_a_table_is_sent_without_the_rest() -> None:
    table = pa.table({"turn": range(100_000), "name": ["x"] * 100_000})
    assert len(pool.dumps(table.slice(7, 5))) < 2_000
    results = list(ordered_map(Rows(), [("a", table.slice(7, 5)), ("b", table.slice(0, 0))], workers=2))
    assert results[0].equals(table.slice(8, 4)) and results[1].num_rows == 0 and results[1].schema == table.schema


@pytest.mark.parametrize("workers", [1, 2])
def test_error_keeps_its_type_and_names_its_block(workers: int) -> None:
    results = ordered_map(Faulty(), numbered(range(FEW + 1)), workers=workers)
    with pytest.raises(KeyError, match="no such turn") as raised:
        list(results)
    assert f"in block block {FEW}" in raised.value.__notes__[0]


def test_error_that_cannot_be_pickled_keeps_its_text() -> None:
    with pytest.raises(RuntimeError, match=f"Stubborn: {FEW + 1} is odd"):
        list(ordered_map(Faulty(), numbered(range(FEW + 1, FEW + 2)), workers=2))


def test_killed_worker_is_an_error_that_names_its_block() -> None:
    with pytest.raises(WorkerDied, match=f"block {MANY}: .*ETPI_WORKERS"):
        list(ordered_map(Faulty(), numbered(range(MANY - 2, MANY + 1)), workers=2))


def test_workers_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from etpi_resources.process.pool import ordered_map\n"
        "from tests.process.test_pool import Slow\n"
        "for pid in ordered_map(Slow(), [('a', 0.0), ('b', 0.0), ('c', 600.0), ('d', 600.0)], workers=2):\n"
        "    print(pid, flush=True)\n"
    )
    root = Path(__file__).parents[2]
    caller = subprocess.Popen([sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    worker = int(caller.stdout.readline())
    caller.kill()
    caller.wait()
    caller.stdout.close()
    until(lambda: not Path(f"/proc/{worker}").exists(), 20)


def test_number_of_workers_is_set_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETPI_WORKERS", "5")
    assert worker_count() == 5
    assert workers_for(0.5) == 1 and workers_for(2 * pool.START_SECONDS) == 2 and workers_for(1e6) == 5
    monkeypatch.setenv("ETPI_WORKERS", "none")
    with pytest.raises(ValueError, match="ETPI_WORKERS is 'none'"):
        worker_count()
    monkeypatch.delenv("ETPI_WORKERS")
    assert worker_count() == len(os.sched_getaffinity(0))
