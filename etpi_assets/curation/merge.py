"""Training rows merged into prefix trees: each token of a history they share is stored, and processed, once.

Belongs here: which rows share a sequence, the stored form of a sequence, and its expansion to labels. Does not belong
here: growing a tree (`prefix_trees`), weights (`upweight`), or packing and padding (the trainer).

A row's input is everything before its output. Where one row's input begins with another row's input + output, the
shorter row's tokens stand in the longer one already, in the same positions with the same past, so a causal model
computes the same loss for both outputs in one pass. A row that departs from the others (think stripped, history
re-rendered or compacted, another sample of one prompt) is a branch from the token where it does. The objective
sum(w * nll) / sum(w) over output tokens is that of the rows one by one.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.curation.prefix_trees import GrowingTree, Row
from etpi_assets.trajectories.tables import iter_turns
from etpi_resources.labels import IGNORE_INDEX
from etpi_resources.lake.schemas import TableBuilder
from etpi_resources.lake.stored import Rows, batches, columns_of, dicts
from etpi_resources.prefix_tree import PrefixTree

WAITING_TOKENS = 1 << 25
"""Tokens of trees that wait for other samples of their task. Where there are more, the oldest wait no longer, so that
memory does not grow with the rows; the samples of a task stand side by side in a rollout set, or nearly."""

Turn = tuple[np.ndarray, np.ndarray, Row]
"""A row's input ids, output ids, and the row."""
Group = tuple[str, str, str]
"""Split, task, and agent: whose samples may share a tree."""

_ROW = [
    "dataset_row_id", "pair_id", "rollout_id", "agent_id", "turn", "task_id", "split", "weight", "copies",
]  # fmt: skip


def merge(rows: pa.Table, pairs: Rows, max_tokens: int, keep: Callable[[pa.Table], object]) -> pa.Table:
    """The rows with their sequence and span; `keep` is handed `sequences`, some of them at a time.

    Args:
        rows: `dataset_rows` as `weigh` makes them; a subset of the pairs, in their order.
        pairs: the `pairs` table.
        max_tokens: a row that would make its tree longer begins another. No row is longer (`weigh` drops those), so no
            sequence is.

    A sequence holds rows of one agent, or of the same agent of several rollouts of a task where the prompt they share
    is at least half of what each adds. So it is of one split. Its spans are in order and do not overlap;
    `span_weights` are weight x copies. Sequences stand in the order of their first rows.

    Raises:
        ValueError: the rows are not a subset of the pairs in their order.
    """
    names: list[str | None] = [None] * len(rows)
    places = np.zeros((2, len(rows)), dtype=np.int32)
    sequences = TableBuilder("sequences", keep, rows=256)
    for growing in _trees(rows, pairs, max_tokens):
        ids, tree, spans = growing.lay_out()
        name = _name(ids, tree, spans)
        sequences.add(_stored(name, ids, tree, spans))
        for start, end, row in spans:
            names[row["at"]] = name
            places[:, row["at"]] = start, end
    sequences.flush()
    columns = {"sequence_id": names, "span_start": places[0], "span_end": places[1]}
    for column, values in columns.items():
        index = rows.schema.get_field_index(column)
        rows = rows.set_column(index, column, pa.array(values, rows.schema.field(index).type))
    return rows


def _trees(rows: pa.Table, pairs: Rows, max_tokens: int) -> Iterator[GrowingTree]:
    """The full-grown trees, in the order of their first rows."""
    waiting = _Waiting()
    for turns in _agents(rows, pairs):
        own: list[GrowingTree] = []
        for turn in turns:
            _grow(own, turn, max_tokens)
        facts = turns[0][2]
        # A rollout of an unknown task has no other samples.
        group = (facts["split"], facts["task_id"] or facts["rollout_id"], facts["agent_id"])
        home = _sample_of(turns[0][0], own, waiting.of(group), max_tokens)
        if home is None:
            waiting.add(group, own)
        else:
            before = home.size
            for prompt, output, row in turns:
                home.add(prompt, output, row, home.match(prompt))
            waiting.tokens += home.size - before
        while waiting.tokens > WAITING_TOKENS:
            yield waiting.oldest()
    while waiting.tokens:
        yield waiting.oldest()


class _Waiting:
    """Trees that other samples of their task may still join, oldest first, and the tokens in them."""

    def __init__(self) -> None:
        self._trees: deque[tuple[Group, GrowingTree]] = deque()
        self._groups: defaultdict[Group, list[GrowingTree]] = defaultdict(list)
        self.tokens = 0

    def of(self, group: Group) -> Sequence[GrowingTree]:
        return self._groups.get(group, ())

    def add(self, group: Group, trees: Sequence[GrowingTree]) -> None:
        self._trees.extend((group, tree) for tree in trees)
        self._groups[group] += trees
        self.tokens += sum(tree.size for tree in trees)

    def oldest(self) -> GrowingTree:
        """The oldest, which waits no longer."""
        group, tree = self._trees.popleft()
        self._groups[group].remove(tree)
        if not self._groups[group]:
            del self._groups[group]
        self.tokens -= tree.size
        return tree


def turns_of(
    rows: pa.Table, pairs: Rows, columns: Sequence[str]
) -> Iterator[tuple[dict[str, Any], np.ndarray | None, np.ndarray | None]]:
    """(row, its input ids, its output ids) of every row of `dataset_rows`, which stand in the order of the pairs. There
    are no ids from the first row on that is not among the pairs where its place would be.

    Args:
        columns: what is read of the rows, `pair_id` among them.
    """
    coming = dicts(rows, columns)
    row = next(coming, None)
    for key, prompt, output in iter_turns(pairs):
        if row is not None and row["pair_id"] == "/".join(map(str, key)):
            yield row, prompt, output
            row = next(coming, None)
    if row is not None:
        yield from ((left, None, None) for left in chain([row], coming))


