"""Lazy frames over the files of current versions: the files of a table, and the types of its columns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from etpi.api.names import UnknownName
from etpi_assets.graph import GRAPH, Node
from etpi_resources.frames import to_frame
from etpi_resources.lake.lake import Lake, LakeError, Ref
from etpi_resources.lake.parquet import storage_schema
from etpi_resources.lake.schemas import TABLES

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
        origins = {ORIGINS.get(node.name) for node in self.nodes}
        return {"set", "eval"} <= origins

    @property
    def schema(self) -> pl.Schema:
        """Return the columns of a scan: the stored ones, the partition keys, then origin and made_for."""
        added = [*self.sets, *(("origin", "made_for") if self.of_rollouts else ())]
        return pl.Schema({**stored_schema(self.name), **dict.fromkeys(added, pl.String())})

    def scan(self, lake: Lake, nodes: Iterable[Node], keys: Collection[str] | None) -> pl.LazyFrame:
        """Return the rows of the current versions of those assets, with the columns of `schema`.

        Args:
            keys: the partitions to read; None for all.

        Raises:
            DamagedFile: a file is missing or does not have its recorded sha256.
        """
        frames = []
        for node in nodes:
            files = self._files(lake, node, keys)
            if files:
                frames.append(self._columns(node, self._read(node, files)))
        return pl.concat(frames) if frames else pl.LazyFrame(schema=self.schema)

    def _files(self, lake: Lake, node: Node, keys: Collection[str] | None) -> dict[str, list[Path]]:
        files = {}
        for key in lake.keys(node.name, node.set):
            manifest = lake.current(Ref(node.name, node.set, key)) if keys is None or key in keys else None
            if manifest is not None and self.name in manifest.tables:
                files[key] = lake.verified_files(manifest, self.name)
        return files

    def _read(self, node: Node, files: dict[str, list[Path]]) -> pl.LazyFrame:
        """Return the files' rows with the partition key; a filter on the key then skips files without opening them."""
        stored = stored_schema(self.name)
        if "version" not in stored and node.set != "all":
            paths = [path for of_key in files.values() for path in of_key]
            partitions = pl.Schema({node.set: pl.String(), "version": pl.String()})
            return _scan(paths, stored, partitions).drop("version")
        # The version in the path would replace the table's column of that name.
        parts = [_scan(paths, stored).with_columns(pl.lit(key).alias(node.set)) for key, paths in files.items()]
        return pl.concat(parts)

    def _columns(self, node: Node, frame: pl.LazyFrame) -> pl.LazyFrame:
        """Select the columns of `schema`; a partition key of another set is null."""
        present = {*stored_schema(self.name), node.set}
        columns = [
            pl.col(name) if name in present else pl.lit(None, kind).alias(name)
            for name, kind in self.schema.items()
            if name not in ("origin", "made_for")
        ]
        if self.of_rollouts:
            columns = [column for column in columns if column.meta.output_name() != "origin"]
            columns += [pl.lit(ORIGINS[node.name]).alias("origin"), pl.col(node.set).alias("made_for")]
        return frame.select(columns).select(self.schema.names())


def stored_schema(table: str) -> pl.Schema:
    """Return the stored columns of a table with polars' types: lists of int32 for ids, UTC microseconds for times."""
    return to_frame(storage_schema(table).empty_table()).schema


def _scan(paths: Sequence[Path], schema: pl.Schema, partitions: pl.Schema | None = None) -> pl.LazyFrame:
    """Scan files; a column that an older file lacks is null."""
    return pl.scan_parquet(
        list(paths), schema=schema, glob=False, missing_columns="insert",
        hive_partitioning=partitions is not None, hive_schema=partitions,
    )  # fmt: skip


def refuse_root(root: Path) -> None:
    """Raise LakeError if a folder of the lake's path would be read as a partition."""
    if odd := [part for part in root.parts if "=" in part]:
        raise LakeError(f"the lake is under {odd[0]!r}, which polars would read as a column; move {root}")
