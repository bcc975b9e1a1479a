"""Read the tables of a rollout set a few rollouts at a time, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from etpi_resources.lake.stored import Rows, batches, no_rows

_ROLLOUTS = 32
"""Rollouts per block, about a thousand turns."""


def blocks(tables: Mapping[str, Rows], columns: Mapping[str, Sequence[str]]) -> Iterator[dict[str, pa.Table]]:
    """Yield blocks of whole rollouts: {table: its rows of those rollouts}.

    Args:
        tables: `rollouts`, and others with a `rollout_id`, all in the order of `rollouts`, as rollout sets are stored.
        columns: the columns to read of each table, including `rollout_id`.

    Raises:
        ValueError: a table is in another order, or has rows of a rollout that `rollouts` lacks.
    """
    readers = {name: _Reader(table, columns[name]) for name, table in tables.items() if name != "rollouts"}
    for batch in batches(tables["rollouts"], columns["rollouts"]):
        for start in range(0, batch.num_rows, _ROLLOUTS):
            rollouts = pa.Table.from_batches([batch.slice(start, _ROLLOUTS)])
            rest = {name: reader.take(rollouts["rollout_id"]) for name, reader in readers.items()}
            yield {"rollouts": rollouts} | rest
    for name, reader in readers.items():
        if (left := reader.next_id()) is not None:
            raise ValueError(
                f"table {name}: the rows of rollout {left} are out of order: they must be together and in the order "
                "of `rollouts`. Materialize raw_rollouts of this set again"
            )


class _Reader:
    """Reads one table forwards."""

    def __init__(self, table: Rows, columns: Sequence[str]) -> None:
        self._batches = batches(table, columns)
        self._empty = no_rows(table, columns)
        self._batch: pa.RecordBatch | None = next(self._batches, None)

    def take(self, rollout_ids: pa.ChunkedArray) -> pa.Table:
        """Return the next rows, up to the first one of another rollout."""
        taken = []
        while self._batch is not None:
            outside = pc.invert(pc.is_in(self._batch["rollout_id"], value_set=rollout_ids))  # pyright: ignore[reportAttributeAccessIssue]
            first = pc.index(outside, True).as_py()
            if first >= 0:
                taken.append(self._batch.slice(0, first))
                self._batch = self._batch.slice(first)
                break
            taken.append(self._batch)
            self._batch = next(self._batches, None)
        return pa.Table.from_batches(taken, self._empty.schema)

    def next_id(self) -> str | None:
        """Return the rollout of the next row; None at the end."""
        return None if self._batch is None else self._batch["rollout_id"][0].as_py()
