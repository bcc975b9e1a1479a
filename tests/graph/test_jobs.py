"""Jobs in Dagster: what a run records, refuses and says. What they compute is other tests' business."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import dagster as dg
import pytest

from etpi.dagster_home import SETTINGS
from etpi_assets import resources
from etpi_assets.graph import GRAPH, JOBS
from etpi_assets.orchestration.materialize import EXPERIMENT_INPUTS
from etpi_assets.orchestration.partitions import FEW_PARTITIONS
from etpi_resources.lake.lake import Lake, Ref
from tests.support.graph import EXPERIMENT, SUITE, World, failures, write_spec

EVALUATED = dg.DagsterEventType.ASSET_CHECK_EVALUATION
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
    return {e.asset_key.to_user_string(): e.step_materialization_data.materialization for e in events if e.asset_key}


def test_what_the_disk_refuses_is_said_in_one_line(world, instance, monkeypatch):
    def refuse(*_args, **_options):
        raise OSError(errno.EROFS, "Read-only file system", "/shared/lake/.staging")

    with monkeypatch.context() as patch:
        patch.setattr(Lake, "publish", refuse)
        result = _run(world, instance, "prepare_suite", "small")
    (failure,) = [event.step_failure_data for event in result.all_events if event.is_step_failure]
    assert "/shared/lake/.staging: Read-only file system. Run the same command again" in failure.error.message
    assert _run(world, instance, "prepare_suite", "small").success


def test_run_experiment_makes_the_whole_chain_and_a_rerun_nothing(world, instance):
    first = _run(world, instance, "run_experiment", "first")
    assert first.success
    events = _materialized(first)
    assert set(events) == {*GRAPH, EXPERIMENT_INPUTS}
    partitions = {name: events[name].partition for name in ("tasks", "scored_rollouts", "tito_pairs", "leaderboard")}
    assert partitions == {"tasks": "small", "scored_rollouts": "few", "tito_pairs": "first", "leaderboard": None}

    created = len(world.made)
    again = _materialized(_run(world, instance, "run_experiment", "first"))
    assert [name for name, _ in world.made[created:]] == ["catalog"]
    assert set(again) == {EXPERIMENT_INPUTS, *JOBS["run_experiment"][1]}, "finished inputs have no new events"
    for name, event in again.items():
        assert event.tags["dagster/data_version"] == events[name].tags["dagster/data_version"], name
        assert event.metadata["skipped"].value is (name != "catalog")
    current = world.lake.current(Ref("tito_pairs", "experiment", "first"))
    assert again["tito_pairs"].tags["dagster/data_version"] == current.version


def test_inputs_are_logged_as_their_own_jobs_log_them(world, instance, tmp_path):
    _run(world, instance, "run_experiment", "first")
    other = World(tmp_path / "other")
    with dg.DagsterInstance.ephemeral() as apart:
        _prepared(other, apart)
        for name, node in GRAPH.items():
            if node.set not in ("suite", "rollout_set"):
                continue
            (here,), (there,) = (_events(i, name) for i in (instance, apart))
            tags, expected = here.tags or {}, there.tags or {}
            assert set(tags) == set(expected)
            assert all(tags[tag] == expected[tag] for tag in expected if "event_pointer" not in tag), name
            assert set(here.metadata) == set(there.metadata), name
            differing = {label for label in there.metadata if here.metadata[label] != there.metadata[label]}
            assert differing <= {"seconds", "file"}
            assert _evaluations(instance, name) == _evaluations(apart, name), name


def _events(instance: dg.DagsterInstance, asset: str) -> list[dg.AssetMaterialization]:
    records = instance.fetch_materializations(dg.AssetKey(asset), limit=5).records
    return [event for record in records if (event := record.asset_materialization)]


def _evaluations(instance, asset):
    logs = [e for run in instance.get_runs() for e in instance.all_logs(run.run_id)]
    shown = [e.dagster_event.asset_check_evaluation_data for e in logs if e.dagster_event_type is EVALUATED]
    return [
        (e.check_name, e.passed, e.partition, e.blocking, e.severity, e.description, e.metadata)
        for e in shown
        if e.asset_key == dg.AssetKey(asset)
    ]


@pytest.mark.parametrize("tag", ["true", "raw_rollouts, sft_checkpoint"])
def test_run_from_dagsters_page_keeps_what_is_outdated_until_its_tag_says_otherwise(world, instance, code, tag):
    assert _run(world, instance, "run_experiment", "first").success
    code["sft_checkpoint kept"] = 2
    for tags, is_made in (({}, False), ({"etpi/rebuild": "raw_rollouts"}, False), ({"etpi/rebuild": tag}, True)):
        created = len(world.made)
        assert _run(world, instance, "run_experiment", "first", tags=tags).success
        assert (("sft_checkpoint", "first") in world.made[created:]) == is_made


def test_an_assets_page_shows_rows_preview_inputs_and_keeps_its_plot_when_skipped(world, instance):
    _prepared(world, instance)
    events = [_materialized(_run(world, instance, "build_dataset", "first"))["tito_pairs"] for _ in range(3)]
    assert [event.metadata["skipped"].value for event in events] == [False, True, True]
    assert [event.metadata["plot"].value for event in events] == ["a plot"] * 3
    event = events[-1]
    assert event.metadata["dagster/row_count"].value == 1
    assert "pair_id" in event.metadata["preview/pairs"].value.records[0].data
    assert "selected_trajectories/first" in event.metadata["inputs"].value
    assert sum(len(str(value.value)) for value in event.metadata.values()) < 50_000


def test_missing_upstream_fails_at_the_first_step_with_the_commands(world, instance):
    result = _run(world, instance, "build_dataset", "first")
    assert not result.success
    (said,) = failures(result)
    assert "Run `etpi run first`" in said
    assert world.made == []


def test_blocked_input_fails_the_run_before_the_experiment(world, instance):
    world.failing.add("raw_rollouts")
    result = _run(world, instance, "run_experiment", "first")
    (failure,) = failures(result)
    assert failure.startswith("raw_rollouts of few: blocked by failed checks") and "row 3 is unsound" in failure
    assert [name for name, _ in world.made] == ["tasks", "raw_rollouts"]


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
    assert "requires a GPU" in failures(result)[0]
    assert not [n for n, _ in world.made if GRAPH[n].set == "experiment"]
    assert _run(world, instance, "build_dataset", "first").success, "its dataset needs none"


def test_backfill_over_every_partition_of_a_set_is_refused_unless_a_tag_allows_it(world, instance):
    for number in range(FEW_PARTITIONS):
        write_spec(world.specs_folder, "suites", f"more_{number}", SUITE)
    job = world.definitions().resolve_job_def("prepare_suite")
    suites = job.partitions_def.get_partition_keys()
    assert len(suites) > FEW_PARTITIONS

    def run(targets, **tags):
        backfill = types.SimpleNamespace(asset_backfill_data=None, partition_names=targets)
        with mock.patch.object(instance, "get_backfill", lambda _: backfill):
            tags = {"dagster/backfill": "abc", **tags}
            return job.execute_in_process(instance=instance, partition_key="small", tags=tags, raise_on_error=False)

    (failure,) = failures(run(suites))
    assert f"all {len(suites)} partitions of the set suite" in failure and "run_experiment" in failure
    assert world.made == []
    assert run(["small"]).success and run(suites, **{"etpi/every_partition": "true"}).success


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


@pytest.mark.slow
def test_dg_launch_without_a_name_exits_with_1(tmp_path):
    # Not in the checkout, whose .env would name the user's own home.
    words = ("dg", "launch", "-m", "etpi_assets.definitions", "--job", "run_experiment")
    done = _command(*words, home=tmp_path, cwd=tmp_path)
    assert done.returncode == 1
    assert "this run names no experiment" in done.stderr + done.stdout
