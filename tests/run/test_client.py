"""`etpi run` as a client of Dagster's instance: real runs of real experiments, stopped and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
import pytest

from etpi.run import client
from etpi_assets.graph import GRAPH
from etpi_assets.specs.load import load_specs
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.process.supervise import descendants
from tests.support.graph import write_spec
from tests.support.small_specs import DATA_ALONE, write_small_specs
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240.0
SERVER, WORKER = "dagster api grpc", "multiprocessing.spawn"
"""Parts of the command lines of a code server and of the process of a run."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with specs of experiments on one rollout set, a lake and a Dagster home, empty at first."""
    path = tmp_path_factory.mktemp("client")
    write_small_specs(path / "specs")
    for name in ("left", "right", "third"):
        write_spec(path / "specs", "experiments", name, DATA_ALONE)
    write_spec(path / "specs", "experiments", "right", DATA_ALONE.replace("teacher = {}", "teacher.solved = 1.01"))
    (path / "dagster.yaml").write_text((ROOT / "etpi" / "dagster.yaml").read_text())
    return path


def _environment(folder: Path) -> dict[str, str]:
    places = {"DAGSTER_HOME": "", "ETPI_DATA": "data", "ETPI_CATALOG": "etpi.duckdb", "ETPI_SPECS": "specs"}
    own = {name: str(folder / place) for name, place in places.items()}
    return {**os.environ, **own, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}


def test_a_catalog_that_failed_is_not_published_again(folder, monkeypatch):
    monkeypatch.setenv("ETPI_DATA", str(folder / "data"))
    runs = client.Client(load_specs(folder / "specs"))
    jobs = []
    monkeypatch.setattr(runs, "_run", lambda job, key, assets: jobs.append(job) or ["catalog: disk full"])
    assert runs.run_experiments(["catalog"]) == {"catalog": ["catalog: disk full"]} and jobs == ["publish_catalog"]


@contextmanager
def _started(folder: Path, *names: str, in_background: bool = False) -> Iterator[subprocess.Popen[str]]:
    """`etpi run` of experiments, its words on stderr; in the background of a script, whose shell ignores SIGINT."""
    with subprocess.Popen(
        [*(["env", "--ignore-signal=INT"] if in_background else []), sys.executable, "-m", "etpi", "run", *names],
        cwd=ROOT, env=_environment(folder), stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        yield process


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:  # it has ended, perhaps while its file was open
        return ""


def _below(process: subprocess.Popen[str], part: str, count: int = 1) -> list[int]:
    """Wait until so many processes below have this in their command line, supervisors excepted; return them."""
    found: list[int] = []

    def enough() -> bool:
        found[:] = [p for p in descendants(process.pid) if part in (line := _command(p)) and "supervise.py" not in line]
        return len(found) >= count

    until(enough, SECONDS)
    return found


def _messages(instance: dg.DagsterInstance) -> Iterator[str]:
    return (
        entry.dagster_event.message or ""
        for run in instance.get_runs()
        for entry in instance.all_logs(run.run_id)
        if entry.dagster_event
    )


def _gone(pids: list[int]) -> bool:
    return not [pid for pid in pids if _command(pid)]


@pytest.mark.slow
def test_three_experiments_at_once_make_their_set_once_and_a_failed_one_stops_no_other(folder):
    with _started(folder, "left", "right", "third") as process:
        assert process.stderr
        output = process.stderr.read()
        assert process.wait() == 1, output
    assert "etpi: failed: right.\n  right: " in output and "etpi status right" in output
    assert "-- run_experiment of right: FAILED" in output
    assert output.count("-- publish_catalog: done") == 1
    lake = Lake(folder / "data")
    for name in ("left", "third"):
        dataset = lake.current(Ref("upweighted_dataset", "experiment", name))
        assert dataset and dataset.rows["sequences"] > 0, output
    assert len(lake.history(Ref("raw_rollouts", "rollout_set", "little_strong"))) == 1
    assert len(lake.history(Ref("tasks", "suite", "little"))) == 1
    with dg.DagsterInstance.from_config(str(folder)) as instance:
        runs = {run.tags.get("dagster/partition"): run for run in instance.get_runs()}
        assert {name for name, run in runs.items() if run.is_success} == {None, "left", "third"}
        origins = [run.remote_job_origin for run in runs.values()]
        assert {origin.location_name for origin in origins if origin} == {"etpi"} and None not in origins


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 130, marks=pytest.mark.slow),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_stopped_client_leaves_no_process(folder, number, code):
    names = [f"stopped_{number}_{letter}" for letter in "ab"]
    for name in names:
        write_spec(folder / "specs", "experiments", name, DATA_ALONE)
    with _started(folder, *names, in_background=number == signal.SIGTERM) as process:
        assert process.stderr
        _below(process, WORKER, count=2)
        below = descendants(process.pid)
        process.send_signal(number)
        output = process.stderr.read()
        assert process.wait(90) == code
        assert "FAILED in" not in output and (number == signal.SIGKILL or ": stopped in" in output), output
    until(lambda: _gone(below), 30)
    with dg.DagsterInstance.from_config(str(folder)) as instance:
        runs = [run for run in instance.get_runs() if run.tags.get("dagster/partition") in names]
        assert runs and all(run.is_finished and not run.is_success for run in runs)


