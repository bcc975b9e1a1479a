"""Growing a prefix tree from training rows.

Belongs here: where a row's input leaves the tree, and the flat layout. Does not belong here: which rows share a tree
(`merge`), or what the layout means (`etpi_resources.prefix_tree`).

A row's input follows the tree as far as their tokens agree; what is left of it and its output grow a new branch there.
An output is never laid over tokens that stand there already, so each learnt token is one row's, and a span of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from etpi_resources.prefix_tree import PrefixTree
from etpi_resources.token_ids import common_prefix

Row = Mapping[str, Any]


@dataclass
class _Node:
    """Tokens [start, end) in the order they came, continued by its children."""

    start: int
    end: int
    children: list[_Node] = field(default_factory=list)

    def subtree(self: _Node) -> list[_Node]:
        """Itself and its descendants, each before its children."""
        found: list[_Node] = [self]
        for node in found:
            found.extend(node.children)
        return found


@dataclass(frozen=True)
class Match:
    """How far an input follows a tree: `tokens` of it, ending `offset` tokens into `node`."""

    tokens: int
    offset: int
    node: _Node | None


class GrowingTree:
    """A prefix tree that takes one row after the other."""

    def __init__(self) -> None:
        self._ids = np.empty(0, dtype=np.int32)
        self._root: _Node | None = None
        self._spans: list[tuple[int, int, Row]] = []
        self.size = 0

    def match(self, prompt: np.ndarray) -> Match:
        """How far the tree has the prompt; the deepest way where there are several, the oldest of equals."""
        best = Match(0, 0, None)
        ways = [(self._root, 0)] if self._root else []
        for node, at in ways:
            own = self._ids[node.start : node.end]
            here = common_prefix(own, prompt[at:])
            if at + here > best.tokens:
                best = Match(at + here, here, node)
            if here == len(own) and at + here < len(prompt):
                ways += [(c, at + here) for c in node.children if self._ids[c.start] == prompt[at + here]]
        return best

    def add(self, prompt: np.ndarray, output: np.ndarray, row: Row, match: Match) -> None:
        """Grow by a row, where `match` says its prompt leaves the tree as it stands now."""
        first = self.size
        self._append(np.concatenate([prompt[match.tokens :], output]))
        self._spans.append((self.size - len(output), self.size, row))
        grown = _Node(first, self.size)
        node = match.node
        if node is None:
            assert self._root is None, "a prompt that shares nothing with a tree has no place in it"
            self._root = grown
            return
        cut = node.start + match.offset
        if cut < node.end:
            node.children = [_Node(cut, node.end, node.children)]
            node.end = cut
        node.children.append(grown)

    def _append(self, ids: np.ndarray) -> None:
        if self.size + len(ids) > len(self._ids):
            self._ids = np.resize(self._ids, max(2 * len(self._ids), self.size + len(ids)))
        self._ids[self.size : self.size + len(ids)] = ids
        self.size += len(ids)

    def lay_out(self) -> tuple[np.ndarray, PrefixTree, list[tuple[int, int, Row]]]:
        """The tokens (int32) in depth-first order, their tree, and (start, end, row) of each output in it, in order.

        Of a node's children the one that goes on with an output stands first, so that every output is one range; then
        those with more tokens below them, so that attention reads the longest branch in one piece.
        """
        assert self._root is not None, "a tree of no rows has no layout"
        weight = {id(node): node.end - node.start for node in self._root.subtree()}
        for node in reversed(self._root.subtree()):
            weight[id(node)] += sum(weight[id(child)] for child in node.children)
        new_index = np.empty(self.size, dtype=np.int64)
        starts: list[int] = []
        parents: list[int] = []
        at = 0
        pending: list[tuple[_Node, int, bool]] = [(self._root, -1, True)]
        while pending:
            node, parent, begins = pending.pop()
            if begins:
                starts.append(at)
                parents.append(parent)
            own = node.end - node.start
            new_index[node.start : node.end] = np.arange(at, at + own)
            at += own
            order = sorted(node.children, key=lambda c: (not self._goes_on(node, c), -weight[id(c)], c.start))
            # An only child is no fork: it goes on with its parent's node.
            pending += [(child, len(starts) - 1, len(order) > 1) for child in reversed(order)]
        ids = np.empty(self.size, dtype=np.int32)
        ids[new_index] = self._ids[: self.size]
        spans = []
        for first, last, row in self._spans:
            start, end = int(new_index[first]), int(new_index[last - 1]) + 1
            assert end - start == last - first, "an output stands in one piece"
            spans.append((start, end, row))
        return ids, _with_positions(starts, parents, self.size), sorted(spans, key=lambda span: span[0])

    def _goes_on(self, node: _Node, child: _Node) -> bool:
        """Whether an output crosses from the node into the child."""
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
