"""Build the rows and sequences of a data set a block of pairs at a time, with the figures that its checks need."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.curation import gates, integrity, lengths, merge, upweight
from etpi_assets.curation.dataset_plan import Block
from etpi_resources.lake.parquet import RowRanges
from etpi_resources.lake.stored import Stored

COLUMNS = [*upweight.COLUMNS, "input_tokens", "format_tokens"]
"""The columns of pairs that a data set is built from."""


@dataclass(frozen=True)
class DatasetFactory:
    """Inputs from which a worker process builds the blocks of a data set.

    Attributes:
        validate: the units to validate on, of `DatasetPlan`.
        max_tokens: the longest sequence.
    """

    pairs: Stored
    rule: upweight.RowRule
    validate: frozenset[str | None]
    max_tokens: int

    def __call__(self) -> Callable[[Block], dict[str, pa.Table]]:
        """Return the function that builds a block; it reads the block's pairs itself."""
        ranges = RowRanges(self.pairs.name, self.pairs.paths, COLUMNS)
        return lambda block: self.build(ranges.read(block.start, block.stop), block.start)

    def build(self, pairs: pa.Table, first: int) -> dict[str, pa.Table]:
        """Return {"dataset_rows", "sequences", "dropped", "figures"} of a block's pairs, the first of which has the
        number `first` among all."""
        section = self.rule.section
        weighed = upweight.weigh_pairs(pairs, self.rule)
        rows = upweight.with_split(weighed["dataset_rows"], section, self.validate)
        rows, sequences = merge.merge(rows, pairs, self.max_tokens, merged=section.merge)
        tables = {"dataset_rows": rows, "sequences": sequences, "dropped": weighed["dropped"]}
        figures = _figures(pairs, first, **tables)
        return {**tables, "figures": pa.table({"json": [json.dumps(figures)]})}


def _figures(
    pairs: pa.Table, first: int, dataset_rows: pa.Table, sequences: pa.Table, dropped: pa.Table
) -> dict[str, Any]:
    """Return the figures of the checks by name, and:

    first_turns: the numbers of the pairs of turn 0 that are trained on; used: the rollouts that are not lost, because
    they have rows or are held out.
    """
    rows = dataset_rows
    heldout = dropped.filter(pc.field("reason").isin(gates.HELD_OUT))
    opening = rows.filter((pc.field("split") == "train") & (pc.field("turn") == 0))["pair_id"]
    at = pc.index_in(opening, value_set=pairs["pair_id"])  # pyright: ignore[reportAttributeAccessIssue]
    return {
        "reconcile": integrity.reconcile_figures(pairs, rows, dropped),
        "labels": integrity.label_figures(rows, pairs, sequences),
        "heldout": integrity.heldout_figures(rows),
        "loss": upweight.loss_by_turn(rows),
        "exposure": gates.exposure_figures(rows, pairs),
        "roles": gates.role_figures(rows, pairs),
        "lost": gates.lost_figures(dropped),
        "lengths": lengths.length_figures(rows, pairs, sequences),
        "splits": _counted(rows["split"]),
        "sequence_tokens": len(pc.list_flatten(sequences["input_ids"])),  # pyright: ignore[reportAttributeAccessIssue]
        "first_turns": [first + number for number in at.to_pylist()],
        "used": pa.concat_tables([rows.select(["rollout_id"]), heldout.select(["rollout_id"])])["rollout_id"]
        .unique()
        .to_pylist(),
    }


def _counted(column: pa.ChunkedArray) -> Mapping[str, int]:
    return {row["values"]: row["counts"] for row in column.value_counts().to_pylist()}
