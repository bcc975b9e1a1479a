"""Dagster's private names that etpi uses because no public name does the same; no other module imports `dagster._core`.

- `chain_backfill` (`jobs`) submits one backfill with different partitions for each asset. GraphQL offers this as
  `partitionsByAssets`; Python offers it only through these classes.
- A console line (`runs.console`) needs the message and event that Dagster attaches to a log record.

The Dagster version is pinned; `tests/graph/test_dagster_private.py` fails when an upgrade changes one of these names.
"""

from dagster._core.definitions.assets.graph.asset_graph import AssetGraph
from dagster._core.definitions.selector import PartitionRangeSelector, PartitionsByAssetSelector, PartitionsSelector
from dagster._core.execution.backfill import PartitionBackfill
from dagster._core.log_manager import LOG_RECORD_METADATA_ATTR

__all__ = [
    "LOG_RECORD_METADATA_ATTR",
    "AssetGraph",
    "PartitionBackfill",
    "PartitionRangeSelector",
    "PartitionsByAssetSelector",
    "PartitionsSelector",
]
