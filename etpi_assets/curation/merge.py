"""Turns whose prompts extend one another, merged into one training sequence with a weight on each output.

Belongs here: which rows share a sequence, the stored form of a sequence, and its expansion to labels. Does not belong
here: weights (`upweight`), or packing and padding (the trainer).

A row's input is everything before its output. Where one row's input begins with another row's input + output, the
shorter row's tokens stand in the longer one already, in the same positions with the same past, so a causal model
computes the same loss for both outputs in one pass. A row that departs from every sequence (a fork) begins one of its
own, its history repeated. The objective sum(w * nll) / sum(w) over output tokens is that of the rows one by one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from etpi_assets.rollouts.tables import iter_prompts
from etpi_resources.schemas import from_rows

IGNORED = -100
"""The label of a token that is not learnt, as PyTorch's cross entropy has it."""


@dataclass
class _Sequence:
    """A sequence being built: its ids so far, and for each row merged the row with where its output stands."""

    ids: np.ndarray
    spans: list[tuple[int, int, Mapping[str, Any]]] = field(default_factory=list)

    def add(self, prompt: np.ndarray, output: np.ndarray, row: Mapping[str, Any]) -> None:
        self.ids = np.concatenate([self.ids, prompt[len(self.ids) :], output])
        self.spans.append((len(prompt), len(prompt) + len(output), row))

    def name(self) -> str:
        """32 hex digits over ids, spans and weights."""
        digest = hashlib.sha256(self.ids.astype("<i4").tobytes())
        for start, end, row in self.spans:
            digest.update(f"{start},{end},{row['dataset_row_id']};".encode())
        return digest.hexdigest()[:32]


def merge(rows: pa.Table, pairs: pa.Table) -> dict[str, pa.Table]:
    """{"dataset_rows", "sequences"}: the rows with their sequence and span, and the sequences.

    Args:
        rows: `dataset_rows` as `weigh` makes them; a subset of the pairs, in their order.
        pairs: the `pairs` table.

    A sequence holds rows of one agent, so of one split. Its spans are in order and do not overlap; `span_weights` are
    weight x copies. Sequences stand in the order of their first rows.
    """
    wanted = {row["pair_id"]: row for row in rows.to_pylist()}
    outputs = dict(zip(pairs["pair_id"].to_pylist(), pairs["output_ids"], strict=True))
    sequences: list[_Sequence] = []
    own: list[_Sequence] = []
    agent: tuple[str, str] | None = None
    for (rollout_id, agent_id, turn), prompt in iter_prompts(pairs):
        row = wanted.get(f"{rollout_id}/{agent_id}/{turn}")
        if row is None:
            continue
        if (rollout_id, agent_id) != agent:
            agent, own = (rollout_id, agent_id), []
        home = _extended(prompt, own)
        if home is None:
            home = _Sequence(prompt[:0])
            own.append(home)
            sequences.append(home)
        home.add(prompt, outputs[row["pair_id"]].values.to_numpy(), row)
    placed: dict[str, dict[str, Any]] = {}
    stored = []
    for sequence in sequences:
        name = sequence.name()
        stored.append(_stored(name, sequence))
        for start, end, row in sequence.spans:
            placed[row["pair_id"]] = {**row, "sequence_id": name, "span_start": start, "span_end": end}
    in_order = [placed[pair_id] for pair_id in rows["pair_id"].to_pylist()]
    return {"dataset_rows": from_rows("dataset_rows", in_order), "sequences": from_rows("sequences", stored)}


def _extended(prompt: np.ndarray, sequences: Sequence[_Sequence]) -> _Sequence | None:
    """The longest sequence that the prompt extends."""
    fits = [s for s in sequences if len(s.ids) <= len(prompt) and np.array_equal(s.ids, prompt[: len(s.ids)])]
    return max(fits, key=lambda s: len(s.ids), default=None)


def _stored(name: str, sequence: _Sequence) -> dict[str, Any]:
    first = sequence.spans[0][2]
    return {
        "sequence_id": name,
        "split": first["split"],
        "rollout_id": first["rollout_id"],
        "agent_id": first["agent_id"],
        "input_ids": sequence.ids,
        "span_starts": [start for start, _, _ in sequence.spans],
        "span_ends": [end for _, end, _ in sequence.spans],
        "span_weights": [row["weight"] * row["copies"] for _, _, row in sequence.spans],
        "rows": len(sequence.spans),
    }


def expand(sequence: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A row of `sequences` as (input_ids, labels, weights), each (n,): int64, int64 with -100 outside spans, float32
    with 0 outside spans. The token at a position is predicted from the position before it."""
    ids = np.asarray(sequence["input_ids"], dtype=np.int64)
    labels = np.full(len(ids), IGNORED, dtype=np.int64)
    weights = np.zeros(len(ids), dtype=np.float32)
    spans = zip(sequence["span_starts"], sequence["span_ends"], sequence["span_weights"], strict=True)
    for start, end, weight in spans:
        labels[start:end] = ids[start:end]
        weights[start:end] = weight
    return ids, labels, weights


def saving(rows: pa.Table, pairs: pa.Table, sequences: pa.Table) -> dict[str, float]:
    """Tokens of the rows one by one, tokens of the sequences, and their ratio: what merging saves."""
    taken = set(rows["pair_id"].to_pylist())
    lengths = zip(pairs["pair_id"].to_pylist(), pairs["input_tokens"].to_pylist(), pairs["output_ids"], strict=True)
    apart = sum(tokens + len(output) for pair_id, tokens, output in lengths if pair_id in taken)
    merged = sum(len(ids) for ids in sequences["input_ids"])
    return {"row_tokens": apart, "sequence_tokens": merged, "ratio": apart / merged if merged else 1.0}
