"""Describe the machine in one line, which every benchmark prints first.

It has the CPU model, relevant instruction sets, cores, and the variables that limit libraries."""

from __future__ import annotations

import os
from pathlib import Path

INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8", "amx_tile")
"""Flags of /proc/cpuinfo that decide how PyTorch and oneDNN multiply matrices."""
LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
"""Environment variables that make PyTorch and oneDNN use less than the CPU has."""


def machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the line, for example `AMD EPYC 7763; avx2; 2 cores`."""
    model, flags = read_cpu(cpuinfo.read_text())
    parts = [model, " ".join(flags) or "none of " + " ".join(INSTRUCTION_SETS), f"{os.cpu_count()} cores"]
    parts += [f"{name}={os.environ[name]}" for name in LIMITS if name in os.environ]
    return "machine: " + "; ".join(parts)


def read_cpu(cpuinfo: str) -> tuple[str, list[str]]:
    """Return the model name and INSTRUCTION_SETS of the first CPU in a /proc/cpuinfo."""
    fields = dict[str, str]()
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags", "").split()
    return fields.get("model name", "CPU of no stated model"), [name for name in INSTRUCTION_SETS if name in flags]


if __name__ == "__main__":
    print(machine())