@pytest.mark.long
def test_run_whose_process_dies_fails_alone_and_the_next_call_finishes_it(folder):
    names = ("one", "two")
    for name in names:
        write_spec(folder / "specs", "experiments", name, DATA_ALONE)
    with _started(folder, *names) as process:
        assert process.stderr
        worker = _below(process, WORKER)[0]
        with dg.DagsterInstance.from_config(str(folder)) as instance:  # Dagster words it otherwise during the launch
            until(lambda: any(f"in process (pid: {worker})" in message for message in _messages(instance)), SECONDS)
        os.kill(worker, signal.SIGKILL)
        output = process.stderr.read()
        assert process.wait() == 1, output
    (failed,) = [name for name in names if f"etpi: failed: {name}.\n" in output]
    assert "was terminated by signal 9" in output
    with _started(folder, failed) as process:
        assert process.stderr
        output = process.stderr.read()
        assert process.wait() == 0, output
    assert f"-- run_experiment of {failed}: done" in output


def test_killed_code_server_fails_its_runs(folder):
    write_spec(folder / "specs", "experiments", "served", DATA_ALONE)
    with _started(folder, "served") as process:
        assert process.stderr
        _below(process, WORKER)
        below = descendants(process.pid)
        os.kill(_below(process, SERVER)[0], signal.SIGKILL)
        output = process.stderr.read()
        assert process.wait() == 1, output
    assert _gone(below) and "Traceback" not in output, output
    assert "etpi: failed: served, publish_catalog." in output and client.SERVER_KILLED in output
    with dg.DagsterInstance.from_config(str(folder)) as instance:
        (run,) = [run for run in instance.get_runs() if run.tags.get("dagster/partition") == "served"]
        assert run.status is dg.DagsterRunStatus.FAILURE


@pytest.mark.slow
@pytest.mark.parametrize("program", ["dg launch", "dagster job launch"])
def test_dagsters_own_commands_make_the_whole_chain_on_an_empty_lake(tmp_path, program):
    write_small_specs(tmp_path / "specs")
    (tmp_path / "dagster.yaml").write_text((ROOT / "etpi" / "dagster.yaml").read_text())
    words = [
        str(Path(sys.executable).parent / program.split()[0]),
        *program.split()[1:],
        "-m",
        "etpi_assets.definitions",
    ]
    if program == "dg launch":
        words += ["--job", "run_experiment", "--partition", "first"]
    else:
        words += ["-j", "run_experiment", "--tags", json.dumps({"dagster/partition": "first"})]
    done = subprocess.run(words, cwd=tmp_path, env=_environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        until(lambda: bool(runs := instance.get_runs()) and runs[0].is_finished, SECONDS)
        (run,) = instance.get_runs()
        assert run.is_success
        for name in GRAPH:
            assert instance.fetch_materializations(dg.AssetKey(name), limit=1).records, name
