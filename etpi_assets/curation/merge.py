"""Merge training rows into prefix trees, which store and process each token of a shared history once.

If one row's input begins with another row's input + output, the longer row already has the tokens of the shorter one,
at the same positions with the same past, so a causal model computes the loss of both outputs in one pass. A row that
differs from the others (think stripped, history re-rendered or compacted, another sample of one prompt) is a branch
from the first token that differs. The objective sum(w * nll) / sum(w) over output tokens equals that of the rows one by
one.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etpi_assets.curation.prefix_trees import DatasetRow, GrowingTree, Span
from etpi_assets.trajectories.tables import iter_turns
from etpi_resources.labels import IGNORE_INDEX
from etpi_resources.lake.schemas import from_rows
from etpi_resources.prefix_tree import PrefixTree

RowIds = tuple[np.ndarray, np.ndarray, DatasetRow]
"""A row's input ids, output ids, and the row."""
_COLUMNS = [
    "dataset_row_id", "pair_id", "rollout_id", "agent_id", "turn", "task_id", "split", "weight", "copies",
]  # fmt: skip


def merge(rows: pa.Table, pairs: pa.Table, max_tokens: int, *, merged: bool = True) -> tuple[pa.Table, pa.Table]:
    """Return the rows with their sequence and span, and the table `sequences`.

    A sequence has rows of one agent, or of the same agent in several rollouts of a task if the prompt that they share
    is at least half of the tokens that each adds. So all its rows are of one split. Its spans are in order and do not
    overlap; `span_weights` are weight x copies. Sequences are in the order of their first rows.

    Args:
        rows: `dataset_rows` from `weigh_pairs`: a subset of the pairs, in their order.
        pairs: the `pairs` table.
        max_tokens: longest sequence; a row that would make its tree longer begins another. No row is longer, because
            `weigh_pairs` drops those.
        merged: False makes each row a separate sequence.

    Raises:
        ValueError: the rows are not a subset of the pairs in their order.
    """
    names: list[str | None] = [None] * len(rows)
    places = np.zeros((2, len(rows)), dtype=np.int32)
    agents = _rows_by_agent(rows, pairs)
    sequences = []
    for growing in _trees(agents, max_tokens) if merged else map(_new_tree, chain.from_iterable(agents)):
        ids, tree, spans = growing.lay_out()
        name = _sequence_id(ids, tree, spans)
        sequences.append(_sequence_row(name, ids, tree, spans))
        for start, end, row in spans:
            names[row["at"]] = name
            places[:, row["at"]] = start, end
    columns = {"sequence_id": names, "span_start": places[0], "span_end": places[1]}
    for column, values in columns.items():
        index = rows.schema.get_field_index(column)
        rows = rows.set_column(index, column, pa.array(values, rows.schema.field(index).type))
    return rows, from_rows("sequences", sequences)


def _trees(agents: Iterable[list[RowIds]], max_tokens: int) -> list[GrowingTree]:
    """Return the trees of the agents' rows, in the order of their first rows."""
    trees: list[GrowingTree] = []
    by_group: defaultdict[tuple[str, str, str], list[GrowingTree]] = defaultdict(list)
    for agent_rows in agents:
        agent_trees: list[GrowingTree] = []
        for row_ids in agent_rows:
            _grow(agent_trees, row_ids, max_tokens)
        first_prompt, _, facts = agent_rows[0]
        # Samples of one group may share a tree; a rollout of an unknown task has no other samples.
        group = by_group[facts["split"], facts["task_id"] or facts["rollout_id"], facts["agent_id"]]
        shared = _tree_to_join(first_prompt, agent_trees, group, max_tokens)
        if shared is None:
            trees += agent_trees
            group += agent_trees
        else:
            for prompt, output, row in agent_rows:
                shared.add(prompt, output, row, shared.match(prompt))
    return trees


def turns_of(
    rows: pa.Table, pairs: pa.Table, columns: Sequence[str]
) -> Iterator[tuple[dict[str, Any], np.ndarray | None, np.ndarray | None]]:
    """Yield (row, input ids, output ids) of every row of `dataset_rows`, which are in the order of the pairs.

    From the first row on that is missing among the pairs, or in another order, ids are None.

    Args:
        columns: the columns to read of the rows, `pair_id` among them.
    """
    remaining = iter(rows.select(list(columns)).to_pylist())
    row = next(remaining, None)
    for key, prompt, output in iter_turns(pairs):
        if row is not None and row["pair_id"] == "/".join(map(str, key)):
            yield row, prompt, output
            row = next(remaining, None)
    if row is not None:
        yield from ((unmatched, None, None) for unmatched in chain([row], remaining))


def _rows_by_agent(rows: pa.Table, pairs: pa.Table) -> Iterator[list[RowIds]]:
    """Yield the rows of one agent after the other; each row has its number as "at"."""
    numbered = enumerate(turns_of(rows, pairs, _COLUMNS))
    for _, of_agent in groupby(numbered, key=lambda item: (item[1][0]["rollout_id"], item[1][0]["agent_id"])):
        agent_rows = []
        for at, (row, prompt, output) in of_agent:
            if prompt is None or output is None:
                raise ValueError(f"row {row['pair_id']} is not among the pairs, or in another order")
            agent_rows.append((prompt, output, {**row, "at": at}))
        yield agent_rows


