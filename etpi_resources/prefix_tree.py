"""The flat layout of a prefix tree of token sequences: nodes, branches, positions, and which token predicts which.

The tokens are in depth-first order: a node's children come after it, so a node and all its descendants are one range. A
branch is the path from the root to a leaf, and positions count along it. A token attends to the tokens before it in the
nodes of its own path, its own node included. With `tin` a node's number and `tout` one past the number of its last
descendant, that is the keys with tin[key] <= tin[query] < tout[key] that are not later in the flat order.

`etpi_assets.curation.prefix_trees` builds these trees from training rows; attention over them is in the trainer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

CHAIN: Mapping[str, Any] = {"node_starts": [0], "node_parents": [-1], "node_positions": [0]}
"""The node columns of a row of the table `sequences` that is one branch."""


@dataclass(frozen=True)
class PrefixTree:
    """Nodes over a flat sequence of `length` tokens; all arrays (nodes,) int64.

    Attributes:
        starts: index of each node's first token; nodes are numbered in this order.
        parents: the parent of each node, -1 for the root.
        positions: position of each node's first token in its branch.
    """

    starts: np.ndarray
    parents: np.ndarray
    positions: np.ndarray
    length: int

    @classmethod
    def chain(cls, length: int) -> PrefixTree:
        """Return the tree of one node."""
        return cls(*(np.asarray(column, dtype=np.int64) for column in CHAIN.values()), length=length)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> PrefixTree:
        """Return the tree of a row of the table `sequences`."""
        columns = (np.asarray(row[f"node_{name}"], dtype=np.int64) for name in ("starts", "parents", "positions"))
        return cls(*columns, length=len(row["input_ids"]))

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def has_branches(self) -> bool:
        return len(self.starts) > 1

    @property
    def leaves(self) -> int:
        """The number of branches."""
        return len(self) - len(set(self.parents.tolist()) - {-1})

    @cached_property
    def ends(self) -> np.ndarray:
        """One past each node's last token; (nodes,)."""
        return np.append(self.starts[1:], self.length)

    def subtree_ends(self) -> np.ndarray:
        """Return one past the last token of each node's last descendant; (nodes,)."""
        ends = self.ends.copy()
        for node in range(len(self) - 1, 0, -1):
            ends[self.parents[node]] = max(ends[self.parents[node]], ends[node])
        return ends

    def longest_first(self) -> tuple[PrefixTree, np.ndarray]:
        """Return the tree with, of siblings, the one with most tokens in its subtree first, and the index that each of
        its tokens has in this tree, (length,)."""
        below = self.subtree_ends() - self.starts
        children: dict[int, list[int]] = defaultdict(list)
        for node, parent in enumerate(self.parents.tolist()):
            children[parent].append(node)
        order, waiting = list[int](), [0]
        while waiting:
            node = waiting.pop()
            order.append(node)
            waiting += sorted(children[node], key=lambda child: (below[child], -child))
        number = {node: place for place, node in enumerate(order)} | {-1: -1}
        tokens = np.concatenate([np.arange(self.starts[node], self.ends[node]) for node in order])
        starts = np.cumsum([0, *(self.ends - self.starts)[order[:-1]]])
        parents = np.array([number[parent] for parent in self.parents[order].tolist()])
        return PrefixTree(starts, parents, self.positions[order], self.length), tokens

    def find_error(self) -> str | None:
        """Return which rule of the layout the arrays break, None if they break none."""
        if not len(self.starts) == len(self.parents) == len(self.positions) > 0:
            return "its node lists are empty or differ in length"
        if self.starts[0] != 0 or (self.ends <= self.starts).any():
            return "its nodes do not cover its tokens in order"
        if self.parents[0] != -1 or self.positions[0] != 0:
            return "its first node is not a root"
        for node in range(1, len(self)):
            parent = int(self.parents[node])
            if not 0 <= parent < node or parent not in self.path(node - 1):
                return f"node {node} is not among the descendants of its parent {parent}"
            if self.positions[node] != self.positions[parent] + self.ends[parent] - self.starts[parent]:
                return f"node {node} does not begin at the position where its parent {parent} ends"
        return None

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root to `node`."""
        path = [node]
        while self.parents[path[-1]] >= 0:
            path.append(int(self.parents[path[-1]]))
        return path[::-1]

    def path_tokens(self, node: int) -> np.ndarray:
        """Return the indices of the tokens from the root to the end of `node`, in order."""
        return np.concatenate([np.arange(self.starts[n], self.ends[n]) for n in self.path(node)])

    def token_positions(self) -> np.ndarray:
        """Return the position of each token in its branches; (length,)."""
        return np.arange(self.length) + np.repeat(self.positions - self.starts, self.ends - self.starts)

    def predicted_from(self) -> np.ndarray:
        """Return the index of the token that predicts each token, -1 for the first; (length,).

        It is the token before in the branch: for the first token of a node, the last token of its parent.
        """
        predictors = np.arange(-1, self.length - 1)
        predictors[self.starts[1:]] = self.ends[self.parents[1:]] - 1
        return predictors

    def branches(self) -> Iterator[tuple[np.ndarray, int]]:
        """Yield each branch in order: the indices of its tokens, and the length of the prefix that an earlier branch
        shares."""
        last_leaf = -1
        inner = set(self.parents.tolist())
        for leaf in range(len(self)):
            if leaf not in inner:
                path = self.path(leaf)
                repeated = sum(int(self.ends[n] - self.starts[n]) for n in path if n <= last_leaf)
                yield self.path_tokens(leaf), repeated
                last_leaf = leaf

    def branch_to(self, index: int) -> np.ndarray:
        """Return the indices of the tokens from the root to the token `index`, inclusive."""
        node = int(np.searchsorted(self.starts, index, side="right")) - 1
        tokens = self.path_tokens(node)
        return tokens[: len(tokens) - int(self.ends[node] - 1 - index)]
