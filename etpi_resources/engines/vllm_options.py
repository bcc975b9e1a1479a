"""Options of `vllm serve` that etpi reads and sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from etpi_resources.engines import EngineUnavailable

_CODE = (
    "trust-remote-code", "tool-parser-plugin", "reasoning-parser-plugin", "logits-processors", "worker-cls",
    "worker-extension-cls", "scheduler-cls", "middleware", "io-processor-plugin", "config", "compilation-config",
    "speculative-config", "kv-transfer-config", "ec-transfer-config", "additional-config",
    "distributed-executor-backend",
)  # fmt: skip
"""Options that name a class, a file or a package of code, or a file or table of further options."""

_HARMLESS: Mapping[str, set[str]] = {
    "compilation-config": {"mode", "level", "cudagraph_mode", "cudagraph_capture_sizes"},
    "distributed-executor-backend": {"mp", "ray", "uni"},
}
"""The keys of a table, or the values, with which such an option names no code."""

_PARALLEL = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
_SHORT = {"tp": _PARALLEL[0], "pp": _PARALLEL[1], "dp": _PARALLEL[2]}
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for --max-lora-rank."""


def named(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options by vLLM's names, such as `tensor-parallel-size`, however a spec spells them."""
    return {name.replace("_", "-").removeprefix("--"): value for name, value in options.items()}


def code_options(options: Mapping[str, Any]) -> list[str]:
    """Return the options that make vLLM load and run code which they name. vLLM takes the beginning of a name, too."""
    return [
        name
        for name, value in named(options).items()
        if name != "reasoning-parser"  # whose name is the beginning of another
        and any(code.startswith(name.partition(".")[0]) for code in _CODE)
        and value not in (False, None)
        and not set(value if isinstance(value, Mapping) else [str(value)]) <= _HARMLESS.get(name, set())
    ]


def require_allowed(options: Mapping[str, Any], allow_code: bool) -> None:
    """Raise ValueError for options that load code in a section of a spec without `allow_code = true`."""
    if not allow_code and (names := code_options(options)):
        raise ValueError(
            f"the options {', '.join(names)} run code on the machine; set allow_code = true beside them if you trust "
            "it, and start with `etpi run --allow-code`"
        )


def require_consent(options: Mapping[str, Any]) -> None:
    """Raise EngineUnavailable for options that load code, unless this user allows that (`etpi run --allow-code`)."""
    if (names := code_options(options)) and os.environ.get("ETPI_ALLOW_CODE") != "1":
        raise EngineUnavailable(
            f"the server's options {', '.join(names)} run code that the spec names, as you, on this machine. If you "
            f"trust it, start with `etpi run --allow-code` (ETPI_ALLOW_CODE=1 for Dagster's page)"
        )


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
