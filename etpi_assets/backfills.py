"""Dagster backfills: the one that brings an experiment up to date, waiting for it, and refusing one over everything."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from uuid import uuid4

import dagster as dg

from etpi_assets.dagster_private import (
    BACKFILL_ENDED,
    AssetGraph,
    BulkActionStatus,
    ExpectedFailure,
    PartitionBackfill,
    PartitionRangeSelector,
    PartitionsByAssetSelector,
    PartitionsSelector,
)
from etpi_assets.graph import JOBS
from etpi_assets.partitions import PARTITION_TAG
from etpi_assets.planner import Step, open_steps

BACKFILL_TAG = "dagster/backfill"
CHAIN_TAG = "etpi/experiment"
"""Tag of a backfill that `bring_experiment` submitted: the experiment."""
WHOLE_SET_TAG = "etpi/every_partition"
"""Run tag that allows a backfill over every partition of a set: "true"."""
FEW_PARTITIONS = 4
"""A set of at most so many partitions may be backfilled as a whole."""
_POLL_SECONDS, _QUIET_SECONDS = 2.0, 60.0


def chain_backfill(
    experiment: str, steps: Sequence[Step], asset_graph: AssetGraph, instance: dg.DagsterInstance
) -> PartitionBackfill:
    """Build one backfill of exactly the partitions that are not ok, followed by the tables across experiments.

    Dagster's web page can only backfill assets with different partitions over all partitions of each; see
    `dagster_private` for the classes used here.
    """
    keys: dict[str, list[str]] = {asset: [] for asset in JOBS["publish_catalog"][1]}
    for step in open_steps(steps):
        keys.setdefault(step.asset, []).append(step.key)
    selectors = [
        PartitionsByAssetSelector(
            asset_key=dg.AssetKey(asset),
            partitions=PartitionsSelector([PartitionRangeSelector(key, key) for key in names]) if names else None,
        )
        for asset, names in keys.items()
    ]
    return PartitionBackfill.from_partitions_by_assets(
        backfill_id=uuid4().hex[:8],
        asset_graph=asset_graph,
        backfill_timestamp=time.time(),
        tags={CHAIN_TAG: experiment},
        dynamic_partitions_store=instance,
        partitions_by_assets=selectors,
        title=f"bring {experiment}",
        description=None,
        run_config=None,
    )


def page_of(backfill_id: str) -> dg.UrlMetadataValue:
    """Return the address of a backfill's page, on the server of the page that shows it."""
    return dg.MetadataValue.url(f"/runs/b/{backfill_id}")


def wait_for(
    backfill_id: str,
    instance: dg.DagsterInstance,
    log: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when a backfill has succeeded. If this process is stopped meanwhile, the backfill is cancelled.

    Raises:
        ExpectedFailure: the backfill failed or was cancelled; the message names the failed runs and their errors.
    """
    waited = 0.0
    try:
        while (backfill := _get(instance, backfill_id)).status not in BACKFILL_ENDED:
            sleep(_POLL_SECONDS)
            waited += _POLL_SECONDS
            if waited % _QUIET_SECONDS < _POLL_SECONDS:
                log(_progress(backfill_id, instance))
    except BaseException:
        cancel(backfill_id, instance)
        raise
    if backfill.status is not BulkActionStatus.COMPLETED_SUCCESS:
        reasons = "\n".join(_failures(backfill_id, instance)) or "no run of it failed; its page says more"
        raise ExpectedFailure(
            f"backfill {backfill_id} (/runs/b/{backfill_id}) ended as {backfill.status.value}:\n{reasons}"
        )


def cancel(backfill_id: str, instance: dg.DagsterInstance) -> None:
    """Have the daemon end a backfill and its runs, unless it has ended."""
    backfill = instance.get_backfill(backfill_id)
    if backfill and backfill.status not in BACKFILL_ENDED:
        instance.update_backfill(backfill.with_status(BulkActionStatus.CANCELING))


def refuse_whole_set(instance: dg.DagsterInstance, tags: Mapping[str, str], set_name: str, keys: Sequence[str]) -> None:
    """Fail a run whose backfill covers every partition of a set, unless a tag allows it, and cancel the backfill.

    "Materialize all" means every experiment that the page shows, full-size ones included.

    Args:
        tags: the tags of the run.
        keys: the partitions of the set.
    """
    backfill_id = tags.get(BACKFILL_TAG)
    if backfill_id is None or len(keys) <= FEW_PARTITIONS or tags.get(WHOLE_SET_TAG, "").lower() == "true":
        return
    backfill = instance.get_backfill(backfill_id)
    if backfill is None or CHAIN_TAG in backfill.tags or not set(keys) <= _targets(backfill):
        return
    cancel(backfill_id, instance)
    raise ExpectedFailure(
        f"this backfill covers all {len(keys)} partitions of the set {set_name.replace('_', ' ')}, and was cancelled. "
        "Select partitions in the launch dialog, or start the job bring_experiment, which computes what one experiment "
        f'is missing. If all are meant, give the backfill the tag {WHOLE_SET_TAG}: "true".'
    )


def _targets(backfill: PartitionBackfill) -> set[str]:
    """Return every partition that a backfill targets, of all its assets."""
    if backfill.asset_backfill_data is None:
        return set(backfill.partition_names or ())
    subsets = backfill.asset_backfill_data.target_subset.partitions_subsets_by_asset_key
    return {key for subset in subsets.values() for key in subset.get_partition_keys()}


def _get(instance: dg.DagsterInstance, backfill_id: str) -> PartitionBackfill:
    backfill = instance.get_backfill(backfill_id)
    if backfill is None:
        raise ExpectedFailure(f"backfill {backfill_id} was deleted; start bring_experiment again")
    return backfill


def _runs(backfill_id: str, instance: dg.DagsterInstance) -> Sequence[dg.DagsterRun]:
    return instance.get_runs(dg.RunsFilter(tags={BACKFILL_TAG: backfill_id}))


def _progress(backfill_id: str, instance: dg.DagsterInstance) -> str:
    runs = _runs(backfill_id, instance)
    if not runs:
        return f"backfill {backfill_id}: no run has started. It needs Dagster's daemon, which `etpi ui` runs"
    done = sum(run.is_success for run in runs)
    return f"backfill {backfill_id}: {done} of {len(runs)} runs so far have succeeded"


def _failures(backfill_id: str, instance: dg.DagsterInstance) -> list[str]:
    """Return a line for each failed step of a backfill's runs."""
    lines = []
    for run in _runs(backfill_id, instance):
        if run.is_failure_or_canceled:
            logs = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
            errors = [event.step_failure_data.error for log in logs if (event := log.get_dagster_event())]
            reason = "; ".join(" ".join(error.message.split()) for error in errors if error) or run.status.value
            lines.append(f"  run {run.run_id[:8]} of {run.tags.get(PARTITION_TAG, 'all')}: {reason}")
    return lines
