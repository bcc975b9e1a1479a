"""Pack the branches of a pass's samples as prefix trees in one row, which has each shared prefix once.

The head that scores a row has one label per position. So where branches part, each begins with a copy of the last token
that they share, and every token is predicted from its own branch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from etpi_resources.labels import IGNORE_INDEX
from etpi_resources.prefix_tree import PrefixTree
from etpi_resources.token_ids import common_prefix
from etpi_resources.trainers.policy_link import Fork, Sample
from etpi_resources.trainers.workers.tree_attention import RowLayout, tree_arguments

ROW_MULTIPLE = 128
"""Rows are padded to a multiple of this number of tokens, so that they have few shapes."""
PADDED_MULTIPLE = 32
"""Both sides of padded rows likewise."""


@dataclass(frozen=True)
class Branch:
    """Ids (n,) int64 of one branch of a sample, and which of them are of the completion and in no earlier branch: their
    positions in the branch, and their columns in the completion."""

    sample: int
    ids: np.ndarray
    scored: np.ndarray
    columns: np.ndarray


def branches_of(samples: Sequence[Sample]) -> list[Branch]:
    """Return the branches of all samples."""
    branches = []
    for number, sample in enumerate(samples):
        ids, edge = np.array([*sample.prompt_ids, *sample.completion_ids], dtype=np.int64), len(sample.prompt_ids)
        forks, paths = [Fork(0, -1), *sample.forks], list[np.ndarray]()
        starts = [fork.start for fork in forks]
        for fork, end in zip(forks, [*starts[1:], len(ids)], strict=True):
            # Of the branch that has the id `after`, its ids as far as that one.
            parent = paths[bisect_right(starts, fork.after) - 1] if paths else np.empty(0, dtype=np.int64)
            shared = parent[: parent.searchsorted(fork.after, side="right")]
            path = np.concatenate([shared, np.arange(fork.start, end)])
            paths.append(path)
            scored = np.arange(max(len(shared), 1), len(path))  # nothing predicts a first id
            scored = scored[path[scored] >= edge]
            branches.append(Branch(number, ids[path], scored, path[scored] - edge))
    return branches


@dataclass(frozen=True)
class Packed:
    """Branches of B samples of at most C tokens in rows.

    Attributes:
        arguments: of the function that scores the rows.
        places: (B, C) int64, for each token of a sample the place of its score in the rows' scores, flat.
        real: (B, C) bool, False after the sample's end, and for tokens of other branches.
    """

    arguments: Any
    places: torch.Tensor
    real: torch.Tensor

    @classmethod
    def of(
        cls, arguments: Any, shape: tuple[int, int], branches: Sequence[Branch], places: Sequence[np.ndarray],
        device: torch.device,
    ) -> Packed:  # fmt: skip
        """Return rows of these branches, whose own tokens have their scores at `places`."""
        all_places, real = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=bool)
        for branch, at in zip(branches, places, strict=True):
            all_places[branch.sample, branch.columns], real[branch.sample, branch.columns] = at, True
        return cls(arguments, torch.from_numpy(all_places).to(device), torch.from_numpy(real).to(device))

    def unpack(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the samples' scores (B, C) from those of the rows; 0 where there is none."""
        return torch.where(self.real, scores.flatten()[self.places], scores.new_zeros(()))


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
) -> Packed:
    """Pack the branches of B samples into one row of L tokens, the arguments of the model.

    Args:
        sample_tokens: C; no completion is longer.
        branches: only these of them.
    """
    branches = sorted(branches_of(samples) if branches is None else branches, key=_key)
    pieces, depths, places = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    before, rows, base = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), 0
    starts: dict[int, int] = {}  # place of a node's first token -> of the token that it follows, -1: none
    for branch in branches:
        common = common_prefix(before, branch.ids)
        fork = common if common == len(before) else max(common - 1, 0)
        if fork < len(branch.ids):
            follows = int(rows[fork - 1]) if fork else -1
            if fork:
                starts.setdefault(follows + 1, follows)  # the node that it leaves is cut behind it
            starts[base] = follows
        pieces.append(branch.ids[fork:])
        depths.append(np.arange(fork, len(branch.ids)))
        rows = np.concatenate([rows[:fork], np.arange(base, base + len(branch.ids) - fork)])
        before, base = branch.ids, base + len(branch.ids) - fork
        places.append(rows[branch.scored - 1])
    length = -(-base // ROW_MULTIPLE) * ROW_MULTIPLE
    ids, positions = np.zeros(length, dtype=np.int64), np.concatenate([*depths, np.arange(length - base)])
    ids[:base], labels = np.concatenate(pieces), np.full(length, IGNORE_INDEX, dtype=np.int64)
    for branch, at in zip(branches, places, strict=True):
        trained = np.asarray(samples[branch.sample].mask, dtype=bool)[branch.columns]
        labels[at[trained]] = branch.ids[branch.scored[trained]]
    firsts = np.array(sorted(starts), dtype=np.int64)
    parents = firsts.searchsorted([starts[first] for first in firsts.tolist()], side="right") - 1
    forest = PrefixTree(firsts, parents, positions[firsts], base)
    arguments = {
        "input_ids": torch.from_numpy(ids)[None].to(device),
        "shift_labels": torch.from_numpy(labels)[None].to(device),
        **tree_arguments(RowLayout.of([forest], length), torch.from_numpy(positions)[None].to(device)),
    }
    return Packed.of(arguments, (len(samples), sample_tokens), branches, places, device)


def pad_branches(
    samples: Sequence[Sample], sample_tokens: int, device: torch.device, branches: Sequence[Branch], pad_id: int
) -> Packed:
    """Return branches of B samples as padded rows, for models that cannot be trained on trees: their ids and mask, both
    (R, L), and the number of columns from the right whose tokens are scored."""
    edges = [int(branch.scored[0]) if len(branch.scored) else max(len(branch.ids) - 1, 0) for branch in branches]
    left, right = (
        -(-most // PADDED_MULTIPLE) * PADDED_MULTIPLE
        for most in (max(edges), max(len(b.ids) - edge for b, edge in zip(branches, edges, strict=True)))
    )
    ids = np.full((len(branches), left + right), pad_id, dtype=np.int64)
    mask, places = np.zeros_like(ids), list[np.ndarray]()
    for row, (branch, edge) in enumerate(zip(branches, edges, strict=True)):
        where = slice(left - edge, left - edge + len(branch.ids))
        ids[row, where], mask[row, where] = branch.ids, 1
        places.append(row * right + branch.scored - edge)
    arguments = torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device), right
    return Packed.of(arguments, (len(samples), sample_tokens), branches, places, device)
