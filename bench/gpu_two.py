"""Check reinforcement on two GPUs: `python bench/gpu_two.py`; `--cpu` runs a part on a tiny model.

Three steps of 16 rollouts of the base on 16 tasks, the asset `rl_checkpoint` alone:

- one: one process, rollouts by the in-process engine;
- ddp: two processes, as one else;
- sharded: two processes with FSDP2, two vLLM servers on the same GPUs that sleep in training;
- apart: one process on GPU 0, a vLLM server on GPU 1, with `rl.correction`.

Expected of every stage, or the script fails: staleness 0; log-probs of rollouts within the bound of `docs/rl.md` from
the trainer's; importance weights of 1 on average (to 0.05); in the first step no distance from the reference; of `ddp`
the first rollouts of `one`, and after the first update its distance from the reference (to 20%). Expected on two H100,
and printed alone: `update_seconds` of `ddp` and `sharded` below those of `one`, `publish_seconds` below 5.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

from gpu_run import machine

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

RL = {"steps": 3, "device_batch": 8, "accumulate": 2, "warmup_steps": 0, "group_size": 4, "beta": 0.04}
REWARDS = [{"function": "conciseness_unhardened", "params": {"free": 0, "scale": 100}}]
"""A reward with variance whatever a model writes."""
ONLY_RL = {"train": {"method": "none"}, "evaluate": "none"}
OPTIONS = {"gpu-memory-utilization": 0.3, "max-model-len": 1024}
BY_VLLM = {"engine": "vllm", "repeatable": False, "options": OPTIONS}
STAGES: dict[str, dict[str, Any]] = {
    "one": {},
    "ddp": {"processes": 2, "accumulate": 1},
    "sharded": {"processes": 2, "accumulate": 1, "sharded": True, "servers": 2, "placement": "shared", **BY_VLLM},
    "apart": {"correction": "token_truncate", **BY_VLLM},
}
ON_A_CPU = ("one", "ddp")


def spec_of(name: str, cpu: bool) -> dict[str, Any]:
    """Return the spec of a stage."""
    base = "terminal_grpo_tiny" if cpu else "terminal_grpo_smol"
    rl = {**RL, "rewards": REWARDS, "repeatable": True, **STAGES[name]}
    return {"extends": base, "title": f"two GPUs: {name}", **ONLY_RL, "rl": rl}


def reinforce(folder: Path, name: str, cpu: bool) -> None:
    """Make the inputs of a stage and its `rl_checkpoint`."""
    import tomlkit

    from etpi_assets.asset import asset_definitions
    from etpi_assets.resources import Resources
    from etpi_assets.tasks.table import task_table
    from etpi_assets.worlds.terminal_tiny.generate import generate_tasks
    from etpi_resources.lake.lake import Lake, Ref
    from etpi_resources.lake.schemas import empty

    experiment, specs = f"gpu_two_{name}", folder / "specs"
    (specs / "experiments").mkdir(parents=True, exist_ok=True)
    (specs / "experiments" / f"{experiment}.toml").write_text(tomlkit.dumps(spec_of(name, cpu)))
    lake = Lake(folder / "data")
    tasks = {"tasks": task_table(list(islice(generate_tasks("terminal_tiny", 0, "train"), 16)))}
    nothing = {table: empty(table) for table in ("checkpoints", "training_log")}
    inputs: dict[str, Any] = {"input_key": "x", "inputs": {}, "spec_hash": "x"}
    lake.publish(Ref("tasks", "suite", "terminal_tiny"), {**tasks, "quarantined": empty("quarantined")}, **inputs)
    lake.publish(Ref("sft_checkpoint", "experiment", experiment), nothing, **inputs)
    for asset in ("base_checkpoint", "rl_checkpoint"):
        outcome = asset_definitions()[asset].execute(experiment, Resources(lake=lake, specs_folder=specs), log=print)
        if outcome.manifest.blocked:
            raise RuntimeError(f"{asset} is blocked: {outcome.manifest.failures}")


def recorded(folder: Path, name: str) -> dict[str, Any]:
    """Return the log of a stage, and the ids that it sampled in its first round."""
    from etpi_resources.lake.lake import Lake, Ref

    def rows(table: str) -> list[dict[str, Any]]:
        return Lake(folder / "data").read(Ref("rl_checkpoint", "experiment", f"gpu_two_{name}"), table).to_pylist()

    first = {row["rollout_id"]: row["place"] for row in rows("rl_samples") if row["step"] == 0}
    ids = {row["rollout_id"]: row["output_ids"] for row in rows("turns")}  # one turn a rollout
    return {"log": rows("training_log"), "turns": [ids[rollout] for rollout in sorted(first, key=first.__getitem__)]}


def faults(name: str, run: dict[str, Any], one: dict[str, Any], bound: float) -> list[str]:
    """Return what a stage shows that is not expected.

    Args:
        one: the run of the stage `one`. bound: of log-probs, in nats a token.
    """
    log, faults = run["log"], []
    if any(line["staleness_max"] for line in log):
        faults.append("rollouts are of earlier weights")
    if (gap := max(line["logprob_gap"] for line in log)) > bound:
        faults.append(f"log-probs of rollouts differ by {gap:.2g}")
    if log[0]["kl"] > 1e-2:
        faults.append(f"the first step is {log[0]['kl']:.2g} from the reference")
    if any(abs((line["weight_mean"] or 1.0) - 1.0) > 0.05 for line in log):
        faults.append("importance weights are not 1 on average")
    if name == "ddp":
        if run["turns"] != one["turns"]:
            faults.append("its first rollouts are not those of one process")
        moved, expected = log[1]["kl"], one["log"][1]["kl"]
        if not 0.8 * expected < moved < 1.2 * expected:
            faults.append(f"its first update moves the policy by {moved:.4g}, that of one process by {expected:.4g}")
    return faults


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="one and ddp, with a tiny model")
    parser.add_argument("--folder", type=Path, default=Path(".gpu-two"), help="lake, specs, logs and results")
    arguments = parser.parse_args()
    cpu, folder = arguments.cpu, arguments.folder.resolve()
    if not cpu and torch.cuda.device_count() < 2:
        print(f"torch sees {torch.cuda.device_count()} GPUs, and this needs two; --cpu runs a part")
        return 0
    print(machine(cpu), flush=True)
    results: dict[str, Any] = {}
    runs: dict[str, dict[str, Any]] = {}
    for name in ON_A_CPU if cpu else STAGES:
        began = time.monotonic()
        try:
            reinforce(folder, name, cpu)
            runs[name] = recorded(folder, name)
            result = "; ".join(faults(name, runs[name], runs["one"], 0.005 if cpu else 0.1)) or "as expected"
        except Exception as error:  # the other stages say more
            result = f"{type(error).__name__}: {error}"
        shown = ("rollout_seconds", "update_seconds", "publish_seconds", "logprob_gap", "kl", "loss")
        last = {key: runs[name]["log"][-1][key] for key in shown} if name in runs else {}
        results[name] = {"result": result, "seconds": round(time.monotonic() - began, 1), **last}
        print(f"{name:8} {json.dumps(results[name], indent=1)}", flush=True)
        (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    return int(any(result["result"] != "as expected" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
