"""Dagster's private names that etpi uses because no public name does the same; no other module imports `dagster._core`.

- `chain_backfill` (`jobs`) submits one backfill with different partitions for each asset. GraphQL offers this as
  `partitionsByAssets`; Python offers it only through these classes.
- A console line (`runs.console`) needs the message and event that Dagster attaches to a log record.
- A failure that a person can act on (`ExpectedFailure`) needs a message without a stack trace. Dagster shows the stack
  of every exception but one that came from another process.

The Dagster version is pinned; `tests/graph/test_dagster_private.py` fails when an upgrade changes one of these names.
"""

import dagster as dg
from dagster._core.definitions.assets.graph.asset_graph import AssetGraph
from dagster._core.definitions.selector import PartitionRangeSelector, PartitionsByAssetSelector, PartitionsSelector
from dagster._core.errors import DagsterUserCodeProcessError
from dagster._core.execution.backfill import PartitionBackfill
from dagster._core.log_manager import LOG_RECORD_METADATA_ATTR
from dagster_shared.error import SerializableErrorInfo

__all__ = [
    "LOG_RECORD_METADATA_ATTR",
    "AssetGraph",
    "ExpectedFailure",
    "PartitionBackfill",
    "PartitionRangeSelector",
    "PartitionsByAssetSelector",
    "PartitionsSelector",
]


class ExpectedFailure(DagsterUserCodeProcessError, dg.Failure):
    """A failed step whose message says what is wrong and what to do. It is not retried, and shows no stack trace."""

    def __init__(self, message: str) -> None:
        shown = SerializableErrorInfo(message, stack=[], cls_name=None)
        super().__init__(message, user_code_process_error_infos=[shown])  # passes the message on to Failure
        self.allow_retries = False
