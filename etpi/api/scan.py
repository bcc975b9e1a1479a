"""Lazy frames over the files of current versions: the files of a table, and the types of its columns."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import polars as pl

from etpi_assets.graph import GRAPH, Node
from etpi_assets.specs.plugins import near
from etpi_resources.frames import to_frame
from etpi_resources.lake.lake import Lake, Ref
from etpi_resources.lake.manifest import LakeError
from etpi_resources.lake.parquet import storage_schema
from etpi_resources.lake.schemas import TABLES

MOST_LISTED = 30


class UnknownName(LakeError, LookupError):
    """A table, column, partition, report or variable that does not exist; the message names the nearest."""

    @classmethod
    def of(cls, what: str, name: str, known: Collection[str], remedy: str = "") -> UnknownName:
        """Return the error for a name.

        Args:
            what: what kind of name it is, with an article: "a table".
            remedy: a sentence to add.
        """
        listed = ", ".join(sorted(known)[:MOST_LISTED]) + (", ..." if len(known) > MOST_LISTED else "")
        hint = near(str(name), sorted(known))
        return cls(f"{name!r} is not {what}.{hint} There are: {listed or 'none'}.{' ' if remedy else ''}{remedy}")


ORIGINS = {
    "raw_rollouts": "set", "scored_rollouts": "set", "eval_rollouts": "eval", "eval_metrics": "eval",
    "rl_checkpoint": "rl",
}  # fmt: skip
"""Asset -> the origin of its rollouts, as in the view `rollouts`."""

_SETS = ("suite", "rollout_set", "experiment")


@dataclass(frozen=True)
class StoredTable:
    """A table of `schemas`, and the assets that store it.

    Attributes:
        nodes: the assets, in the order of the graph.
    """

    name: str
    nodes: tuple[Node, ...]

    @classmethod
    def of(cls, name: str) -> StoredTable:
        """Return the named table; raises UnknownName."""
        nodes = tuple(node for node in GRAPH.values() if name in node.tables)
        if not nodes:
            views = "Views are read with SQL: lake.sql('FROM full_turns')."
            raise UnknownName.of("a table that assets store", name, TABLES, views)
        return cls(name, nodes)

    @property
    def sets(self) -> tuple[str, ...]:
        """Return the partition sets of its assets, which are the columns of partition keys."""
        return tuple(name for name in _SETS if any(node.set == name for node in self.nodes))

    @property
    def of_rollouts(self) -> bool:
        """Return whether rows belong to rollouts of several origins, and so have the columns origin and made_for."""
        return {"set", "eval"} <= {ORIGINS.get(node.name) for node in self.nodes}

    @property
    def stored(self) -> pl.Schema:
        """Return the stored columns with polars' types: lists of int32 for ids, UTC microseconds for times."""
        return to_frame(storage_schema(self.name).empty_table()).schema

    @property
    def schema(self) -> pl.Schema:
        """Return the columns of a scan: the stored ones, the partition keys, then origin and made_for."""
        added = [*self.sets, *(("origin", "made_for") if self.of_rollouts else ())]
        return pl.Schema({**self.stored, **dict.fromkeys(added, pl.String())})

    def scan(self, lake: Lake, nodes: Iterable[Node], keys: Collection[str] | None) -> pl.LazyFrame:
        """Return the rows of the current versions of those assets, with the columns of `schema`.

        Args:
            keys: the partitions to read; None for all.

        Raises:
            DamagedFile: a file is missing or does not have its recorded sha256.
        """
        frames = [
            self._partition(lake, node, key)
            for node in nodes
            for key in lake.keys(node.name, node.set)
            if keys is None or key in keys
        ]
        return pl.concat([pl.LazyFrame(schema=self.schema), *frames])

    def _partition(self, lake: Lake, node: Node, key: str) -> pl.LazyFrame:
        """Return the rows of a partition; a column that an older file lacks is null."""
        manifest = lake.current(Ref(node.name, node.set, key))
        if manifest is None or self.name not in manifest.tables:
            return pl.LazyFrame(schema=self.schema)
        rows = pl.scan_parquet(
            lake.verified_files(manifest, self.name), schema=self.stored, glob=False, missing_columns="insert",
            hive_partitioning=False,
        )  # fmt: skip
        keys = {name: key if name == node.set else None for name in self.sets if name not in self.stored}
        added = {**keys, node.set: key, "origin": ORIGINS.get(node.name), "made_for": key}
        columns = {name: pl.lit(value, pl.String) for name, value in added.items() if name in self.schema}
        return rows.with_columns(**columns).select(self.schema.names())
