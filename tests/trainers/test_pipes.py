"""A worker runs in its own interpreter: its lines, its result and its errors come back, and it never outlives its
caller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pydantic import BaseModel, ValidationError

from etpi_resources.trainers.interpreter import PYTHON_VARIABLE, visible
from etpi_resources.trainers.pipes import WorkerFailed, run_worker
from etpi_resources.trainers.workers.reporting import PROGRESS_MARK
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]

ECHO = """
import os, signal, sys, time
from typing import Any
from pydantic import BaseModel
from etpi_resources.trainers.workers.reporting import open_worker

class EchoConfig(BaseModel):
    count: int = 0
    fail: bool = False
    why: str = "the third wheel is missing"
    die: bool = False
    sleep: float | None = None
    silent: bool = False
    echo: Any = None

class EchoResult(BaseModel):
    python: str
    dagster: bool
    gpus: str = ""
    echo: Any

if __name__ == "__main__":
    with open_worker(EchoConfig) as worker:
        config = worker.config
        stage = worker.stage("counting", config.count)
        for i in range(config.count):
            stage.advance(note=f"at {i}")
        if config.fail:
            raise ValueError(config.why)
        if config.die:
            os.kill(os.getpid(), signal.SIGKILL)
        if config.sleep is not None:
            worker.log(f"sleeping as {os.getpid()}")
            time.sleep(config.sleep)
        if not config.silent:
            gpus = os.environ["CUDA_VISIBLE_DEVICES"]
            imported = "dagster" in sys.modules
            worker.finish(EchoResult(python=sys.executable, dagster=imported, gpus=gpus, echo=config.echo))
"""


class EchoConfig(BaseModel):
    """As the worker's own; it runs in another process."""

    count: int = 0
    fail: bool = False
    why: str = "the third wheel is missing"
    die: bool = False
    sleep: float | None = None
    silent: bool = False
    echo: Any = None


class EchoResult(BaseModel):
    python: str
    dagster: bool
    gpus: str = ""
    echo: Any


class StrictResult(BaseModel):
    figure: float


def run_echo(folder: Path, *, processes: int = 1, context: Any = None, echo: Any = None, **config: Any) -> EchoResult:
    return run_worker(
        "echo_worker", EchoConfig(**config), folder, EchoResult, processes=processes, context=context, echo=echo
    )


@pytest.fixture(autouse=True)
def echo_module(tmp_path, monkeypatch):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "echo_worker.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))


def test_result_and_lines_come_back_and_stay_in_the_folder(tmp_path, monkeypatch):
    lines: list[str] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    config = EchoConfig(echo=[1, "ß"], count=3)
    result = run_worker("echo_worker", config, tmp_path / "run", EchoResult, echo=lines.append)
    assert result.echo == [1, "ß"]
    assert not result.dagster, "a worker must not import dagster"
    assert result.gpus == "3", "one process, one GPU"
    assert [line for line in lines if line.startswith("echo_worker: counting 3/3 (100%), ") and line.endswith("(at 2)")]
    assert not any(PROGRESS_MARK in line for line in lines)
    assert (tmp_path / "run" / "worker.log").read_text().splitlines() == lines


@pytest.mark.parametrize(
    ("named", "first", "gpus"), [(None, 0, "0,1"), (None, 2, "2,3"), ("3,5,GPU-a", 1, "5,GPU-a"), ("", 0, "")]
)
def test_visible_gpus_are_those_that_this_process_may_use(monkeypatch, named, first, gpus):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert visible(first, 2) == {"CUDA_VISIBLE_DEVICES": gpus}


def test_only_rank_0_logs_and_a_failure_names_the_first_rank_to_fail(tmp_path):
    lines: list[str] = []
    assert run_echo(tmp_path / "run", processes=2, echo=lines.append, count=1).echo is None
    assert sum("counting 1/1" in line for line in lines) == 1
    with pytest.raises(WorkerFailed, match="(?s)third wheel.*rank [01] of 2 .*status 1"):
        run_echo(tmp_path / "run", processes=2, fail=True)


def test_failure_has_the_last_lines_and_the_log_s_path(tmp_path):
    with pytest.raises(WorkerFailed, match="third wheel") as failure:
        run_echo(tmp_path / "run", fail=True)
    assert str(tmp_path / "run" / "worker.log") in str(failure.value)


