"""Replicas of a model that run the micro-batches of a step at the same time, one thread per replica.

A small model leaves a second thread within one operation mostly idle, so on a CPU a step's batch is split and each part
goes through a replica of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

Part = TypeVar("Part")
Result = TypeVar("Result")

REPLICAS = 2
"""Number of replicas; not the number of cores, because the result must not depend on the machine."""


class ThreadReplicas:
    """Replicas of a model that share its weights; each has its own gradients and its own thread."""

    def __init__(self, model: Any) -> None:
        self._replicas = [model, *(copy.deepcopy(model) for _ in range(REPLICAS - 1))]
        for replica in self._replicas[1:]:
            for shared, parameter in zip(model.parameters(), replica.parameters(), strict=True):
                parameter.data = shared.data
                parameter.grad = None
        threads = max(1, torch.get_num_threads() // REPLICAS)
        torch.set_num_threads(threads)
        self._pool = ThreadPoolExecutor(REPLICAS, initializer=torch.set_num_threads, initargs=(threads,))

    def backward(self, parts: Sequence[Part], run: Callable[[Any, Part], Result]) -> list[Result]:
        """Add the gradients of every part to the model's own; return the results of `run` in order.

        Args:
            run: (model, part) -> result; runs in a thread and calls backward on the model it is given.
        """
        results: list[Result] = []
        for start in range(0, len(parts), REPLICAS):
            concurrent = parts[start : start + REPLICAS]
            used = self._replicas[: len(concurrent)]
            jobs = [self._pool.submit(run, *pair) for pair in zip(used, concurrent, strict=True)]
            results += [job.result() for job in jobs]
            for replica in used[1:]:
                self._add_gradients(replica)
        return results

    def _add_gradients(self, replica: Any) -> None:
        """Move a replica's gradients to the model."""
        for parameter, copied in zip(self._replicas[0].parameters(), replica.parameters(), strict=True):
            if copied.grad is not None:
                parameter.grad = copied.grad if parameter.grad is None else parameter.grad.add_(copied.grad)
                copied.grad = None


def uses_dropout(model: Any) -> bool:
    """Return whether a training pass samples dropout; threads would sample it in another order each time."""
    probabilities = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    text = model.config.get_text_config()
    return any(probabilities) or bool(getattr(text, "attention_dropout", 0.0))
