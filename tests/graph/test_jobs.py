"""Jobs in Dagster: what a run records, refuses and says. What they compute is other tests' business."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import dagster as dg
import pytest

from etpi import commands
from etpi.dagster_home import SETTINGS
from etpi_assets import resources
from etpi_assets.graph import GRAPH, JOBS
from etpi_assets.jobs import chain_backfill
from etpi_assets.planner import plan
from etpi_assets.runs import runner
from etpi_assets.runs.stopping import StopRequests
from etpi_resources.lake.lake import Lake, Ref
from tests.support.graph import EXPERIMENT, failures, write_spec

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def instance():
    with dg.DagsterInstance.ephemeral() as created:
        yield created


def _run(world, instance, job, key=None, **more):
    return (
        world.definitions()
        .resolve_job_def(job)
        .execute_in_process(instance=instance, partition_key=key, raise_on_error=False, **more)
    )


def _prepared(world, instance):
    assert _run(world, instance, "prepare_suite", "small").success
    assert _run(world, instance, "collect_rollouts", "few").success


def _materialized(result):
    events = [e for e in result.all_events if e.event_type_value == "ASSET_MATERIALIZATION"]
    return {e.asset_key.to_user_string(): e.materialization for e in events if e.asset_key}


def test_what_the_disk_refuses_is_said_in_one_line(world, instance, monkeypatch):
    def refuse(*_args, **_options):
        raise OSError(errno.EROFS, "Read-only file system", "/shared/lake/.staging")

    with monkeypatch.context() as patch:
        patch.setattr(Lake, "publish", refuse)
        result = _run(world, instance, "prepare_suite", "small")
    (failure,) = [event.step_failure_data for event in result.all_events if event.is_step_failure]
    assert "/shared/lake/.staging: Read-only file system. Run the same command again" in failure.error.message
    assert failure.error.stack == []
    assert _run(world, instance, "prepare_suite", "small").success


def test_run_experiment_makes_everything_and_a_rerun_nothing(world, instance):
    _prepared(world, instance)
    first = _run(world, instance, "run_experiment", "first")
    assert first.success
    events = _materialized(first)
    assert set(events) == set(JOBS["run_experiment"][1])
    assert events["tito_pairs"].partition == "first" and events["leaderboard"].partition is None

    created = len(world.made)
    again = _materialized(_run(world, instance, "run_experiment", "first"))
    assert [name for name, _ in world.made[created:]] == ["catalog"]
    for name, event in again.items():
        assert event.tags["dagster/data_version"] == events[name].tags["dagster/data_version"], name
        assert event.metadata["skipped"].value is (name != "catalog")
    current = world.lake.current(Ref("tito_pairs", "experiment", "first"))
    assert again["tito_pairs"].tags["dagster/data_version"] == current.version


def test_an_assets_page_shows_rows_preview_inputs_and_keeps_its_plot_when_skipped(world, instance):
    _prepared(world, instance)
    events = [_materialized(_run(world, instance, "build_dataset", "first"))["tito_pairs"] for _ in range(3)]
    assert [event.metadata["skipped"].value for event in events] == [False, True, True]
    assert [event.metadata["plot"].value for event in events] == ["a plot"] * 3
    event = events[-1]
    assert event.metadata["dagster/row_count"].value == 1
    assert event.metadata["preview/pairs"].value.startswith("| pair_id |")
    assert "selected_trajectories/first" in event.metadata["inputs"].value
    assert sum(len(str(value.value)) for value in event.metadata.values()) < 50_000


def test_missing_upstream_fails_at_the_first_step_with_the_commands(world, instance):
    result = _run(world, instance, "run_experiment", "first")
    assert not result.success
    (said,) = failures(result)
    assert "dg launch --job prepare_suite --partition small" in said
    assert "make run EXPERIMENT=first" in said
    assert world.made == [], "not even the base was built"


def test_missing_and_invalid_names_fail_at_once(world, instance):
    result = _run(world, instance, "run_experiment")
    assert "this run names no experiment" in failures(result)[0]
    assert failures(result)[0].endswith("Valid names: " + ", ".join(world.resources().specs.keys("experiment")))
    write_spec(world.specs_folder, "experiments", "broken", "sead = 1")
    assert "broken.toml: sead: unknown key" in failures(_run(world, instance, "run_experiment", "broken"))[0]
    with pytest.raises(Exception, match="'frist'.*'first'"):
        _run(world, instance, "run_experiment", "frist")
    result = _run(world, instance, "run_experiment", tags={"dagster/partition": "frist"})
    assert "Did you mean 'first'" in failures(result)[0]
    assert world.made == []


def test_failed_check_fails_the_run_and_binds_a_later_one(world, instance):
    _prepared(world, instance)
    world.failing.add("upweighted_dataset")
    result = _run(world, instance, "build_dataset", "first")
    assert not result.success
    assert "sound: row 3 is unsound; mend it" in failures(result)[0]
    (evaluation,) = [e for e in result.get_asset_check_evaluations() if not e.passed]
    assert (evaluation.asset_key.to_user_string(), evaluation.partition) == ("upweighted_dataset", "first")
    assert evaluation.metadata["row of first"].value == 3

    later = _run(world, instance, "train", "first")
    assert not later.success
    assert "row 3 is unsound; mend it" in failures(later)[0]
    assert ("sft_checkpoint", "first") not in world.made


def test_experiment_that_needs_a_gpu_fails_before_its_first_step(world, instance, monkeypatch):
    _prepared(world, instance)
    write_spec(world.specs_folder, "experiments", "first", 'requires = "gpu"\n' + EXPERIMENT)
    monkeypatch.setattr(resources, "ACCELERATORS", ())
    result = _run(world, instance, "run_experiment", "first")
    assert 'requires = "gpu"' in failures(result)[0]
    assert [n for n, _ in world.made if GRAPH[n].set == "experiment"] == []
    assert _run(world, instance, "build_dataset", "first").success, "its dataset needs none"


def test_bring_experiment_submits_exactly_what_is_not_there(world, instance):
    _run(world, instance, "prepare_suite", "small")
    # The job's op asks its repository for the asset graph, which a job run in a test has not; test_ui runs the job.
    specs, lake = world.resources().specs, world.lake
    graph = world.definitions().resolve_asset_graph()
    instance.add_backfill(chain_backfill("first", plan("first", specs, lake), graph, instance))
    (outcome,) = instance.get_backfills()
    target = outcome.asset_backfill_data.target_subset
    partitions = {
        key.to_user_string(): set(subset.get_partition_keys())
        for key, subset in target.partitions_subsets_by_asset_key.items()
    }
    assert "tasks" not in partitions
    assert partitions["raw_rollouts"] == {"few"} and partitions["tito_pairs"] == {"first"}
    across = {k.to_user_string() for k in target.non_partitioned_asset_keys}
    assert across == set(JOBS["publish_catalog"][1])


def _command(*words, home, cwd):
    shutil.copy(SETTINGS, home)
    environment = {**os.environ, "DAGSTER_HOME": str(home), "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    program = str(Path(sys.executable).parent / words[0])
    return subprocess.run([program, *words[1:]], cwd=cwd, env=environment, capture_output=True, text=True)


def test_dg_launch_of_an_unknown_name_exits_with_1_and_offers_the_nearest(tmp_path):
    words = ("dg", "launch", "--job", "run_experiment", "--partition", "plan_frist")
    done = _command(*words, home=tmp_path, cwd=ROOT)
    assert done.returncode == 1
    assert "'plan_frist'" in done.stderr and "'plan_first_v" in done.stderr


def test_dg_launch_without_a_name_exits_with_1(tmp_path):
    # Not in the checkout, whose .env would name the user's own home.
    words = ("dg", "launch", "-m", "etpi_assets.definitions", "--job", "run_experiment")
    done = _command(*words, home=tmp_path, cwd=tmp_path)
    assert done.returncode == 1
    assert "this run names no experiment" in done.stderr + done.stdout


def test_dagster_job_launch_needs_no_daemon_and_names_missing_inputs(tmp_path):
    tags = '{"dagster/partition": "plan_first_tiny"}'
    words = ("dagster", "job", "launch", "-m", "etpi_assets.definitions", "-j", "run_experiment", "--tags", tags)
    assert _command(*words, home=tmp_path, cwd=tmp_path).returncode == 0, "it only submits"
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        end = time.monotonic() + 90
        while not (run := instance.get_runs()[0]).is_finished and time.monotonic() < end:
            time.sleep(0.5)
        assert run.status == dg.DagsterRunStatus.FAILURE
        failures = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
        said = failures[0].get_dagster_event().step_failure_data.user_failure_data.description
    assert "dg launch --job collect_rollouts --partition coop_tiny_shared_strong" in said


def test_make_run_exits_with_1_where_a_step_fails(world, instance, monkeypatch, capsys):
    monkeypatch.setattr(runner, "build_defs", lambda specs, overrides: world.definitions())
    monkeypatch.setattr(dg.DagsterInstance, "get", staticmethod(lambda: instance))
    monkeypatch.setattr(Lake, "open", classmethod(lambda cls: world.lake))
    assert commands.run_experiments(["first"], world.specs_folder) == 0
    assert "-- collect_rollouts of few: done" in capsys.readouterr().err
    assert commands.run_experiments(["first"], world.specs_folder) == 0
    said = capsys.readouterr().err
    assert "nothing is missing or stale" in said and "collect_rollouts" not in said
    world.failing.add("tito_pairs")
    assert commands.run_experiments(["second"], world.specs_folder) == 1
    assert "failed: second" in capsys.readouterr().err
    with pytest.raises(Exception, match="Did you mean 'second'"):
        commands.run_experiments(["secnod"], world.specs_folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_starts_no_further_job(tmp_path, number):
    words = [sys.executable, "-m", "etpi", "run", "plan_first_tiny"]
    environment = {**os.environ, "DAGSTER_HOME": str(tmp_path), "ETPI_DATA": str(tmp_path / "data")}
    with subprocess.Popen(words, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        said = []
        for line in process.stderr:
            said.append(line)
            if "-- prepare_suite of coop_tiny_shared" in line and "FAILED" not in line:
                time.sleep(3)
                process.send_signal(number)
        assert process.wait(60) == 130
    assert "-- prepare_suite of coop_tiny_shared: " in [line for line in said if " -- " in line][-1]
    assert "stopped" in said[-1]


def test_signal_is_remembered_whatever_its_handler():
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        with StopRequests() as asked:
            assert not asked.any()
            signal.raise_signal(signal.SIGINT)
            assert asked.any() and not asked.any()
    finally:
        signal.signal(signal.SIGINT, before)
    assert signal.set_wakeup_fd(-1) == -1
