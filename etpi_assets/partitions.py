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
