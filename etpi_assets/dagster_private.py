"""Dagster's private names that etpi uses because no public name does the same; no other core module imports them.

- `chain_backfill` (`backfills`) submits one backfill with different partitions for each asset. GraphQL offers this as
  `partitionsByAssets`; Python offers it only through these classes.
- A console line (`runs.console`) needs the message and event that Dagster attaches to a log record.
- A failure that a person can act on (`ExpectedFailure`) needs a message without a stack trace. Dagster shows the stack
  of every exception but one that came from another process.
- Dagster's timeline shows only runs that name their code location (`place_in_timeline`). Runs that a command executes
  in its own process (`etpi run`, `dg launch`) name none.

The Dagster version is pinned; `tests/graph/test_dagster_private.py` fails when an upgrade changes one of these names.
"""

import dagster as dg
from dagster._core.definitions.assets.graph.asset_graph import AssetGraph
from dagster._core.definitions.selector import PartitionRangeSelector, PartitionsByAssetSelector, PartitionsSelector
from dagster._core.errors import DagsterUserCodeProcessError
from dagster._core.execution.backfill import BULK_ACTION_TERMINAL_STATUSES, BulkActionStatus, PartitionBackfill
from dagster._core.log_manager import LOG_RECORD_METADATA_ATTR
from dagster._core.remote_origin import ManagedGrpcPythonEnvCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin
from dagster._core.storage.tags import REPOSITORY_LABEL_TAG
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster_shared.error import SerializableErrorInfo

__all__ = [
    "BACKFILL_ENDED",
    "LOG_RECORD_METADATA_ATTR",
    "AssetGraph",
    "BulkActionStatus",
    "ExpectedFailure",
    "PartitionBackfill",
    "PartitionRangeSelector",
    "PartitionsByAssetSelector",
    "PartitionsSelector",
    "place_in_timeline",
]

BACKFILL_ENDED = frozenset(BULK_ACTION_TERMINAL_STATUSES)
LOCATION, MODULE, REPOSITORY = "etpi", "etpi_assets.definitions", "__repository__"
"""The code location as `etpi/workspace.yaml` names it, its module, and the name of the only repository of a module."""
CODE_LOCATION_TAG = "dagster/code_location"


class ExpectedFailure(DagsterUserCodeProcessError, dg.Failure):
    """A failed step whose message says what is wrong and what to do. It is not retried, and shows no stack trace."""

    def __init__(self, message: str) -> None:
        shown = SerializableErrorInfo(message, stack=[], cls_name=None)
        super().__init__(message, user_code_process_error_infos=[shown])  # passes the message on to Failure
        self.allow_retries = False


def place_in_timeline(instance: dg.DagsterInstance, run: dg.DagsterRun) -> None:
    """Record that a run belongs to etpi's code location, unless it names one already.

    Without it the run is missing from the page's timeline and from the history of its job, and sensors do not see it.
    """
    if run.remote_job_origin is not None:
        return
    location = ManagedGrpcPythonEnvCodeLocationOrigin(LoadableTargetOrigin(module_name=MODULE), location_name=LOCATION)
    repository = RemoteRepositoryOrigin(location, REPOSITORY)
    instance.add_run_tags(run.run_id, {CODE_LOCATION_TAG: LOCATION, REPOSITORY_LABEL_TAG: repository.get_label()})
    if stored := instance.get_run_by_id(run.run_id):
        instance.run_storage.replace_job_origin(stored, RemoteJobOrigin(repository, run.job_name))
