"""Read stored sequences as token columns, refuse those that a model cannot train on, and make tensors of batches.

Batches carry no attention mask: padding is on the right, where no real token of a causal model attends to it, and
without a mask the fused causal kernels apply. A packed row carries the layout of its trees instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from etpi_resources.labels import IGNORE_INDEX
from etpi_resources.prefix_tree import PrefixTree
from etpi_resources.trainers.workers.plan import MicroBatch
from etpi_resources.trainers.workers.tree_attention import RowLayout

POSITION_MULTIPLE = 64
PACKED_MULTIPLE = 256
"""The label positions of a packed row are filled up to a multiple of this, so that rows have few shapes."""

COLUMNS = [
    "sequence_id", "split", "input_ids", "node_starts", "node_parents", "node_positions", "span_starts", "span_ends",
    "span_weights",
]  # fmt: skip


class BadSequences(ValueError):
    """A sequence cannot be trained on; the message names it."""


@dataclass(frozen=True)
class Sequences:
    """Token columns of n sequences, one after the other in flat arrays; sequence i is [offsets[i], offsets[i + 1]).

    Attributes:
        names: their ids.
        offsets: (n + 1,) int64.
        ids: (tokens,) int32. labels: the same inside spans, -100 outside. weights: (tokens,) float32, 0 outside spans.
        rows: (n,) float64, the sum of span weights, which is a sequence's weighted rows.
        trees: the tree of each; a single node where nothing forks.
        begins: (spans,) int64, where in the flat arrays each span begins.
        repeated: (n,) int64, tokens that an earlier sequence has too; 0 except after `branches`.
    """

    names: list[str]
    offsets: np.ndarray
    ids: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    rows: np.ndarray
    trees: list[PrefixTree]
    begins: np.ndarray
    repeated: np.ndarray

    def __len__(self) -> int:
        return len(self.names)

    @property
    def fork(self) -> bool:
        return any(tree.has_branches for tree in self.trees)

    def branches(self) -> Sequences:
        """Return each branch as a separate sequence, for models that cannot be trained on trees.

        The prefix that a branch shares with an earlier one is repeated without labels.
        """
        names, pieces, repeated = [], [], []
        for i, tree in enumerate(self.trees):
            for indices, shared in tree.branches():
                names.append(self.names[i])
                pieces.append(self.offsets[i] + indices)
                repeated.append(shared)
        flat = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
        lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        shared_prefix = np.arange(len(flat)) - np.repeat(offsets[:-1], lengths) < np.repeat(repeated, lengths)
        weights = np.where(shared_prefix, 0, self.weights[flat]).astype(np.float32)
        labels = np.where(shared_prefix, IGNORE_INDEX, self.labels[flat]).astype(np.int32)
        # A span never extends over the end of a shared prefix.
        begin = np.zeros(len(self.ids), dtype=bool)
        begin[self.begins] = True
        begins = np.flatnonzero(begin[flat] & ~shared_prefix)
        ends = np.searchsorted(begins, offsets)
        rows = np.diff(np.concatenate([[0.0], np.cumsum(weights[begins], dtype=np.float64)])[ends])
        trees = [PrefixTree.chain(int(n)) for n in lengths]
        return Sequences(
            names, offsets, self.ids[flat], labels, weights, rows, trees, begins, np.array(repeated, dtype=np.int64)
        )

    def longest_first(self) -> Sequences:
        """Return the same sequences with the longest branches first.

        A conversation's history is then one range without gaps. FlexAttention computes fewer blocks of it, and applies
        the mask in fewer (counted in `bench/README.md`).
        """
        trees, pieces = zip(*(tree.longest_first() for tree in self.trees), strict=True)
        flat = np.concatenate([offset + piece for offset, piece in zip(self.offsets, pieces, strict=False)])
        begin = np.zeros(len(self.ids), dtype=bool)
        begin[self.begins] = True
        return replace(
            self,
            trees=list(trees),
            ids=self.ids[flat],
            labels=self.labels[flat],
            weights=self.weights[flat],
            begins=np.flatnonzero(begin[flat]),
        )

    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def totals(self, values: np.ndarray) -> np.ndarray:
        """Sums of a flat array over each sequence; (n,) float64."""
        return np.diff(np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])[self.offsets])

    def table(self) -> pa.Table:
        """Return the trainer's dataset: columns input_ids, labels, weights."""
        lists = {"input_ids": self.ids, "labels": self.labels, "weights": self.weights}
        offsets = pa.array(self.offsets)
        return pa.table({name: pa.LargeListArray.from_arrays(offsets, pa.array(flat)) for name, flat in lists.items()})


