"""Pack the branches of a pass's samples as prefix trees in one row, which has each shared prefix once.

The head that scores a row has one label per position. So where branches part, each begins with a copy of the last token
that they share, and every token is predicted from its own branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from etpi_resources.labels import IGNORE_INDEX
from etpi_resources.prefix_tree import PrefixTree
from etpi_resources.token_ids import common_prefix
from etpi_resources.trainers.policy_link import Sample
from etpi_resources.trainers.workers.tree_attention import RowLayout, tree_arguments

ROW_MULTIPLE = 128
"""Rows are padded to a multiple of this number of tokens, so that they have few shapes."""


@dataclass(frozen=True)
class Branch:
    """Ids (n,) int64 of one branch of a sample, the index of each in the sample, and how many an earlier branch has."""

    sample: int
    ids: np.ndarray
    indices: np.ndarray
    shared: int


def branches_of(samples: Sequence[Sample]) -> list[Branch]:
    """Return the branches of all samples."""
    branches = []
    for number, sample in enumerate(samples):
        ids = np.array([*sample.prompt_ids, *sample.completion_ids], dtype=np.int64)
        for indices, shared in sample.branches():
            at = np.array(indices, dtype=np.int64)
            branches.append(Branch(number, ids[at], at, shared))
    return branches


@dataclass(frozen=True)
class PackedSamples:
    """A row of L tokens for B samples of at most C tokens.

    Attributes:
        arguments: arguments of the model: input_ids (1, L), shift_labels (1, L), positions and layout.
        places: (B, C) int64, for each token of a sample the row's position that predicts it; 0 after the sample's end.
        real: (B, C) bool, False after the sample's end.
    """

    arguments: dict[str, Any]
    places: torch.Tensor
    real: torch.Tensor

    def unpack(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the samples' scores (B, C) from those of the row (1, L); 0 after a sample's end."""
        return torch.where(self.real, scores[0][self.places], scores.new_zeros(()))


@dataclass(eq=False)
class _Node:
    """Tokens of a row from `start` on, at `depth` in their branches."""

    start: int
    depth: int
    length: int
    children: list[_Node] = field(default_factory=list)

    def split(self, depth: int) -> None:
        """Cut the node so that it ends at `depth`; the rest becomes its child."""
        if (keep := depth - self.depth) < self.length:
            self.children = [_Node(self.start + keep, depth, self.length - keep, self.children)]
            self.length = keep


def _key(branch: Branch) -> bytes:
    return branch.ids.astype(">u4").tobytes()  # as bytes, ids have the order of their values


def parts_of(branches: Sequence[Branch], most: int | None, *, shared: bool) -> list[list[Branch]]:
    """Divide branches into parts of at most `most` ids, or of one branch; neighbours share prefixes.

    Args:
        shared: whether a prefix that branches of a part share counts once.
    """
    if most is None:
        return [[*branches]]
    parts: list[list[Branch]] = []
    ids = 0
    for branch in sorted(branches, key=_key):
        common = common_prefix(parts[-1][-1].ids, branch.ids) if parts and shared else 0
        if not parts or ids + len(branch.ids) - common > most:
            parts.append([])
            ids = common = 0
        parts[-1].append(branch)
        ids += len(branch.ids) - common
    return parts