def test_failure_for_want_of_memory_names_what_lowers_it(tmp_path):
    with pytest.raises(WorkerFailed, match="ETPI_MICRO_TOKENS"):
        run_echo(tmp_path / "run", fail=True, why="CUDA out of memory. Tried to allocate 9 GiB")


def test_killed_worker_reports_the_signal_and_no_earlier_result(tmp_path):
    run_echo(tmp_path / "run")
    with pytest.raises(WorkerFailed, match="signal 9.*ETPI_MICRO_TOKENS"):
        run_echo(tmp_path / "run", die=True)
    with pytest.raises(WorkerFailed, match="without a result"):
        run_echo(tmp_path / "run", silent=True)


def test_result_of_another_form_is_refused(tmp_path):
    with pytest.raises(ValidationError, match="figure"):
        run_worker("echo_worker", EchoConfig(), tmp_path / "run", StrictResult, echo=None)


def test_interpreter_can_be_chosen_and_a_missing_one_is_named(tmp_path, monkeypatch):
    other = tmp_path / "other-python"
    other.write_text(f'#!/bin/sh\nexport CHOSEN=yes\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    monkeypatch.setenv(PYTHON_VARIABLE, str(other))
    (tmp_path / "modules" / "chosen.py").write_text(
        "import os\nfrom echo_worker import EchoConfig, EchoResult\n"
        "from etpi_resources.trainers.workers.reporting import open_worker\n"
        "with open_worker(EchoConfig) as worker:\n"
        "    worker.finish(EchoResult(python='', dagster=False, echo=os.environ.get('CHOSEN')))\n"
    )
    assert run_worker("chosen", EchoConfig(), tmp_path / "run", EchoResult, echo=None).echo == "yes"
    monkeypatch.setenv(PYTHON_VARIABLE, "/nowhere/python")
    with pytest.raises(FileNotFoundError, match=f"{PYTHON_VARIABLE} names /nowhere/python"):
        run_echo(tmp_path / "run")


def test_kill_9_of_the_caller_leaves_no_worker(tmp_path):
    caller = subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent("""
            import sys
            from pathlib import Path
            from echo_worker import EchoConfig, EchoResult
            from etpi_resources.trainers.pipes import run_worker
            run_worker("echo_worker", EchoConfig(sleep=60), Path(sys.argv[1]), EchoResult)
         """), str(tmp_path / "run")],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ['PYTHONPATH']}"},
    )  # fmt: skip
    assert caller.stdout is not None
    worker = int(caller.stdout.readline().rpartition(" ")[2])
    os.kill(worker, 0)
    caller.kill()
    caller.wait()
    until(lambda: not Path(f"/proc/{worker}").exists(), 30)


def test_an_interrupt_ends_the_worker_before_it_is_passed_on(tmp_path):
    class Interrupted(BaseException):
        pass

    def interrupt(*_):
        raise Interrupted

    pids: list[int] = []

    def echo(line: str) -> None:
        pids.append(int(line.rpartition(" ")[2]))
        signal.setitimer(signal.ITIMER_REAL, 0.2)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(Interrupted):
            run_echo(tmp_path / "run", echo=echo, sleep=60)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not Path(f"/proc/{pids[0]}").exists()


def test_under_dagster_progress_reaches_the_run_s_log(tmp_path):
    @dg.asset
    def made_by_a_worker(context):
        config = EchoConfig(count=2, echo="x")
        assert run_worker("echo_worker", config, tmp_path / "run", EchoResult, context=context).echo == "x"
        return dg.MaterializeResult()

    with dg.DagsterInstance.ephemeral() as instance:
        started = time.monotonic()
        result = dg.materialize([made_by_a_worker], instance=instance)
        assert time.monotonic() - started < 15
        messages = [entry.user_message for entry in instance.all_logs(result.run_id)]
    assert result.success
    assert [m for m in messages if m.startswith("made_by_a_worker: counting 2/2 (100%), ")], messages


def test_under_dagster_a_worker_s_failure_fails_the_asset_with_its_message(tmp_path):
    @dg.asset
    def broken(context):
        run_echo(tmp_path / "run", context=context, fail=True)

    result = dg.materialize([broken], raise_on_error=False)
    assert not result.success
    failure = result.failure_data_for_node("broken")
    assert failure is not None and "the third wheel is missing" in str(failure.error)