def read_sequences(files: Sequence[str | Path], split: str, *, vocabulary: int, longest: int) -> Sequences:
    """Read one split of the stored sequences as token columns, in stored order. Nothing is cut.

    Args:
        vocabulary, longest: the model's vocabulary size and its number of positions.

    Raises:
        BadSequences: a sequence's nodes are no tree; it has no span; a span is empty, overlaps another, starts at index
            0 (nothing predicts it), ends beyond the sequence or has a weight that is not finite and positive; a token
            is not in the vocabulary; a branch is longer than `longest`.
    """
    table = pa.concat_tables([pq.read_table(file, columns=COLUMNS, page_checksum_verification=True) for file in files])
    table = table.filter(pc.field("split") == split).combine_chunks()
    names = table["sequence_id"].to_pylist()
    offsets, ids = _flat(table["input_ids"])
    labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int32)
    weights = np.zeros(len(ids), dtype=np.float32)
    rows = np.zeros(len(names))
    trees, begins = [], []
    node_lists = zip(*(table[f"node_{name}"].to_pylist() for name in ("starts", "parents", "positions")), strict=True)
    spans = zip(*(table[name].to_pylist() for name in ("span_starts", "span_ends", "span_weights")), strict=True)
    for i, (name, nodes, (starts, ends, span_weights)) in enumerate(zip(names, node_lists, spans, strict=True)):
        first, length = int(offsets[i]), int(offsets[i + 1] - offsets[i])
        tokens = ids[first : first + length]
        tree = PrefixTree(*(np.asarray(column or (), dtype=np.int64) for column in nodes), length=length)
        if fault := tree.find_error():
            raise BadSequences(f"sequence {name} is no prefix tree: {fault}; rebuild upweighted_dataset")
        deepest = int((tree.positions + tree.ends - tree.starts).max())
        if deepest > longest:
            raise BadSequences(
                f"sequence {name} has {deepest} tokens, the model has {longest} positions; lower dataset.max_length, "
                "which reports the sequences that it drops"
            )
        if length and not 0 <= tokens.min() <= tokens.max() < vocabulary:
            raise BadSequences(
                f"sequence {name} has token {tokens.max()}, the model's vocabulary has {vocabulary}; the dataset was "
                "made with another tokenizer (base.tokenizer) than the base model's"
            )
        if not starts:
            raise BadSequences(f"sequence {name} has no span and so no label; rebuild upweighted_dataset")
        end_before = 1
        for start, end, weight in zip(starts, ends, span_weights, strict=True):
            if not end_before <= start < end <= length or not 0 < weight < np.inf:
                raise BadSequences(
                    f"sequence {name} of {length} tokens has a span [{start}, {end}) of weight {weight}; spans start "
                    "at 1 or later, are not empty, do not overlap and weigh more than 0; rebuild upweighted_dataset"
                )
            labels[first + start : first + end] = tokens[start:end]
            weights[first + start : first + end] = weight
            begins.append(first + start)
            end_before = end
        rows[i] = sum(span_weights)
        trees.append(tree)
    repeated = np.zeros(len(names), dtype=np.int64)
    return Sequences(names, offsets, ids, labels, weights, rows, trees, np.array(begins, dtype=np.int64), repeated)


