"""Dagster's partition sets (suites, rollout sets, experiments) and partition mappings, built from the specs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click
import dagster as dg

from etpi_assets.graph import Node
from etpi_assets.specs.folders import SpecFolder
from etpi_assets.specs.load import Specs, unknown_name

PARTITION_TAG = "dagster/partition"
BACKFILL_TAG = "dagster/backfill"
WHOLE_SET_TAG = "etpi/every_partition"
"""Run tag that allows a backfill over every partition of a set: "true"."""
FEW_PARTITIONS = 4
"""Maximum partitions of a set that may be backfilled as a whole."""


class UnknownPartition(dg.DagsterUnknownPartitionError, click.ClickException):
    """No spec has this name. It is also a click error, so that `dg launch` prints the message without a traceback."""

    def __init__(self, message: str) -> None:
        dg.DagsterUnknownPartitionError.__init__(self, message)
        click.ClickException.__init__(self, message)


class SpecPartitions(dg.StaticPartitionsDefinition):
    """One partition for each spec file. The error for an unknown name offers names that resemble it."""

    def __init__(self, set_name: str, partition_keys: Sequence[str], folders: Sequence[SpecFolder] = ()) -> None:
        super().__init__(list(partition_keys))
        self.set_name, self.folders = set_name, folders

    def validate_partition_key(self, partition_key: str, *args: Any, **kwargs: Any) -> None:
        if partition_key not in (valid := self.get_partition_keys()):
            raise UnknownPartition(unknown_name(self.set_name, partition_key, valid, self.folders))


def partition_sets(specs: Specs) -> Mapping[str, SpecPartitions]:
    """Return the three partition sets, by name."""
    return {
        name: SpecPartitions(name, specs.keys(name), specs.folders) for name in ("suite", "rollout_set", "experiment")
    }


def mapping(node: Node, upstream: Node, specs: Specs) -> dg.PartitionMapping | None:
    """Map the partitions of `node` to the upstream partitions that they read.

    None where Dagster's default is right: the same set, or an asset without partitions, which reads all. An invalid
    spec maps to nothing.
    """
    if "all" in (node.set, upstream.set) or node.set == upstream.set:
        return None
    known = specs.keys(upstream.set)
    readers: dict[str, list[str]] = {}
    for key in specs.keys(node.set):
        for name in specs.upstream_keys(node.set, key, upstream.set):
            if name in known:
                readers.setdefault(name, []).append(key)
    return dg.StaticPartitionMapping(readers)


def refuse_whole_set(instance: dg.DagsterInstance, tags: Mapping[str, str], set_name: str, keys: Sequence[str]) -> None:
    """Fail a run whose backfill covers every partition of a set that the page shows, unless a tag allows it.

    "Materialize all" means every experiment, full-size ones included.

    Args:
        tags: the tags of the run.
        keys: the partitions of the set.
    """
    backfill = instance.get_backfill(tags[BACKFILL_TAG]) if BACKFILL_TAG in tags else None
    if backfill is None or len(keys) <= FEW_PARTITIONS or tags.get(WHOLE_SET_TAG, "").lower() == "true":
        return
    if data := backfill.asset_backfill_data:
        subsets = data.target_subset.partitions_subsets_by_asset_key.values()
        targets = {key for subset in subsets for key in subset.get_partition_keys()}
    else:
        targets = set(backfill.partition_names or ())
    if set(keys) <= targets:
        raise dg.Failure(
            f"this backfill covers all {len(keys)} partitions of the set {set_name.replace('_', ' ')}. Cancel it, and "
            "select partitions in the launch dialog, or start the job run_experiment, which computes what one "
            f'experiment is missing. If all are meant, give the backfill the tag {WHOLE_SET_TAG}: "true".',
            allow_retries=False,
        )
