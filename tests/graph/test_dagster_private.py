"""The private Dagster names in `dagster_private` have the form that etpi relies on."""

from __future__ import annotations

import inspect
import logging
import re
from pathlib import Path

import dagster as dg

from etpi_assets import dagster_private
from etpi_assets.dagster_private import (
    LOG_RECORD_METADATA_ATTR,
    ExpectedFailure,
    PartitionBackfill,
    PartitionRangeSelector,
    PartitionsByAssetSelector,
    PartitionsSelector,
)

ROOT = Path(__file__).parents[2]


def test_backfill_takes_the_parameters_that_etpi_passes() -> None:
    parameters = {
        "backfill_id", "asset_graph", "backfill_timestamp", "tags", "dynamic_partitions_store", "partitions_by_assets",
        "title", "description", "run_config",
    }  # fmt: skip
    signature = inspect.signature(PartitionBackfill.from_partitions_by_assets).parameters
    assert parameters <= signature.keys()
    assert {name for name, p in signature.items() if p.default is p.empty} <= parameters


def test_selector_keeps_the_partitions_of_each_asset() -> None:
    ranges = [PartitionRangeSelector("a", "a")]
    selector = PartitionsByAssetSelector(asset_key=dg.AssetKey("tasks"), partitions=PartitionsSelector(ranges))
    assert selector.partitions is not None
    assert [(r.start, r.end) for r in selector.partitions.ranges] == [("a", "a")]


def test_log_record_carries_message_and_event_where_the_console_reads_them() -> None:
    records: list[logging.LogRecord] = []

    @dg.logger
    def recorder(_) -> logging.Logger:
        logger = logging.Logger("recorder", "DEBUG")
        handler = logging.Handler()
        handler.emit = records.append
        logger.addHandler(handler)
        return logger

    @dg.op
    def speak(context) -> None:
        context.log.info("a line")

    @dg.job(logger_defs={"recorder": recorder})
    def job() -> None:
        speak()

    job.execute_in_process(run_config={"loggers": {"recorder": {}}})
    metas = [getattr(record, LOG_RECORD_METADATA_ATTR) for record in records]
    assert "a line" in [meta["orig_message"] for meta in metas]
    assert any(meta["dagster_event"] is not None for meta in metas)


def test_private_dagster_names_are_imported_in_only_one_module() -> None:
    private = re.compile(r"^\s*(?:from|import) dagster(?:_\w+)?\._", re.MULTILINE)
    files = [
        path for top in ("etpi", "etpi_assets", "etpi_cluster", "etpi_resources") for path in (ROOT / top).rglob("*.py")
    ]
    assert {path.name for path in files if private.search(path.read_text())} == {Path(dagster_private.__file__).name}


def test_expected_failure_keeps_its_message_and_shows_no_stack() -> None:
    @dg.op(retry_policy=dg.RetryPolicy(max_retries=2))
    def fail() -> None:
        raise ExpectedFailure("no data; run X")

    @dg.job
    def job() -> None:
        fail()

    result = job.execute_in_process(raise_on_error=False)
    (failure,) = [event.step_failure_data for event in result.all_events if event.is_step_failure]
    assert failure.error is not None and failure.user_failure_data is not None
    assert failure.error.to_string().strip() == failure.user_failure_data.description == "no data; run X"
    assert failure.error.stack == []
    assert not [event for event in result.all_events if event.is_step_up_for_retry]
