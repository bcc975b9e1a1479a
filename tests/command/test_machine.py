"""The line about the machine that benchmarks print."""

from __future__ import annotations

from bench.machine import machine, read_cpu

CPUINFO = """processor\t: 0
model name\t: AMD EPYC 7763 64-Core Processor
flags\t\t: fpu sse2 avx avx2 fma

processor\t: 1
model name\t: another
flags\t\t: avx512f
"""


def test_model_and_instruction_sets_are_those_of_the_first_cpu():
    assert read_cpu(CPUINFO) == ("AMD EPYC 7763 64-Core Processor", ["avx2"])


def test_line_states_missing_instruction_sets_and_library_limits(tmp_path, monkeypatch):
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    (tmp_path / "cpuinfo").write_text("processor : 0\n")
    line = machine(tmp_path / "cpuinfo")
    assert line.startswith("machine: CPU of no stated model; none of avx2 ")
    assert line.endswith("ATEN_CPU_CAPABILITY=avx2")
