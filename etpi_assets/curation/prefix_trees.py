"""Grows prefix trees from training rows and lays them out flat.

A row's input follows the tree as far as their tokens agree. The rest of the input, and the output, become a new branch
there. An output never reuses tokens of the tree, so every label belongs to one row and every output is one span.

`merge` decides which rows share a tree; `etpi_resources.prefix_tree` defines the flat layout.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from etpi_resources.prefix_tree import PrefixTree
from etpi_resources.token_ids import common_prefix

DatasetRow = Mapping[str, Any]
"""Values of a row of `dataset_rows`."""
Span = tuple[int, int, DatasetRow]
"""The tokens [start, end) of a row's output, and the row."""


@dataclass
class _GrowingNode:
    """Tokens [start, end) in the order they were added; its children continue them."""

    start: int
    end: int
    children: list[_GrowingNode] = field(default_factory=list)

    def subtree(self) -> list[_GrowingNode]:
        """Return the node and its descendants, each before its children."""
        nodes: list[_GrowingNode] = [self]
        for node in nodes:
            nodes.extend(node.children)
        return nodes


@dataclass(frozen=True)
class PrefixMatch:
    """Match of an input with a tree: its first `tokens` ids, ending `offset` tokens into `node`."""

    tokens: int
    offset: int
    node: _GrowingNode | None


class GrowingTree:
    """A prefix tree that takes one row at a time."""

    def __init__(self) -> None:
        self._ids = np.empty(0, dtype=np.int32)
        self._root: _GrowingNode | None = None
        # The nodes, while each continues the one before it. Then the ids lie in the order of the only branch, and a
        # match is one comparison; walking from node to node would cost a comparison for each row of the tree.
        self._chain: list[_GrowingNode] | None = []
        self._spans: list[Span] = []
        self.size = 0

    def match(self, prompt: np.ndarray) -> PrefixMatch:
        """Return the longest match of the prompt; of equally long ones, the oldest."""
        if self._chain is not None:
            shared = common_prefix(self._ids[: self.size], prompt)
            if not shared:
                return PrefixMatch(0, 0, None)
            node = self._chain[bisect_left(self._chain, shared, key=lambda node: node.end)]
            return PrefixMatch(shared, shared - node.start, node)
        best = PrefixMatch(0, 0, None)
        candidates = [(self._root, 0)] if self._root else []
        for node, at in candidates:
            node_ids = self._ids[node.start : node.end]
            shared = common_prefix(node_ids, prompt[at:])
            if at + shared > best.tokens:
                best = PrefixMatch(at + shared, shared, node)
            if shared == len(node_ids) and at + shared < len(prompt):
                following = prompt[at + shared]
                candidates += [(c, at + shared) for c in node.children if self._ids[c.start] == following]
        return best

    def add(self, prompt: np.ndarray, output: np.ndarray, row: DatasetRow, match: PrefixMatch) -> None:
        """Add a row at `match`, the match of its prompt in the tree as it is now."""
        first = self.size
        self._append(np.concatenate([prompt[match.tokens :], output]))
        self._spans.append((self.size - len(output), self.size, row))
        branch = _GrowingNode(first, self.size)
        node = match.node
        if self._chain is not None:
            if match.tokens == first:
                self._chain.append(branch)
            else:
                self._chain = None
        if node is None:
            assert self._root is None, "the prompt shares no token with the tree"
            self._root = branch
            return
        split = node.start + match.offset
        if split < node.end:
            node.children = [_GrowingNode(split, node.end, node.children)]
            node.end = split
        node.children.append(branch)

    def _append(self, ids: np.ndarray) -> None:
        if self.size + len(ids) > len(self._ids):
            self._ids = np.resize(self._ids, max(2 * len(self._ids), self.size + len(ids)))
        self._ids[self.size : self.size + len(ids)] = ids
        self.size += len(ids)

    def lay_out(self) -> tuple[np.ndarray, PrefixTree, list[Span]]:
        """Return the tokens (int32) in depth-first order, their tree, and the span of each output, in order.

        The child that continues an output comes first, so that every output is one range. The other children follow by
        the number of tokens below them, so that attention reads the longest branch in one piece.
        """
        assert self._root is not None, "the tree has no rows"
        new_index, starts, parents = self._depth_first(self._root)
        ids = np.empty(self.size, dtype=np.int32)
        ids[new_index] = self._ids[: self.size]
        spans = []
        for first, last, row in self._spans:
            start, end = int(new_index[first]), int(new_index[last - 1]) + 1
            assert end - start == last - first, "an output is one range"
            spans.append((start, end, row))
        return ids, _with_positions(starts, parents, self.size), sorted(spans, key=lambda span: span[0])

    def _depth_first(self, root: _GrowingNode) -> tuple[np.ndarray, list[int], list[int]]:
        """Return each token's index in depth-first order, (size,), and the starts and parents of the nodes there."""
        tokens_below = {id(node): node.end - node.start for node in root.subtree()}
        for node in reversed(root.subtree()):
            tokens_below[id(node)] += sum(tokens_below[id(child)] for child in node.children)
        new_index = np.empty(self.size, dtype=np.int64)
        starts: list[int] = []
        parents: list[int] = []
        at = 0
        pending: list[tuple[_GrowingNode, int, bool]] = [(root, -1, True)]
        while pending:
            node, parent, begins = pending.pop()
            if begins:
                starts.append(at)
                parents.append(parent)
            length = node.end - node.start
            new_index[node.start : node.end] = np.arange(at, at + length)
            at += length
            order = sorted(
                node.children, key=lambda c: (not self._continues_output(node, c), -tokens_below[id(c)], c.start)
            )
            # An only child is part of its parent's node in the flat layout.
            pending += [(child, len(starts) - 1, len(order) > 1) for child in reversed(order)]
        return new_index, starts, parents

    def _continues_output(self, node: _GrowingNode, child: _GrowingNode) -> bool:
        """Return whether an output crosses from the node into the child."""
        if child.start != node.end:
            return False
        at = bisect_right(self._spans, child.start, key=lambda span: span[0]) - 1
        return at >= 0 and self._spans[at][0] < child.start < self._spans[at][1]


def _with_positions(starts: list[int], parents: list[int], length: int) -> PrefixTree:
    ends = [*starts[1:], length]
    positions = [0]
    for parent in parents[1:]:
        positions.append(positions[parent] + ends[parent] - starts[parent])
    return PrefixTree(*(np.array(column, dtype=np.int64) for column in (starts, parents, positions)), length=length)
