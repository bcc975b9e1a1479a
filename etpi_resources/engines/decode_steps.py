"""Decoding on a GPU: a forward pass of one new id per conversation, recorded as a CUDA graph and replayed.

A small model computes such a pass faster than Python launches its kernels; a replay launches them all at once. A graph
has fixed shapes, so there is one for each number of rows and length, and idle slots fill up the rows: their id is
written after their cached ids, and overwritten before anything reads it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from etpi_resources.engines.slots import Slots, SlotView

_LOG = logging.getLogger(__name__)

Forward = Callable[[torch.Tensor, torch.Tensor, SlotView, torch.Tensor], torch.Tensor]
"""(ids (rows, 1), positions (rows, 1), cache, mask (rows, 1, 1, positions)) -> logits (rows, vocabulary)."""

LENGTHS = 512
"""The lengths that graphs read are multiples of it."""
FEWEST_ROWS = 8
"""The smallest graph's rows; the others have twice as many as the next smaller."""


class DecodeSteps:
    """Decoding steps over a cache without recurrent layers.

    Args:
        forward: the model's pass; it must neither copy from the host nor wait for the GPU.
        capture: record CUDA graphs; False computes the same without.
    """

    def __init__(self, slots: Slots, forward: Forward, device: torch.device, *, capture: bool) -> None:
        self._slots, self._forward, self._capture = slots, forward, capture
        count = len(slots.cached_ids)
        self._rows, self._ids, self._positions = (
            torch.zeros(count, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._length = 0

    def clear(self) -> None:
        """Forget the graphs: the model's weights may lie elsewhere now."""
        self._graphs.clear()

    def logits(self, ids: Mapping[int, int]) -> torch.Tensor:
        """Append an id to the cached keys and values of some slots.

        Args:
            ids: slot -> its next id.

        Returns:
            Logits (slots, vocabulary) in float32, in the order of `ids`; the next call overwrites them.
        """
        cached = [len(slot_ids) for slot_ids in self._slots.cached_ids]
        idle = sorted((slot for slot in range(len(cached)) if slot not in ids), key=cached.__getitem__)
        count = min(len(cached), max(FEWEST_ROWS, 1 << (len(ids) - 1).bit_length()))
        # All slots are in order, so that they are read in place.
        slots = list(range(count)) if count == len(cached) else [*ids, *idle[: count - len(ids)]]
        positions = [cached[slot] for slot in slots]
        self._slots.reserve(max(positions) + 1)
        if self._slots.length != self._length:  # keys and values were moved
            self.clear()
            self._length = self._slots.length
        upto = min(-(-(max(positions) + 1) // LENGTHS) * LENGTHS, self._length)
        new = [ids.get(slot, 0) for slot in slots]
        for store, values in ((self._rows, slots), (self._ids, new), (self._positions, positions)):
            store[:count].copy_(torch.tensor(values))
        return self._run(count, upto)[list(ids) if count == len(cached) else slice(len(ids))]

    def _run(self, count: int, upto: int) -> torch.Tensor:
        if self._capture and (count, upto) not in self._graphs:
            try:
                self._graphs[count, upto] = self._record(count, upto)
            except RuntimeError as error:
                _LOG.warning("decoding is not recorded as CUDA graphs, and so slower: %s", error)
                self._capture = False
        if not self._capture:
            return self._step(count, upto)
        graph, logits = self._graphs[count, upto]
        graph.replay()
        return logits

    def _step(self, count: int, upto: int) -> torch.Tensor:
        ids, positions = self._ids[:count, None], self._positions[:count, None]
        view = SlotView(self._slots, self._rows[:count], positions, upto)
        mask = torch.arange(upto, device=positions.device) <= positions[:, None, :, None]
        return self._forward(ids, positions, view, mask)

    def _record(self, count: int, upto: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        self._step(count, upto)  # kernels are loaded and libraries take their workspace before the recording
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            logits = self._step(count, upto)
        return graph, logits
