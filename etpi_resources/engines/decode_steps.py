"""Decoding on a GPU: one forward pass over all slots, one new id each, recorded as a CUDA graph and replayed.

A small model computes such a pass faster than Python launches its kernels; a replay launches them all at once. A pass
has the same shapes at every step, so idle slots take part: their id is written after their cached ids, and overwritten
before anything reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from etpi_resources.engines.slots import Slots, SlotView

Forward = Callable[[torch.Tensor, torch.Tensor, SlotView, torch.Tensor], torch.Tensor]
"""(ids (slots, 1), positions (slots, 1), cache, mask (slots, 1, 1, positions)) -> logits (slots, vocabulary)."""

STEP = 512
"""The lengths that graphs read are multiples of it."""


class DecodeSteps:
    """Decoding steps over all slots of a cache without recurrent layers.

    Args:
        forward: the model's pass; it must neither copy from the host nor wait for the GPU.
        capture: record CUDA graphs; False computes the same without.
    """

    def __init__(self, slots: Slots, forward: Forward, device: torch.device, *, capture: bool) -> None:
        self._slots, self._forward, self._capture = slots, forward, capture
        count = len(slots.cached_ids)
        self._ids = torch.zeros((count, 1), dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._ids)
        self._rows = torch.arange(count, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._length = 0

    def clear(self) -> None:
        """Forget the graphs: the model's weights may lie elsewhere now."""
        self._graphs.clear()

    def logits(self, ids: Mapping[int, int]) -> torch.Tensor:
        """Append an id to some slots' cached keys and values; return logits (slots, vocabulary) in float32.

        Args:
            ids: slot -> its next id. The logits of other slots mean nothing.
        """
        positions = [len(cached) for cached in self._slots.cached_ids]
        self._slots.reserve(max(positions) + 1)
        if self._slots.length != self._length:  # keys and values were moved
            self.clear()
            self._length = self._slots.length
        upto = min(-(-(max(positions) + 1) // STEP) * STEP, self._length)
        new = [ids.get(slot, 0) for slot in range(len(positions))]
        self._ids.copy_(torch.tensor(new)[:, None])
        self._positions.copy_(torch.tensor(positions)[:, None])
        if not self._capture:
            return self._step(upto)
        if upto not in self._graphs:
            self._graphs[upto] = self._record(upto)
        graph, logits = self._graphs[upto]
        graph.replay()
        return logits

    def _step(self, upto: int) -> torch.Tensor:
        view = SlotView(self._slots, range(len(self._rows)), self._positions, upto, tensor=self._rows)
        mask = torch.arange(upto, device=self._rows.device) <= self._positions[:, None, :, None]
        return self._forward(self._ids, self._positions, view, mask)

    def _record(self, upto: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        self._step(upto)  # kernels are loaded and libraries take their workspace before the recording
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            logits = self._step(upto)
        return graph, logits
