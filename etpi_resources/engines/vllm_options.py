"""Options of `vllm serve` that etpi reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PARALLEL = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
_SHORT = {"tp": _PARALLEL[0], "pp": _PARALLEL[1], "dp": _PARALLEL[2]}


def named(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options by vLLM's names, such as `tensor-parallel-size`, however a spec spells them."""
    return {name.replace("_", "-").removeprefix("--"): value for name, value in options.items()}


def accelerators_of(options: Mapping[str, Any]) -> int:
    """Return how many accelerators one server of these options takes."""
    number = 1
    for name, value in options.items():
        name = name.replace("_", "-").removeprefix("--")
        if _SHORT.get(name, name) in _PARALLEL:
            number *= int(value)
    return number
