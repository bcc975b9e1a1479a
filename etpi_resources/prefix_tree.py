"""A prefix tree of token sequences, laid out flat: what its nodes mean, and what follows from them.

Belongs here: the stored form's rules, positions, which token predicts which, who sees whom, and the branches. Does not
belong here: growing a tree from rows (`etpi_assets.curation.prefix_trees`), tensors or attention (the trainer).

The tokens stand in depth-first order, a node's children after it, so that a node and all its descendants are one range.
A branch is the path from the root to a leaf; positions continue along it. A token sees another if and only if that one
is not later in the flat order and its node is an ancestor or the node itself: with `tin` a node's number and `tout` one
past its last descendant's, tin[key] <= tin[query] < tout[key].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

CHAIN: Mapping[str, Any] = {"node_starts": [0], "node_parents": [-1], "node_positions": [0]}
"""The node columns of the table `sequences` where nothing forks."""


@dataclass(frozen=True)
class Tree:
    """Nodes of a flat sequence of `length` tokens; all arrays (nodes,) int64.

    Attributes:
        starts: index of each node's first token; nodes are numbered in this order.
        parents: the node that each continues, -1 for the root.
        positions: position of each node's first token in its branch.
    """

    starts: np.ndarray
    parents: np.ndarray
    positions: np.ndarray
    length: int

    @classmethod
    def chain(cls, length: int) -> Tree:
        """One node, nothing forks."""
        return cls(*(np.asarray(column, dtype=np.int64) for column in CHAIN.values()), length=length)

    @classmethod
    def stored(cls, row: Mapping[str, Any]) -> Tree:
        """The tree of a row of the table `sequences`."""
        columns = (np.asarray(row[f"node_{name}"], dtype=np.int64) for name in ("starts", "parents", "positions"))
        return cls(*columns, length=len(row["input_ids"]))

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def forks(self) -> bool:
        return len(self.starts) > 1

    @property
    def leaves(self) -> int:
        """How many branches it has."""
        return len(self) - len(set(self.parents.tolist()) - {-1})

    @cached_property
    def ends(self) -> np.ndarray:
        """One past each node's last token; (nodes,)."""
        return np.append(self.starts[1:], self.length)

    @cached_property
    def touts(self) -> np.ndarray:
        """One past the number of each node's last descendant; (nodes,)."""
        touts = np.arange(1, len(self) + 1)
        for node in range(len(self) - 1, 0, -1):
            touts[self.parents[node]] = max(touts[self.parents[node]], touts[node])
        return touts

    def fault(self) -> str | None:
        """What breaks the form, in words; None where nothing does."""
        if not len(self.starts) == len(self.parents) == len(self.positions) > 0:
            return "its node lists are empty or not of one length"
        if self.starts[0] != 0 or (self.ends <= self.starts).any():
            return "its nodes do not cover its tokens in order"
        if self.parents[0] != -1 or self.positions[0] != 0:
            return "its first node is no root"
        for node in range(1, len(self)):
            parent = int(self.parents[node])
            if not 0 <= parent < node or parent not in self.path(node - 1):
                return f"node {node} does not stand among the descendants of its parent {parent}"
            if self.positions[node] != self.positions[parent] + self.ends[parent] - self.starts[parent]:
                return f"node {node} does not begin where its parent {parent} ends"
        return None

    def path(self, node: int) -> list[int]:
        """The nodes from the root to `node`."""
        path = [node]
        while self.parents[path[-1]] >= 0:
            path.append(int(self.parents[path[-1]]))
        return path[::-1]

    def tokens(self, node: int) -> np.ndarray:
        """Indices of the tokens from the root to the end of `node`, in order."""
        return np.concatenate([np.arange(self.starts[n], self.ends[n]) for n in self.path(node)])

    def token_positions(self) -> np.ndarray:
        """Position of each token in its branches; (length,)."""
        return np.arange(self.length) + np.repeat(self.positions - self.starts, self.ends - self.starts)

    def sources(self) -> np.ndarray:
        """The token that each token is predicted from: the one before it in its branch, so for the first of a node the
        last of its parent; -1 for the root's first. (length,)"""
        sources = np.arange(-1, self.length - 1)
        sources[self.starts[1:]] = self.ends[self.parents[1:]] - 1
        return sources

    def branches(self) -> Iterator[tuple[np.ndarray, int]]:
        """Each branch in order: the indices of its tokens, and how many of the first of them an earlier branch has."""
        seen = -1
        inner = set(self.parents.tolist())
        for leaf in range(len(self)):
            if leaf not in inner:
                path = self.path(leaf)
                repeated = sum(int(self.ends[n] - self.starts[n]) for n in path if n <= seen)
                yield self.tokens(leaf), repeated
                seen = leaf

    def until(self, index: int) -> np.ndarray:
        """Indices of the tokens of a branch up to and with `index`."""
        node = int(np.searchsorted(self.starts, index, side="right")) - 1
        whole = self.tokens(node)
        return whole[: len(whole) - int(self.ends[node] - 1 - index)]