def pack_samples(
    samples: Sequence[Sample], sample_tokens: int, device: torch.device, branches: Sequence[Branch] | None = None
) -> PackedSamples:
    """Pack the branches of B samples into one row.

    Args:
        sample_tokens: C; no completion is longer.
        branches: only these of them.
    """
    branches = branches_of(samples) if branches is None else branches
    keys = [_key(branch) for branch in branches]
    places = np.zeros((len(samples), sample_tokens), dtype=np.int64)
    real = np.zeros((len(samples), sample_tokens), dtype=bool)
    pieces: list[np.ndarray] = []
    roots: list[_Node] = []
    path: list[_Node] = []
    before, rows, base = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), 0
    labelled: list[tuple[np.ndarray, np.ndarray]] = []
    for number in sorted(range(len(branches)), key=keys.__getitem__):
        branch = branches[number]
        common = common_prefix(before, branch.ids)
        fork = common if common == len(before) else max(common - 1, 0)
        while path and path[-1].depth >= fork:
            path.pop()
        if fork < len(branch.ids):
            node = _Node(base, fork, len(branch.ids) - fork)
            if path:
                path[-1].split(fork)
                path[-1].children.append(node)
            else:
                roots.append(node)
            path.append(node)
            pieces.append(branch.ids[fork:])
        rows = np.concatenate([rows[:fork], np.arange(base, base + len(branch.ids) - fork)])
        before, base = branch.ids, base + len(branch.ids) - fork
        sample = samples[branch.sample]
        edge = len(sample.prompt_ids)
        written = np.arange(max(branch.shared, 1), len(branch.ids))
        written = written[branch.indices[written] >= edge]
        at = branch.indices[written] - edge
        places[branch.sample, at], real[branch.sample, at] = rows[written - 1], True
        trained = np.asarray(sample.mask, dtype=bool)[at]
        labelled.append((rows[written - 1][trained], branch.ids[written][trained]))
    trees = [_tree(root, end) for root, end in zip(roots, [*(r.start for r in roots[1:]), base], strict=True)]
    length = -(-base // ROW_MULTIPLE) * ROW_MULTIPLE
    positions = np.concatenate([*[tree.token_positions() for tree in trees], np.arange(length - base)])
    ids, labels = np.zeros(length, dtype=np.int64), np.full(length, IGNORE_INDEX, dtype=np.int64)
    ids[:base] = np.concatenate(pieces)
    for at, of in labelled:
        labels[at] = of
    return PackedSamples(
        {
            "input_ids": torch.from_numpy(ids)[None].to(device),
            "shift_labels": torch.from_numpy(labels)[None].to(device),
            **tree_arguments(RowLayout.of(trees, length), torch.from_numpy(positions)[None].to(device)),
        },
        torch.from_numpy(places).to(device),
        torch.from_numpy(real).to(device),
    )


def _tree(root: _Node, end: int) -> PrefixTree:
    """Return the tree of a root whose tokens end at `end` of the row."""
    nodes, waiting = list[tuple[_Node, int]](), [(root, -1)]
    while waiting:
        node, parent = waiting.pop()
        waiting += [(child, len(nodes)) for child in reversed(node.children)]
        nodes.append((node, parent))
    starts = np.array([node.start - root.start for node, _ in nodes], dtype=np.int64)
    parents = np.array([parent for _, parent in nodes], dtype=np.int64)
    depths = np.array([node.depth for node, _ in nodes], dtype=np.int64)
    return PrefixTree(starts, parents, depths, end - root.start)


def pad_branches(
    samples: Sequence[Sample], sample_tokens: int, pad_id: int, multiple: int, branches: Sequence[Branch]
) -> PaddedBranches:
    """Return branches of B samples as padded rows, for models that cannot be trained on trees."""
    # What a branch shares with an earlier one is its prompt.
    edges = [max(b.shared, len(samples[b.sample].prompt_ids) if b.indices[0] == 0 else 1) for b in branches]
    edges = [min(edge, len(b.ids) - 1) if len(b.ids) > 1 else 0 for edge, b in zip(edges, branches, strict=True)]
    left = -(-max(edges) // multiple) * multiple
    right = -(-max(len(b.ids) - e for b, e in zip(branches, edges, strict=True)) // multiple) * multiple
    ids = np.full((len(branches), left + right), pad_id, dtype=np.int64)
    mask = np.zeros_like(ids)
    rows, columns = (np.zeros((len(samples), sample_tokens), dtype=np.int64) for _ in range(2))
    real = np.zeros((len(samples), sample_tokens), dtype=bool)
    for row, (branch, edge) in enumerate(zip(branches, edges, strict=True)):
        where = slice(left - edge, left - edge + len(branch.ids))
        ids[row, where], mask[row, where] = branch.ids, 1
        written = np.arange(edge, len(branch.ids))
        at = branch.indices[written] - len(samples[branch.sample].prompt_ids)
        written, at = written[at >= 0], at[at >= 0]
        rows[branch.sample, at], columns[branch.sample, at], real[branch.sample, at] = row, written - edge, True
    tensor = torch.from_numpy
    return PaddedBranches(tensor(ids), tensor(mask), right, tensor(rows), tensor(columns), tensor(real))


@dataclass(frozen=True)
class PaddedBranches:
    """R rows of P + C' tokens: ids and mask; `keep` is C'. (rows, columns) (B, C): where each token's score stands."""

    ids: torch.Tensor
    mask: torch.Tensor
    keep: int
    rows: torch.Tensor
    columns: torch.Tensor
    real: torch.Tensor

    def unpack(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the samples' scores (B, C) from those of the rows (R, C'); 0 where there is none."""
        device = scores.device
        picked = scores[self.rows.to(device), self.columns.to(device)]
        return torch.where(self.real.to(device), picked, scores.new_zeros(()))
