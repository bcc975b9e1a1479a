"""The family `cooperbench_perturbed`: CooperBench's tasks, and variants of each training task under other names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from etpi_assets.tasks.cooperbench import CooperBench
from etpi_assets.tasks.family import RejectedInput, Task
from etpi_lab.perturbed.perturb import perturb

ETPI_VERSION = 1
"""The number of this family's code: raise it where tasks, rollouts or verdicts differ."""
VARIANTS = 4
"""Variants of a task, where the suite's `params.variants` gives no number."""


class PerturbedCooperBench(CooperBench):
    """The family `cooperbench_perturbed`, for templated sets."""

    def load(self, suite: str, seed: int, params: Mapping[str, Any]) -> Iterator[Task | RejectedInput]:
        """Yield each task of `cooperbench`, and after it its variants; held-out tasks have none.

        Raises:
            ValueError: the suite has a sandbox: texts are renamed, and a task's repository keeps its names.
        """
        base_params = {name: value for name, value in params.items() if name != "variants"}
        if self.sandbox(base_params):
            raise ValueError(
                f"suite {suite}: params.sandbox: a repository keeps the names that variants change; use cooperbench"
            )
        for item in super().load(suite, seed, base_params):
            yield item
            if isinstance(item, Task) and item.split == "train":
                yield from (perturb(item, number) for number in range(1, int(params.get("variants", VARIANTS)) + 1))


FAMILY = PerturbedCooperBench()
