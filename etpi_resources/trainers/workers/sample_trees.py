"""Pack the samples of a prompt as a prefix tree in one row, so that a policy update processes each prompt once.

The head that scores a row has one label per position. So each branch begins with a copy of the prompt's last token, and
the first token of every sample is predicted from its own branch.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from etpi_resources.labels import IGNORE_INDEX
from etpi_resources.prefix_tree import PrefixTree
from etpi_resources.trainers.workers.tree_attention import RowLayout, tree_arguments

ROW_MULTIPLE = 128
"""Rows are padded to a multiple of this number of tokens, so that they have few shapes."""


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


def pack_samples(input_ids: torch.Tensor, attention_mask: torch.Tensor, sample_tokens: int) -> PackedSamples:
    """Pack a batch of samples into one row.

    Ids and mask are (B, P + C): prompts are padded on the left to P tokens, samples on the right to C, `sample_tokens`.
    """
    rows, mask = input_ids.cpu().numpy(), attention_mask.cpu().numpy().astype(bool)
    edge = rows.shape[1] - sample_tokens
    groups: defaultdict[bytes, list[int]] = defaultdict(list)
    for number in range(len(rows)):
        groups[rows[number, :edge][mask[number, :edge]].tobytes()].append(number)
    places = np.zeros((len(rows), sample_tokens), dtype=np.int64)
    pieces: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    trees: list[PrefixTree] = []
    base = 0
    for members in groups.values():
        prompt = rows[members[0], :edge][mask[members[0], :edge]]
        trunk = prompt[:-1]
        starts, at = [0] * bool(len(trunk)), len(trunk)
        pieces.append(trunk)
        labels.append(np.full(len(trunk), IGNORE_INDEX))
        for number in members:
            sample = rows[number, edge:][mask[number, edge:]]
            places[number, : len(sample)] = base + at + np.arange(len(sample))
            pieces += [prompt[-1:], sample]
            labels += [sample, np.full(1, IGNORE_INDEX)]
            starts.append(at)
            at += 1 + len(sample)
        if len(trunk):
            trees.append(_fork(starts, len(trunk), at))
        else:
            trees += [PrefixTree.chain(end - start) for start, end in zip(starts, [*starts[1:], at], strict=True)]
        base += at
    length = -(-base // ROW_MULTIPLE) * ROW_MULTIPLE
    positions = np.concatenate([*[tree.token_positions() for tree in trees], np.arange(length - base)])
    ids, shifted = (_padded(x, length, fill) for x, fill in ((pieces, 0), (labels, IGNORE_INDEX)))
    device = input_ids.device
    layout = RowLayout.of(trees, length)
    return PackedSamples(
        {
            "input_ids": ids.to(device),
            "shift_labels": shifted.to(device),
            **tree_arguments(layout, torch.from_numpy(positions)[None].to(device)),
        },
        torch.from_numpy(places).to(device),
        torch.from_numpy(mask[:, edge:]).to(device),
    )


def _fork(starts: list[int], trunk: int, length: int) -> PrefixTree:
    """Return a tree of a trunk and branches that all start at the end of the trunk."""
    parents, positions = np.zeros(len(starts), dtype=np.int64), np.full(len(starts), trunk)
    parents[0], positions[0] = -1, 0
    return PrefixTree(np.array(starts, dtype=np.int64), parents, positions, length)


def _padded(pieces: list[np.ndarray], length: int, fill: int) -> torch.Tensor:
    flat = np.concatenate(pieces).astype(np.int64)
    return torch.from_numpy(np.pad(flat, (0, length - len(flat)), constant_values=fill))[None]
