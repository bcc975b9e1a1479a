"""Options of `vllm serve` that etpi reads and sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PARALLEL = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
_SHORT = {"tp": _PARALLEL[0], "pp": _PARALLEL[1], "dp": _PARALLEL[2]}
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for --max-lora-rank."""


def named(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options by vLLM's names, such as `tensor-parallel-size`, however a spec spells them."""
    return {name.replace("_", "-").removeprefix("--"): value for name, value in options.items()}


def accelerators_of(options: Mapping[str, Any]) -> int:
    """Return how many accelerators one server of these options takes."""
    number = 1
    for name, value in named(options).items():
        if _SHORT.get(name, name) in _PARALLEL:
            number *= int(value)
    return number


def lora_options(rank: int) -> dict[str, Any]:
    """Return the options of a server for adapters of this rank or less."""
    return {"enable-lora": True, "max-lora-rank": next((r for r in _LORA_RANKS if r >= rank), rank)}