def _flat(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Offsets (n + 1,) and values of a list column, without a Python list."""
    array = column.combine_chunks()
    lists = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
    offsets = lists.offsets.to_numpy().astype(np.int64)
    return offsets - offsets[0], lists.flatten().to_numpy(zero_copy_only=False).astype(np.int32)


def collate(batch: MicroBatch, sequences: Sequences, pad_id: int) -> dict[str, Any]:
    """Return the tensors of one micro-batch of B rows of L tokens.

    Returns:
        `input_ids` (B, L) int64. `positions` (P,) int64: those followed by a label in any of the rows, filled up to a
        multiple with others, so that shapes repeat; the model computes logits at these alone. `labels` (B, P) int64 and
        `weights` (B, P) float32: the next token at each position and its weight, -100 and 0 where it is no label.
        `tokens` () int64: how many of B x L are not padding; `repeated` () int64: how many of those an earlier sequence
        has too. A packed row (B = 1) also has `layout`, its trees, and `position_ids` (1, L) int64; its `positions`
        have the last token before a fork once for every branch that begins with a label.
    """
    repeated = torch.tensor(int(sequences.repeated[list(batch.sequences)].sum()))
    arrays = _packed(batch, sequences, pad_id) if batch.packed else _padded(batch, sequences, pad_id)
    return {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in arrays.items()} | {
        "tokens": torch.tensor(sum(sequences.trees[i].length for i in batch.sequences)),
        "repeated": repeated,
    }


def _packed(batch: MicroBatch, sequences: Sequences, pad_id: int) -> dict[str, Any]:
    """Return the arrays of one row that concatenates trees."""
    trees = [sequences.trees[i] for i in batch.sequences]
    ids = np.full(batch.length, pad_id, dtype=np.int64)
    position_ids = np.zeros(batch.length, dtype=np.int64)
    sources, labels, weights, base = [], [], [], 0
    for index, tree in zip(batch.sequences, trees, strict=True):
        stored, row = slice(sequences.offsets[index], sequences.offsets[index + 1]), slice(base, base + tree.length)
        ids[row], position_ids[row] = sequences.ids[stored], tree.token_positions()
        labelled = np.flatnonzero(sequences.labels[stored] != IGNORE_INDEX)
        sources.append(base + tree.predicted_from()[labelled])
        labels.append(sequences.labels[stored][labelled])
        weights.append(sequences.weights[stored][labelled])
        base += tree.length
    position_ids[base:] = np.arange(batch.length - base)
    empty = -sum(map(len, sources)) % PACKED_MULTIPLE
    return {
        "input_ids": ids[None],
        "position_ids": position_ids[None],
        "layout": RowLayout.of(trees, batch.length),
        "positions": np.concatenate([*sources, np.zeros(empty, dtype=np.int64)]),
        "labels": np.concatenate([*labels, np.full(empty, IGNORE_INDEX)]).astype(np.int64)[None],
        "weights": np.concatenate([*weights, np.zeros(empty)]).astype(np.float32)[None],
    }


def _padded(batch: MicroBatch, sequences: Sequences, pad_id: int) -> dict[str, Any]:
    """Return the arrays of one padded row per sequence, each of a single branch."""
    n, length = len(batch.sequences), batch.length
    ids = np.full((n, length), pad_id, dtype=np.int64)
    labels = np.full((n, length), IGNORE_INDEX, dtype=np.int64)
    weights = np.zeros((n, length), dtype=np.float32)
    for row, index in enumerate(batch.sequences):
        stored = slice(sequences.offsets[index], sequences.offsets[index + 1])
        end = stored.stop - stored.start
        ids[row, :end] = sequences.ids[stored]
        labels[row, :end] = sequences.labels[stored]
        weights[row, :end] = sequences.weights[stored]
    labelled = (labels[:, 1:] != IGNORE_INDEX).any(axis=0)
    count = min(-(-int(labelled.sum()) // POSITION_MULTIPLE) * POSITION_MULTIPLE, length - 1)
    fillers = np.flatnonzero(~labelled)[: count - int(labelled.sum())]
    positions = np.sort(np.concatenate([np.flatnonzero(labelled), fillers]))
    return {
        "input_ids": ids,
        "positions": positions,
        "labels": labels[:, positions + 1],
        "weights": weights[:, positions + 1],
    }