def _grow(trees: list[GrowingTree], row_ids: RowIds, max_tokens: int) -> None:
    """Add a row to the tree with the longest match of its prompt and room for the rest, or to a new tree."""
    prompt, output, row = row_ids
    matches = [(tree.match(prompt), tree) for tree in trees]
    fits = [
        (m, tree) for m, tree in matches if m.tokens and tree.size + len(prompt) - m.tokens + len(output) <= max_tokens
    ]
    if not fits:
        trees.append(_new_tree(row_ids))
        return
    match, tree = max(fits, key=lambda fit: fit[0].tokens)
    tree.add(prompt, output, row, match)


def _new_tree(row_ids: RowIds) -> GrowingTree:
    prompt, output, row = row_ids
    tree = GrowingTree()
    tree.add(prompt, output, row, tree.match(prompt))
    return tree


def _tree_to_join(
    prompt: np.ndarray, agent_trees: Sequence[GrowingTree], group: Sequence[GrowingTree], max_tokens: int
) -> GrowingTree | None:
    """Return the tree of other samples of the same prompt that an agent with a single tree joins, if there is one."""
    if len(agent_trees) != 1:
        return None
    size = agent_trees[0].size
    for tree in group:
        shared = tree.match(prompt).tokens
        if 2 * shared >= size and tree.size + size - shared <= max_tokens:
            return tree
    return None


def _sequence_id(ids: np.ndarray, tree: PrefixTree, spans: Sequence[Span]) -> str:
    """Return 32 hex digits over the ids, nodes, spans and row ids."""
    digest = hashlib.sha256(ids.astype("<i4").tobytes())
    digest.update(np.stack([tree.starts, tree.parents]).astype("<i4").tobytes())
    for start, end, row in spans:
        digest.update(f"{start},{end},{row['dataset_row_id']};".encode())
    return digest.hexdigest()[:32]


def _sequence_row(name: str, ids: np.ndarray, tree: PrefixTree, spans: Sequence[Span]) -> dict[str, Any]:
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
    """Return (input_ids, labels, weights) of a row of `sequences`, each (n,).

    input_ids are int64. Outside spans, labels (int64) are IGNORE_INDEX and weights (float32) are 0. Labels are not
    shifted: `PrefixTree.predicted_from` says which token predicts which.
    """
    ids = np.asarray(sequence["input_ids"], dtype=np.int64)
    labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int64)
    weights = np.zeros(len(ids), dtype=np.float32)
    spans = zip(sequence["span_starts"], sequence["span_ends"], sequence["span_weights"], strict=True)
    for start, end, weight in spans:
        labels[start:end] = ids[start:end]
        weights[start:end] = weight
    return ids, labels, weights


def branches(sequence: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each branch of a row of `sequences` as a plain row, for trainers that do not read trees.

    The keys are input_ids, labels, weights, span_starts, span_ends, span_weights. Tokens that are in an earlier branch
    too are context, without labels.
    """
    ids, labels, weights = expand(sequence)
    starts, ends = (np.asarray(sequence[f"span_{name}"], dtype=np.int64) for name in ("starts", "ends"))
    span_weights = np.asarray(sequence["span_weights"])
    for indices, repeated in PrefixTree.from_row(sequence).branches():
        # An output is one range of one branch, so a span is whole in the branch's new tokens or not there at all.
        new = indices[repeated:]
        at = np.searchsorted(new, starts)
        inside = np.append(new, -1)[at] == starts
        at = at[inside] + repeated
        is_new = np.arange(len(indices)) >= repeated
        yield {
            "input_ids": ids[indices],
            "labels": np.where(is_new, labels[indices], IGNORE_INDEX),
            "weights": np.where(is_new, weights[indices], 0).astype(np.float32),
            "span_starts": at.tolist(),
            "span_ends": (at + (ends - starts)[inside]).tolist(),
            "span_weights": span_weights[inside].tolist(),
        }


def merge_savings(rows: pa.Table, pairs: pa.Table, sequences: pa.Table) -> dict[str, float]:
    """Return the tokens of the rows one by one (`row_tokens`), of the merged `sequence_tokens`, and their `ratio`."""
    inputs = pairs.filter(pc.is_in(pairs["pair_id"], value_set=rows["pair_id"]))  # pyright: ignore[reportAttributeAccessIssue]
    unmerged = sum((pc.sum(column).as_py() or 0) for column in (inputs["input_tokens"], rows["output_tokens"]))  # pyright: ignore[reportAttributeAccessIssue]
    return savings(unmerged, len(pc.list_flatten(sequences["input_ids"])))  # pyright: ignore[reportAttributeAccessIssue]


def savings(row_tokens: int, sequence_tokens: int) -> dict[str, float]:
    """Return both, and their `ratio`."""
    ratio = row_tokens / sequence_tokens if sequence_tokens else 1.0
    return {"row_tokens": row_tokens, "sequence_tokens": sequence_tokens, "ratio": ratio}
