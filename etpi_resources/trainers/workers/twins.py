"""The micro-batches of a step at once, each in a thread of its own.

Belongs here: running them and adding up their gradients. Does not belong here: the loss, or what a micro-batch is.

A small model leaves a second thread of one operation mostly idle, so on a CPU a step's batch is halved and each half
goes through the model in a thread of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

Part = TypeVar("Part")
Found = TypeVar("Found")

PARTS = 2
"""Micro-batches at once; not the number of cores, on which the result must not depend."""


class Twins:
    """A model PARTS times over: one memory of weights, gradients each of its own, a thread each."""

    def __init__(self, model: Any) -> None:
        self._twins = [model, *(copy.deepcopy(model) for _ in range(PARTS - 1))]
        for twin in self._twins[1:]:
            for mine, own in zip(model.parameters(), twin.parameters(), strict=True):
                own.data = mine.data
                own.grad = None
        threads = max(1, torch.get_num_threads() // PARTS)
        torch.set_num_threads(threads)
        self._pool = ThreadPoolExecutor(PARTS, initializer=torch.set_num_threads, initargs=(threads,))

    def backward(self, parts: Sequence[Part], learn: Callable[[Any, Part], Found]) -> list[Found]:
        """Add the gradients of every part to the model's own; what `learn` returned, in order.

        Args:
            learn: (model, part) -> anything; it goes backward through the model it is given, in a thread.
        """
        found: list[Found] = []
        for at in range(0, len(parts), PARTS):
            at_once = parts[at : at + PARTS]
            used = self._twins[: len(at_once)]
            jobs = [self._pool.submit(learn, *given) for given in zip(used, at_once, strict=True)]
            found += [job.result() for job in jobs]
            for twin in used[1:]:
                self._take(twin)
        return found

    def _take(self, twin: Any) -> None:
        for parameter, own in zip(self._twins[0].parameters(), twin.parameters(), strict=True):
            if own.grad is not None:
                parameter.grad = own.grad if parameter.grad is None else parameter.grad.add_(own.grad)
                own.grad = None


def draws(model: Any) -> bool:
    """Whether a pass in training draws random numbers (dropout): threads would draw them in another order each time."""
    rates = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    text = model.config.get_text_config()
    return any(rates) or bool(getattr(text, "attention_dropout", 0.0))
