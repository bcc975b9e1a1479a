"""From stored sequences to the tensors of a forward pass.

Belongs here: reading sequences with their spans as token columns, refusing what a model cannot take, and padding. Does
not belong here: which sequences make a batch (`plan`), or the loss.

Batches carry no attention mask. Padding stands on the right, where no real token of a causal model can see it, and
without a mask the fused causal kernels apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from etpi_resources.trainers.workers.plan import MicroBatch

IGNORED = -100
POSITION_MULTIPLE = 64
COLUMNS = ["sequence_id", "split", "input_ids", "span_starts", "span_ends", "span_weights"]


class BadSequences(ValueError):
    """A sequence that cannot be trained on; the message names it."""


@dataclass(frozen=True)
class Sequences:
    """Token columns of n sequences, one after the other in flat arrays; sequence i is [offsets[i], offsets[i + 1]).

    Attributes:
        names: their ids.
        offsets: (n + 1,) int64.
        ids: (tokens,) int32. labels: the same inside spans, -100 outside. weights: (tokens,) float32, 0 outside spans.
        rows: (n,) float64, the sum of span weights, which is a sequence's weighted rows.
    """

    names: list[str]
    offsets: np.ndarray
    ids: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.names)

    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def totals(self, values: np.ndarray) -> np.ndarray:
        """Sums of a flat array over each sequence; (n,) float64."""
        return np.diff(np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])[self.offsets])

    def table(self) -> pa.Table:
        """Columns input_ids, labels, weights: what the trainer is given as its dataset."""
        lists = {"input_ids": self.ids, "labels": self.labels, "weights": self.weights}
        offsets = pa.array(self.offsets)
        return pa.table({name: pa.LargeListArray.from_arrays(offsets, pa.array(flat)) for name, flat in lists.items()})


def read_sequences(files: Sequence[str | Path], split: str, *, vocabulary: int, longest: int) -> Sequences:
    """One split of the stored sequences as token columns, in stored order.

    Raises:
        BadSequences: a sequence has no span; a span is empty, overlaps another, starts at position 0 (nothing predicts
        it), ends beyond the
            sequence or has a weight that is not finite and positive; a token is not in the model's vocabulary; a
            sequence is longer than the model's positions. Nothing is cut.
    """
    table = pa.concat_tables([pq.read_table(file, columns=COLUMNS) for file in files])
    table = table.filter(pc.field("split") == split).combine_chunks()
    names = table["sequence_id"].to_pylist()
    offsets, ids = _flat(table["input_ids"])
    labels = np.full(len(ids), IGNORED, dtype=np.int32)
    weights = np.zeros(len(ids), dtype=np.float32)
    rows = np.zeros(len(names))
    spans = zip(*(table[name].to_pylist() for name in ("span_starts", "span_ends", "span_weights")), strict=True)
    for i, (name, (starts, ends, span_weights)) in enumerate(zip(names, spans, strict=True)):
        first, length = int(offsets[i]), int(offsets[i + 1] - offsets[i])
        own = ids[first : first + length]
        if length > longest:
            raise BadSequences(
                f"sequence {name} has {length} tokens, the model takes {longest}; lower dataset.max_length, which "
                "reports what it leaves out, instead of having it cut here"
            )
        if length and not 0 <= own.min() <= own.max() < vocabulary:
            raise BadSequences(
                f"sequence {name} holds token {own.max()}, the model's vocabulary has {vocabulary}; the dataset was "
                "made with another tokenizer (base.tokenizer) than the base model's"
            )
        if not starts:
            raise BadSequences(f"sequence {name} has no span: nothing of it can be learnt; rebuild upweighted_dataset")
        end_before = 1
        for start, end, weight in zip(starts, ends, span_weights, strict=True):
            if not end_before <= start < end <= length or not 0 < weight < np.inf:
                raise BadSequences(
                    f"sequence {name} of {length} tokens has a span [{start}, {end}) of weight {weight}; spans start "
                    "at 1 or later, are not empty, do not overlap and weigh more than 0; rebuild upweighted_dataset"
                )
            labels[first + start : first + end] = own[start:end]
            weights[first + start : first + end] = weight
            end_before = end
        rows[i] = sum(span_weights)
    return Sequences(names, offsets, ids, labels, weights, rows)


def _flat(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Offsets (n + 1,) and values of a list column, without leaving Arrow."""
    array = column.combine_chunks()
    lists = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
    offsets = lists.offsets.to_numpy().astype(np.int64)
    return offsets - offsets[0], lists.flatten().to_numpy(zero_copy_only=False).astype(np.int32)


def collate(batch: MicroBatch, sequences: Sequences, pad_id: int) -> dict[str, torch.Tensor]:
    """The tensors of one micro-batch of B sequences padded to L tokens.

    Returns:
        `input_ids` (B, L) int64. `positions` (P,) int64: where a next token is learnt in any of the sequences, filled
        up to a multiple of 64 with positions where none is, so that shapes repeat; the model computes logits there
        alone. `labels` (B, P) int64 and `weights` (B, P) float32: the next token at each position and its weight, -100
        and 0 where it is not learnt. `tokens` () int64: how many of B x L are not padding.
    """
    n, length = len(batch.sequences), batch.length
    ids = np.full((n, length), pad_id, dtype=np.int64)
    labels = np.full((n, length), IGNORED, dtype=np.int64)
    weights = np.zeros((n, length), dtype=np.float32)
    tokens = 0
    for row, index in enumerate(batch.sequences):
        own = slice(sequences.offsets[index], sequences.offsets[index + 1])
        end = own.stop - own.start
        ids[row, :end] = sequences.ids[own]
        labels[row, :end] = sequences.labels[own]
        weights[row, :end] = sequences.weights[own]
        tokens += end
    learnt = (labels[:, 1:] != IGNORED).any(axis=0)
    wanted = min(-(-int(learnt.sum()) // POSITION_MULTIPLE) * POSITION_MULTIPLE, length - 1)
    fillers = np.flatnonzero(~learnt)[: wanted - int(learnt.sum())]
    positions = np.sort(np.concatenate([np.flatnonzero(learnt), fillers]))
    return {
        "input_ids": torch.from_numpy(ids),
        "positions": torch.from_numpy(positions),
        "labels": torch.from_numpy(labels[:, positions + 1]),
        "weights": torch.from_numpy(weights[:, positions + 1]),
        "tokens": torch.tensor(tokens),
    }
