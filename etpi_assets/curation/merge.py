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
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from etpi_assets.curation.prefix_trees import GrowingTree, Row
from etpi_assets.rollouts.tables import iter_prompts
from etpi_resources.prefix_tree import Tree
from etpi_resources.schemas import from_rows

IGNORED = -100
"""The label of a token that is not learnt, as PyTorch's cross entropy has it."""

Turn = tuple[np.ndarray, np.ndarray, Row]
"""A row's input ids, output ids, and the row."""


def merge(rows: pa.Table, pairs: pa.Table, max_tokens: int) -> dict[str, pa.Table]:
    """{"dataset_rows", "sequences"}: the rows with their sequence and span, and the sequences.

    Args:
        rows: `dataset_rows` as `weigh` makes them; a subset of the pairs, in their order.
        pairs: the `pairs` table.
        max_tokens: a row that would make its tree longer begins another. No row is longer (`weigh` drops those), so no
            sequence is.

    A sequence holds rows of one agent, or of the same agent of several rollouts of a task where the prompt they share
    is at least half of what each adds. So it is of one split. Its spans are in order and do not overlap;
    `span_weights` are weight x copies. Sequences stand in the order of their first rows.
    """
    trees: list[GrowingTree] = []
    samples: defaultdict[tuple[str, str | None, str], list[GrowingTree]] = defaultdict(list)
    for turns in _agents(rows, pairs):
        own: list[GrowingTree] = []
        for turn in turns:
            _grow(own, turn, max_tokens)
        facts = turns[0][2]
        others = samples[facts["split"], facts["task_id"], facts["agent_id"]] if facts["task_id"] is not None else []
        home = _sample_of(turns[0][0], own, others, max_tokens)
        if home is None:
            others += own
            trees += own
        else:
            for prompt, output, row in turns:
                home.add(prompt, output, row, home.match(prompt))
    placed: dict[str, dict[str, Any]] = {}
    stored = []
    for growing in trees:
        ids, tree, spans = growing.lay_out()
        name = _name(ids, tree, spans)
        stored.append(_stored(name, ids, tree, spans))
        for start, end, row in spans:
            placed[row["pair_id"]] = {**row, "sequence_id": name, "span_start": start, "span_end": end}
    in_order = [placed[pair_id] for pair_id in rows["pair_id"].to_pylist()]
    return {"dataset_rows": from_rows("dataset_rows", in_order), "sequences": from_rows("sequences", stored)}


def _agents(rows: pa.Table, pairs: pa.Table) -> Iterator[list[Turn]]:
    """The turns of one agent after the other."""
    wanted = {row["pair_id"]: row for row in rows.to_pylist()}
    outputs = dict(zip(pairs["pair_id"].to_pylist(), pairs["output_ids"], strict=True))
    for _, prompts in groupby(iter_prompts(pairs), key=lambda item: item[0][:2]):
        turns = []
        for key, prompt in prompts:
            if row := wanted.get("/".join(map(str, key))):
                turns.append((prompt, outputs[row["pair_id"]].values.to_numpy(), row))
        if turns:
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


def _name(ids: np.ndarray, tree: Tree, spans: Sequence[tuple[int, int, Row]]) -> str:
    """32 hex digits over ids, nodes, spans and weights."""
    digest = hashlib.sha256(ids.astype("<i4").tobytes())
    digest.update(np.stack([tree.starts, tree.parents]).astype("<i4").tobytes())
    for start, end, row in spans:
        digest.update(f"{start},{end},{row['dataset_row_id']};".encode())
    return digest.hexdigest()[:32]


def _stored(name: str, ids: np.ndarray, tree: Tree, spans: Sequence[tuple[int, int, Row]]) -> dict[str, Any]:
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
    with 0 outside spans. Which token a token is predicted from is the tree's to say (`Tree.sources`)."""
    ids = np.asarray(sequence["input_ids"], dtype=np.int64)
    labels = np.full(len(ids), IGNORED, dtype=np.int64)
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
    for indices, repeated in Tree.stored(sequence).branches():
        place = {int(index): at for at, index in enumerate(indices) if at >= repeated}
        # A span goes on into a branch's own part only from its first token on: an output is one range of one branch.
        own = [(place[s], place[e - 1] + 1, w) for s, e, w in spans if s in place]
        learnt = np.arange(len(indices)) >= repeated
        yield {
            "input_ids": ids[indices],
            "labels": np.where(learnt, labels[indices], IGNORED),
            "weights": np.where(learnt, weights[indices], 0).astype(np.float32),
            "span_starts": [s for s, _, _ in own],
            "span_ends": [e for _, e, _ in own],
            "span_weights": [w for _, _, w in own],
        }


def saving(rows: pa.Table, pairs: pa.Table, sequences: pa.Table) -> dict[str, float]:
    """Tokens of the rows one by one, tokens of the sequences, and their ratio: what merging saves."""
    taken = set(rows["pair_id"].to_pylist())
    lengths = zip(pairs["pair_id"].to_pylist(), pairs["input_tokens"].to_pylist(), pairs["output_ids"], strict=True)
    apart = sum(tokens + len(output) for pair_id, tokens, output in lengths if pair_id in taken)
    merged = sum(len(ids) for ids in sequences["input_ids"])
    return {"row_tokens": apart, "sequence_tokens": merged, "ratio": apart / merged if merged else 1.0}
