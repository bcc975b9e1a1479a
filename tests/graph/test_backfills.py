"""Backfills: waiting for one, and refusing one over everything; and runs of commands in Dagster's timeline."""

from __future__ import annotations

import time

import dagster as dg
import pytest

from etpi_assets.backfills import FEW_PARTITIONS, chain_backfill, refuse_whole_set, wait_for
from etpi_assets.dagster_private import BulkActionStatus, ExpectedFailure, PartitionBackfill
from etpi_assets.definitions import resource_of
from etpi_assets.planner import plan
from etpi_assets.resources import Resources
from tests.support.graph import failures


@pytest.fixture
def instance():
    with dg.DagsterInstance.ephemeral() as created:
        yield created


def _backfill(instance, partitions=("first",), **tags):
    backfill = PartitionBackfill(
        backfill_id="abc",
        status=BulkActionStatus.REQUESTED,
        from_failure=False,
        tags=tags,
        backfill_timestamp=time.time(),
        partition_names=list(partitions),
    )
    instance.add_backfill(backfill)
    return backfill


def _ending(instance, status):
    def sleep(_):
        instance.update_backfill(instance.get_backfill("abc").with_status(status))

    return sleep


def _wait(instance, status):
    _backfill(instance)
    wait_for("abc", instance, print, sleep=_ending(instance, status))


def test_waiting_ends_when_the_backfill_has_succeeded(instance):
    _wait(instance, BulkActionStatus.COMPLETED_SUCCESS)


@pytest.mark.parametrize("status", [BulkActionStatus.COMPLETED_FAILED, BulkActionStatus.CANCELED])
def test_waiting_fails_with_the_failed_runs_and_their_reasons(instance, status):
    @dg.op
    def train():
        raise ExpectedFailure("sft_checkpoint: no GPU")

    @dg.job(tags={"dagster/backfill": "abc", "dagster/partition": "first"})
    def job():
        train()

    run = job.execute_in_process(instance=instance, raise_on_error=False)
    with pytest.raises(ExpectedFailure) as raised:
        _wait(instance, status)
    assert status.value in str(raised.value) and "/runs/b/abc" in str(raised.value)
    assert f"run {run.run_id[:8]} of first: sft_checkpoint: no GPU" in str(raised.value)


def test_terminating_the_waiting_run_cancels_the_backfill(instance):
    _backfill(instance)

    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wait_for("abc", instance, print, sleep=stop)
    assert instance.get_backfill("abc").status is BulkActionStatus.CANCELING


def test_waiting_says_that_no_daemon_starts_runs(instance):
    _backfill(instance)
    lines, slept = [], []

    def sleep(seconds):
        slept.append(seconds)
        if sum(slept) > 61:
            _ending(instance, BulkActionStatus.COMPLETED_SUCCESS)(seconds)

    wait_for("abc", instance, lines.append, sleep=sleep)
    assert len(lines) == 1 and "daemon" in lines[0]


ALL = [f"experiment_{number}" for number in range(FEW_PARTITIONS + 1)]
TAGS = {"dagster/backfill": "abc"}


def test_backfill_over_a_whole_set_is_refused_and_cancelled(instance):
    _backfill(instance, ALL)
    with pytest.raises(ExpectedFailure, match=r"all 5 partitions.*bring_experiment"):
        refuse_whole_set(instance, TAGS, "experiment", ALL)
    assert instance.get_backfill("abc").status is BulkActionStatus.CANCELING


@pytest.mark.parametrize(
    ("targets", "keys", "backfill_tags", "run_tags"),
    [
        (ALL[1:], ALL, {}, {}),
        (ALL[:FEW_PARTITIONS], ALL[:FEW_PARTITIONS], {}, {}),
        (ALL, ALL, {}, {"etpi/every_partition": "true"}),
        (ALL, ALL, {"etpi/experiment": "experiment_0"}, {}),
    ],
    ids=["chosen partitions", "a small set", "allowed by a tag", "of bring_experiment"],
)
def test_other_backfills_run(instance, targets, keys, backfill_tags, run_tags):
    _backfill(instance, targets, **backfill_tags)
    refuse_whole_set(instance, TAGS | run_tags, "experiment", keys)
    assert instance.get_backfill("abc").status is BulkActionStatus.REQUESTED


def test_run_of_a_backfill_over_every_suite_fails_in_its_first_step(world, instance):
    definitions = world.definitions()
    suites = definitions.resolve_job_def("prepare_suite").partitions_def.get_partition_keys()
    assert len(suites) > FEW_PARTITIONS
    _backfill(instance, suites)
    job = definitions.resolve_job_def("prepare_suite")
    result = job.execute_in_process(instance=instance, partition_key="small", tags=TAGS, raise_on_error=False)
    assert "partitions of the set suite, and was cancelled" in failures(result)[0]
    assert world.made == []


def test_targets_of_an_asset_backfill_are_read(world, instance):
    specs, lake = world.resources().specs, world.lake
    graph = world.definitions().resolve_asset_graph()
    backfill = chain_backfill("first", plan("first", specs, lake), graph, instance)
    instance.add_backfill(backfill._replace(tags={}))
    tags = {"dagster/backfill": backfill.backfill_id}
    chosen = ["first", "few", "small"]
    refuse_whole_set(instance, tags, "experiment", [*chosen, "second", "third"])
    with pytest.raises(ExpectedFailure):
        refuse_whole_set(instance, tags, "experiment", [*chosen, "first", "first"])


def test_run_in_a_commands_own_process_is_in_the_timeline_while_it_runs(instance, tmp_path, world):
    seen = []

    @dg.op(required_resource_keys={"etpi"})
    def look(context):
        seen.append(context.instance.get_run_by_id(context.run_id))

    @dg.job(resource_defs={"etpi": resource_of(Resources(lake=world.lake, specs_folder=world.specs_folder))})
    def job():
        look()

    result = job.execute_in_process(instance=instance)
    for run in (seen[0], instance.get_run_by_id(result.run_id)):
        assert run.remote_job_origin.location_name == "etpi"
        assert run.remote_job_origin.job_name == "job"
        assert run.tags["dagster/code_location"] == "etpi"
    label = {".dagster/repository": "__repository__@etpi"}
    assert [run.run_id for run in instance.get_runs(dg.RunsFilter(tags=label))] == [result.run_id]
    assert instance.get_run_by_id(result.run_id).is_success
