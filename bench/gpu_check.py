"""Check what only a GPU can show: `make gpu-check`, or `python bench/gpu_check.py [--small] [--to FILE] [PART ...]`.

Parts, each in a process of its own; one whose packages or GPUs are missing is skipped by name:

- matmul: the machine's rate of bfloat16 matrix products, which the others are shares of;
- sft: full fine-tuning of a random model of Qwen3-4B's shape on conversations that fork at every turn, packed as trees;
  its peak memory beside the rehearsal's estimate;
- layers: the same with norms, rotary positions and gated layers by Liger's kernels, which must agree;
- liger: the same with the losses by Liger's kernel, which must agree;
- kept: as layers, with activations kept instead of computed again (no gradient checkpointing);
- trl, trl_liger, trl_kept: the same turns as one row each in TRL's SFTTrainer, so the same tokens are trained, without
  and with Liger's kernels, and as kept; the first losses must agree;
- grpo: a GRPO update of a group packed as a tree, and the same as rows in TRL; the gradient norms must agree; then the
  policy's weights are merged and written as they are handed over;
- repeat: two runs of reinforcement with rollouts by the in-process engine, as with `rl.repeatable`; they must be equal
  to the digit;
- hand_over: a vLLM server takes the weights of a policy and proves them by its log-probabilities;
- shards: a model of at most eight layers trained in two processes, a GPU each, against one process.

A model that does not fit gets fewer layers, and says so. `--small` has tiny shapes and runs on a CPU. The package index
and the network are not needed. The figures are printed and written as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from gpu_parts import FULL, PARTS, SMALL, Figures, Skipped
from machine import machine

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SECONDS = 240
"""The most that one part may take."""
DEADLINE = 530
"""Seconds after which no part begins."""
SAME = {"bf16": 2e-2, "fp32": 1e-4}
"""Largest relative difference of figures that rounding explains."""


def run_part(name: str, small: bool) -> Figures:
    """Run one part in this process; a package that is missing skips it."""
    try:
        import torch

        gpu = torch.cuda.is_available()
        if not (gpu or small):
            raise Skipped("torch sees no GPU; --small runs on a CPU")
        with tempfile.TemporaryDirectory() as folder:
            return PARTS[name](SMALL if small else FULL, gpu, Path(folder))
    except ModuleNotFoundError as missing:
        return {"skipped": f"no package {missing.name}" if missing.name else str(missing)}
    except Skipped as reason:
        return {"skipped": str(reason)}


def run_apart(name: str, small: bool, seconds: float) -> Figures:
    """Run one part in a process of its own, for at most so many seconds."""
    if seconds <= 0:
        return {"skipped": f"no time left of {DEADLINE} s"}
    command = [sys.executable, __file__, "--one", name, *(["--small"] if small else [])]
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"it took more than {seconds:.0f} s"}
    if done.returncode:
        return {"failed": "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])}
    return json.loads(done.stdout.splitlines()[-1])


def derived(parts: dict[str, Figures], precision: str) -> Figures:
    """Return the figures that compare parts, of those that ran; raises AssertionError if two must agree and do not."""
    ran = {name: part for name, part in parts.items() if not part.keys() & {"skipped", "failed"}}
    figures: Figures = {}

    def agree(what: str, one: float, other: float) -> None:
        assert abs(one - other) <= SAME[precision] * abs(other), f"{what}: {one} and {other} should agree"

    if {"matmul", "sft"} <= ran.keys():
        figures["sft_share_of_matmul"] = ran["sft"]["tflops"] / ran["matmul"]["tflops"]
    if {"sft", "trl"} <= ran.keys():
        agree("losses of trees and of rows", ran["sft"]["loss"], ran["trl"]["loss"])
        figures["sft_times_faster_than_trl"] = ran["trl"]["seconds_a_step"] / ran["sft"]["seconds_a_step"]
        figures["rows_tokens_for_tree_tokens"] = ran["trl"]["tokens_a_step"] / ran["sft"]["tokens_a_step"]
    if {"sft", "liger"} <= ran.keys():
        agree("losses of Liger and of tiles", ran["liger"]["loss"], ran["sft"]["loss"])
        figures["liger_times_faster_than_tiles"] = ran["sft"]["seconds_a_step"] / ran["liger"]["seconds_a_step"]
        figures["liger_gib_less_than_tiles"] = ran["sft"]["peak_gib"] - ran["liger"]["peak_gib"]
    if {"sft", "layers"} <= ran.keys():
        agree("losses of fused layers and of PyTorch's", ran["layers"]["loss"], ran["sft"]["loss"])
        figures["layers_times_faster_than_torch"] = ran["sft"]["seconds_a_step"] / ran["layers"]["seconds_a_step"]
    for part, baseline in (("layers", "trl_liger"), ("kept", "trl_kept")):
        if {part, baseline} <= ran.keys():
            agree(f"losses of {part} and of {baseline}", ran[part]["loss"], ran[baseline]["loss"])
            seconds = [ran[name]["seconds_a_step"] for name in (baseline, part)]
            figures[f"{part}_times_faster_than_{baseline}"] = seconds[0] / seconds[1]
    if {"matmul", "kept"} <= ran.keys():
        figures["kept_share_of_matmul"] = ran["kept"]["tflops"] / ran["matmul"]["tflops"]
    if "sft" in ran and ran["sft"]["peak_gib"]:
        figures["memory_measured_for_estimated"] = ran["sft"]["peak_gib"] / ran["sft"]["estimated_gib"]
    if "grpo" in ran:
        agree("gradient norms of tree and of rows", ran["grpo"]["tree_grad_norm"], ran["grpo"]["rows_grad_norm"])
        grpo_seconds = [ran["grpo"][f"{way}_seconds_a_step"] for way in ("rows", "tree")]
        figures["grpo_times_faster_than_trl"] = grpo_seconds[0] / grpo_seconds[1]
    if "repeat" in ran:
        assert ran["repeat"]["same_weights"], f"two runs are not equal: {ran['repeat']}"
    if "shards" in ran:
        agree("losses of one and of two processes", ran["shards"]["loss_of_two"], ran["shards"]["loss"])
        seconds = [ran["shards"][f"seconds_a_step_{count}"] for count in (1, 2)]
        figures["two_processes_times_faster_than_one"] = seconds[0] / seconds[1]
    return figures


def device() -> str:
    try:
        import torch
    except ModuleNotFoundError:
        return "no torch"
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def main() -> int:
    """Run the parts, print and write their figures; return 1 if one failed, two do not agree, or none could run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--small", action="store_true", help="tiny shapes, which a CPU can do")
    parser.add_argument("--to", type=Path, default=ROOT / "bench" / "gpu_check.json", help="file of the figures")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_part(options.one, options.small)))
        return 0
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    print(machine(), flush=True)
    where, parts, deadline = device(), dict[str, Figures](), time.monotonic() + DEADLINE
    conditions = {"machine": machine(), "device": where, "size": asdict(SMALL if options.small else FULL)}
    for name in options.parts or PARTS:
        began = time.monotonic()
        parts[name] = run_apart(name, options.small, min(SECONDS, deadline - began))
        print(f"{name} ({time.monotonic() - began:.0f} s): {_shown(parts[name])}", flush=True)
        options.to.write_text(json.dumps({**conditions, "parts": parts}, indent=1) + "\n")
    failed = [name for name, figures in parts.items() if "failed" in figures]
    try:
        compared = derived(parts, "fp32" if where == "cpu" else "bf16")
    except AssertionError as error:
        compared, failed = {"failed": str(error)}, [*failed, "agreement"]
    print(f"compared: {_shown(compared)}")
    options.to.write_text(json.dumps({**conditions, "parts": parts, "compared": compared}, indent=1) + "\n")
    nothing_ran = all("skipped" in figures for figures in parts.values())
    return 1 if failed or nothing_ran else 0


def _shown(figures: Figures) -> str:
    return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())


if __name__ == "__main__":
    sys.exit(main())