def _agents(rows: pa.Table, pairs: Rows) -> Iterator[list[Turn]]:
    """The turns of one agent after the other; a row has its number as "at"."""
    found = enumerate(turns_of(rows, pairs, _ROW))
    for _, of_agent in groupby(found, key=lambda item: (item[1][0]["rollout_id"], item[1][0]["agent_id"])):
        turns = []
        for at, (row, prompt, output) in of_agent:
            if prompt is None or output is None:
                raise ValueError(f"row {row['pair_id']} is not among the pairs where its place would be")
            turns.append((prompt, output, {**row, "at": at}))
        yield turns


def _grow(trees: list[GrowingTree], turn: Turn, max_tokens: int) -> None:
    """Add a turn to the tree that has most of its prompt and room for the rest, or to a new one."""
    prompt, output, row = turn
    found = [(tree.match(prompt), tree) for tree in trees]
    fits = [
        (m, tree) for m, tree in found if m.tokens and tree.size + len(prompt) - m.tokens + len(output) <= max_tokens
    ]
    if not fits:
        trees.append(tree := GrowingTree())
        tree.add(prompt, output, row, tree.match(prompt))
        return
    match, tree = max(fits, key=lambda fit: fit[0].tokens)
    tree.add(prompt, output, row, match)


def _sample_of(
    prompt: np.ndarray, own: Sequence[GrowingTree], others: Sequence[GrowingTree], max_tokens: int
) -> GrowingTree | None:
    """The tree of other samples of the same prompt that an agent's own single tree is to join."""
    if len(own) != 1:
        return None
    size = own[0].size
    for tree in others:
        shared = tree.match(prompt).tokens
        if 2 * shared >= size and tree.size + size - shared <= max_tokens:
            return tree
    return None


def _name(ids: np.ndarray, tree: PrefixTree, spans: Sequence[tuple[int, int, Row]]) -> str:
    """32 hex digits over ids, nodes, spans and weights."""
    digest = hashlib.sha256(ids.astype("<i4").tobytes())
    digest.update(np.stack([tree.starts, tree.parents]).astype("<i4").tobytes())
    for start, end, row in spans:
        digest.update(f"{start},{end},{row['dataset_row_id']};".encode())
    return digest.hexdigest()[:32]


def _stored(name: str, ids: np.ndarray, tree: PrefixTree, spans: Sequence[tuple[int, int, Row]]) -> dict[str, Any]:
    first = min((row for _, _, row in spans), key=lambda row: row["turn"])
    return {
        "sequence_id": name,
        "split": first["split"],
        "rollout_id": first["rollout_id"],
        "agent_id": first["agent_id"],
        "input_ids": ids,
        "node_starts": tree.starts,
        "node_parents": tree.parents,
        "node_positions": tree.positions,
        "span_starts": [start for start, _, _ in spans],
        "span_ends": [end for _, end, _ in spans],
        "span_weights": [row["weight"] * row["copies"] for _, _, row in spans],
        "rows": len(spans),
    }


def expand(sequence: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A row of `sequences` as (input_ids, labels, weights), each (n,): int64, int64 with -100 outside spans, float32
    with 0 outside spans. Which token a token is predicted from is the tree's to say (`PrefixTree.predicted_from`)."""
    ids = np.asarray(sequence["input_ids"], dtype=np.int64)
    labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int64)
    weights = np.zeros(len(ids), dtype=np.float32)
    spans = zip(sequence["span_starts"], sequence["span_ends"], sequence["span_weights"], strict=True)
    for start, end, weight in spans:
        labels[start:end] = ids[start:end]
        weights[start:end] = weight
    return ids, labels, weights


def branches(sequence: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row of `sequences` as plain rows, one a branch, for readers that know no trees: {input_ids, labels, weights,
    span_starts, span_ends, span_weights}. What a branch repeats of an earlier one is read, not learnt again."""
    ids, labels, weights = expand(sequence)
    spans = list(zip(*(sequence[f"span_{name}"] for name in ("starts", "ends", "weights")), strict=True))
    for indices, repeated in PrefixTree.from_row(sequence).branches():
        place = {int(index): at for at, index in enumerate(indices) if at >= repeated}
        # A span goes on into a branch's own part only from its first token on: an output is one range of one branch.
        own = [(place[s], place[e - 1] + 1, w) for s, e, w in spans if s in place]
        learnt = np.arange(len(indices)) >= repeated
        yield {
            "input_ids": ids[indices],
            "labels": np.where(learnt, labels[indices], IGNORE_INDEX),
            "weights": np.where(learnt, weights[indices], 0).astype(np.float32),
            "span_starts": [s for s, _, _ in own],
            "span_ends": [e for _, e, _ in own],
            "span_weights": [w for _, _, w in own],
        }


def merge_savings(rows: pa.Table, pairs: Rows, sequences: Rows) -> dict[str, float]:
    """Tokens of the rows one by one, tokens of the sequences, and their ratio: what merging saves."""
    lengths = columns_of(pairs, ["pair_id", "input_tokens"])
    taken = lengths.filter(pc.is_in(lengths["pair_id"], value_set=rows["pair_id"]))  # pyright: ignore[reportAttributeAccessIssue]
    apart = sum((pc.sum(column).as_py() or 0) for column in (taken["input_tokens"], rows["output_tokens"]))  # pyright: ignore[reportAttributeAccessIssue]
    merged = sum(len(batch.column(0).flatten()) for batch in batches(sequences, ["input_ids"]))
    return {"row_tokens": apart, "sequence_tokens": merged, "ratio": apart / merged if merged else 1.0}
