"""A small world to reinforce in, and a run of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import psutil
import pytest

from etpi_assets.asset import asset_definitions
from etpi_assets.resources import Resources
from etpi_assets.tasks.table import task_table
from etpi_assets.worlds.terminal_tiny.generate import generate_tasks
from etpi_resources.lake.lake import Lake, Ref, folder_hash
from etpi_resources.lake.schemas import empty, from_rows
from tests.support.graph import EXPERIMENT, ROLLOUT_SET, SUITE, write_spec
from tests.support.waiting import until

ASSETS = asset_definitions()


RL = {
    "method": '"grpo"', "suite": '"small"', "steps": "4", "device_batch": "8", "accumulate": "1", "beta": "0.0",
    "learning_rate": "1e-3", "dtype": '"fp32"', "max_response_tokens": "12", "save_steps": "2",
    "agent": '{prompt = "terminal_tiny", action_format = "thinking_bash", max_steps = 1, max_tokens = 12, '
    "temperature = 0.9}",
    # A random policy earns none of the others; how long it babbles is a reward with variance.
    "rewards": '[{function = "conciseness_unhardened", params = {free = 0, scale = 100}}, {function = "format"}]',
}  # fmt: skip


def prepared(folder: Path, base: Path, name: str = "first", **rl: str) -> Lake:
    """A lake in which everything that rl_checkpoint of `name` reads stands, and specs beside it."""
    lake = Lake(folder / "data")
    write_spec(folder / "specs", "suites", "small", SUITE.replace("coop_tiny_shared", "terminal_tiny"))
    write_spec(folder / "specs", "rollout_sets", "few", ROLLOUT_SET)
    section = "\n".join(f"{key} = {value}" for key, value in {**RL, **rl}.items())
    text = f"{EXPERIMENT}pairs = {{strip_think = false}}\n[rl]\n{section}\n"
    write_spec(folder / "specs", "experiments", name, text)
    row = {
        "checkpoint_id": folder_hash(base), "experiment": name, "role": "base", "step": 0, "final": True,
        "method": "base", "path": str(base),
    }  # fmt: skip
    tasks = list(islice(generate_tasks("small", 0, "train"), 8))
    nothing = {"checkpoints": empty("checkpoints"), "training_log": empty("training_log")}
    for ref, tables in {
        Ref("base_checkpoint", "experiment", name): {"checkpoints": from_rows("checkpoints", [row])},
        Ref("sft_checkpoint", "experiment", name): nothing,
        Ref("tasks", "suite", "small"): {"tasks": task_table(tasks), "quarantined": empty("quarantined")},
    }.items():
        lake.publish(ref, tables, input_key="x", inputs={}, spec_hash="x")
    return lake


def make(folder: Path, lake: Lake, asset: str, name: str = "first"):
    resources = Resources(lake=lake, specs_folder=folder / "specs")
    return ASSETS[asset].execute(name, resources, log=lambda line: None)


def rows(lake: Lake, table: str, asset: str = "rl_checkpoint", name: str = "first") -> list[dict]:
    return lake.read(Ref(asset, "experiment", name), table).to_pylist()


_RUN = """
import sys
from pathlib import Path
from tests.support import reinforcement
folder = Path(sys.argv[1])
reinforcement.make(folder, reinforcement.Lake(folder / "data"), "rl_checkpoint")
"""


def kill_when(folder: Path, reached: Callable[[], object]) -> list[psutil.Process]:
    """Reinforce in another process, and kill it when `reached`; return its descendants of that moment."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen([sys.executable, "-c", _RUN, str(folder)], env=environment)
    until(lambda: reached() or run.poll() is not None, 240, every=0.01)
    assert run.poll() is None, "the run ended too early"
    owned = psutil.Process(run.pid).children(recursive=True)
    run.kill()
    run.wait()
    return owned


BY_VLLM = {"engine": '"vllm"'}


LORA = {"tuning": '"lora"', "lora_rank": "4", "lora_alpha": "8"}


def processes(lake: Lake, base: Path) -> list[psutil.Process]:
    """Workers of the lake and servers of the base, supervisors included."""
    found = [(p, " ".join(p.info["cmdline"] or ())) for p in psutil.process_iter(["cmdline"])]
    return [process for process, line in found if str(lake.root) in line or str(base) in line]


def own_statistics(lake: Lake) -> None:
    """Assert that the trainer's log-probs are those of sampling, and that its entropies have the mean that it logs."""
    turns = {turn["rollout_id"]: turn for turn in rows(lake, "turns")}  # one turn a rollout
    samples = rows(lake, "rl_samples")
    for sample in samples:
        sampled = turns[sample["rollout_id"]]["logprobs"]
        assert len(sampled) == len(sample["policy_logprobs"]) == len(sample["entropies"]) == sample["policy_tokens"]
        assert sample["policy_logprobs"] == pytest.approx(sampled, abs=1e-3)
    for line in rows(lake, "training_log"):
        entropies = [e for s in samples if s["step"] == line["step"] - 1 for e in s["entropies"]]
        assert sum(entropies) / len(entropies) == pytest.approx(line["entropy"], rel=1e-3)


def judge(lake: Lake, base: Path, steps: int = 4) -> None:
    """Assert what holds of every run, whichever engine generated."""
    log, samples, turns = (rows(lake, table) for table in ("training_log", "rl_samples", "turns"))
    assert [line["step"] for line in log] == list(range(1, steps + 1))
    assert [(r["step"], r["place"]) for r in samples] == [(s, p) for s in range(steps) for p in range(8)]
    assert {r["origin"] for r in rows(lake, "rollouts")} == {"rl"}
    for line in log:
        assert line["logprob_gap_max"] < 1e-3 and line["staleness"] == 0 and line["entropy"] > 0
    assert len(turns) == 8 * steps and all(turn["capture"] == "native" and turn["logprobs"] for turn in turns)
    own_statistics(lake)
    assert not list(lake.scratch("reinforce").iterdir()), "the weights that were handed over are gone"
    assert not processes(lake, base)
