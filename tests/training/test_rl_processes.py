"""A policy that several processes train: its updates, rollouts and checkpoints are those of one process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from etpi_assets.training import grpo
from etpi_resources.trainers.pipes import WorkerFailed
from etpi_resources.trainers.workers import ranks
from tests.support import rl_rank
from tests.support.policy_updates import worker_in
from tests.support.reinforcement import kill_when, make, own_statistics, prepared, processes, rows
from tests.support.tiny_training import make_speaking_base

pytestmark = pytest.mark.slow
ROLLOUTS = 16


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_speaking_base(tmp_path_factory.mktemp("base"))


CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss": "grpo", "beta": 0.04},
    "lora": {"loss": "dapo", "beta": 0.04, "tuning": "lora"},
    "rows": {"loss": "dapo", "rows": True},
    "forks": {"loss": "grpo", "forks": True, "pass_tokens": 40},
    "one group": {"loss": "grpo", "group_size": 16},
    "iterations": {"loss": "grpo", "iterations": 2, "steps": 4},
    "sharded": {"loss": "dapo", "sharded": True, "steps": 4},
    "sharded grpo": {"loss": "grpo", "beta": 0.04, "sharded": True},
    "sharded forks": {"loss": "dapo", "forks": True, "pass_tokens": 40, "sharded": True},
}


def write_worker(folder: Path, base: Path, processes: int, resume: int | None = None, **rl) -> Path:
    """Write the folder of a worker that trains on prepared samples."""
    folder.mkdir(parents=True, exist_ok=True)
    layout = {"processes": processes, "accumulate": ROLLOUTS // 4 // processes}
    for switch in ("rows", "forks"):
        if rl.pop(switch, False):
            (folder / switch).touch()
    if processes == 1:
        rl |= {"sharded": False}
    steps = {"steps": 3, "optimizer": "adamw_torch", "learning_rate": 1e-3, "max_grad_norm": 1.0}
    worker_in(folder, base, resume=resume, device_batch=4, engine="vllm", **layout, **steps | rl)
    return folder


def train_by_two(folder: Path) -> None:
    """Train the workers below a folder, one after the other, by the same two processes."""
    command = [sys.executable, "-m", ranks.MODULE, "2", rl_rank.__name__, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def trained(folder: Path) -> tuple[dict, dict]:
    """Return the parameters, and statistics and log."""
    return load_file(folder / "after.safetensors"), json.loads((folder / "after.json").read_text())


@pytest.fixture(scope="module")
def by_two(base, tmp_path_factory) -> dict[str, Path]:
    """The folder of each case, trained by two processes."""
    root = tmp_path_factory.mktemp("two")
    folders = {name: root / ("sharded" if "sharded" in case else "whole") / name for name, case in CASES.items()}
    for name, folder in folders.items():
        write_worker(folder, base, 2, **CASES[name])
    for half in {folder.parent for folder in folders.values()}:
        train_by_two(half)
    return folders


def most_elements_apart(difference: torch.Tensor, moved: torch.Tensor) -> float:
    """Return the norm of the difference, without its largest element in 1,000, as a share of how far the tensor moved.

    AdamW divides a gradient by its own size: of an element whose gradient is rounding alone, it takes another step.
    """
    kept = difference.abs().flatten().sort().values[: -max(1, difference.numel() // 1000)]
    return float(kept.norm() / moved.norm())


@pytest.mark.parametrize("name", CASES)
def test_two_processes_take_the_steps_of_one(tmp_path, base, by_two, name):
    case = CASES[name]
    rl_rank.main(write_worker(tmp_path, base, 1, **case))
    (one, seen), (two, seen_by_two) = trained(tmp_path), trained(by_two[name])
    start = load_file(base / "model.safetensors")
    assert one.keys() == two.keys()
    moved = {name: one[name] - start.get(name, torch.zeros(())) for name in one}
    apart = {name: most_elements_apart(two[name] - one[name], moved[name]) for name in one if moved[name].any()}
    assert max(apart.values()) < 1e-4, apart
    assert max(float((two[name] - one[name]).norm() / moved[name].norm()) for name in apart) < 1e-3
    assert case.get("tuning") == "lora" or "model.embed_tokens.weight" in apart, "the tied head did not move"
    for (step, *values), (other_step, *others) in zip(seen["statistics"], seen_by_two["statistics"], strict=True):
        assert step == other_step
        for value, other in zip(values, others, strict=True):
            floats, by_two = (np.frombuffer(bytes.fromhex(text), "<f4") for text in (value, other))
            np.testing.assert_allclose(floats, by_two, atol=1e-4)
    for line, other in zip(seen["log"], seen_by_two["log"], strict=True):
        measured = {name for name, value in line.items() if value is not None and "seconds" not in name}
        # A mean over micro-batches of unequal length, whose rows TRL shuffles in each process: 1% apart in this case.
        if "kl" in measured:
            measured -= {"kl"}
            assert other["kl"] == pytest.approx(line["kl"], rel=0.03)
        expected = {name: line[name] for name in measured}
        assert {name: other[name] for name in measured} == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_sharded_policy_resumes_to_the_digit(tmp_path, base, by_two):
    shutil.copytree(by_two["sharded"], tmp_path / "workers" / "resumed")
    resumed = write_worker(tmp_path / "workers" / "resumed", base, 2, resume=2, **CASES["sharded"])
    (resumed / "after.safetensors").unlink()
    train_by_two(resumed.parent)
    (whole, seen), (again, seen_after) = trained(by_two["sharded"]), trained(resumed)
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert [line["step"] for line in seen_after["log"]] == [1, 2, 3, 4]
    assert [line["loss"] for line in seen_after["log"]] == [line["loss"] for line in seen["log"]]


RUN = {"device_batch": "4", "repeatable": "true", "steps": "6", "save_steps": "6", "beta": "0.04", "loss": '"dapo"'}


def stored(lake) -> dict[str, list]:
    """Return what is recorded of a run, but for times."""
    log = [{k: v for k, v in line.items() if "seconds" not in k} for line in rows(lake, "training_log")]
    turns = [turn["output_ids"] for turn in rows(lake, "turns")]
    checkpoints = [row["checkpoint_id"] for row in rows(lake, "checkpoints")]
    return {"samples": rows(lake, "rl_samples"), "log": log, "turns": turns, "checkpoints": checkpoints}


@pytest.mark.long
def test_killed_run_of_two_processes_resumes_to_the_digit_with_the_rollouts_of_one(tmp_path, base):
    lakes = {
        name: prepared(tmp_path / name, base, processes=str(n), accumulate=str(2 // n), **RUN)
        for name, n in {"one": 1, "two": 2, "killed": 2}.items()
    }
    outcomes = {name: make(tmp_path / name, lakes[name], "rl_checkpoint") for name in ("one", "two")}
    third = "data/scratch/reinforce/*/trl/checkpoint-3/whole"
    workers = kill_when(tmp_path / "killed", lambda: list((tmp_path / "killed").glob(third)))
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
    outcomes["killed"] = make(tmp_path / "killed", lakes["killed"], "rl_checkpoint")
    assert not any(outcome.manifest.blocked for outcome in outcomes.values())
    assert outcomes["killed"].metadata["seed 0"]["resumed from step"] >= 3
    one, two, killed = (stored(lakes[name]) for name in ("one", "two", "killed"))
    assert two == killed
    assert [s["rollout_id"] for s in one["samples"]] == [s["rollout_id"] for s in two["samples"]]
    # Sums are rounded in another order, and of two tokens at a boundary that decides: what follows is another run.
    same = [turn == other for turn, other in zip(one["turns"], two["turns"], strict=True)]
    assert len(same) == 48 and all(same[:8]) and sum(same[8:16]) > 5
    own_statistics(lakes["two"])


def test_death_of_a_rank_ends_the_others(tmp_path, base):
    lake = prepared(tmp_path, base, processes="2", accumulate="1", **RUN)

    def kill() -> None:
        while not list(lake.root.glob("checkpoints/rounds/*/round-000001.jsonl")):
            time.sleep(0.02)
        ranked = [p for p in processes(lake, base) if p.cmdline()[1:3] == ["-m", grpo.WORKER]]
        next(p for p in ranked if p.environ().get("RANK") == "1").kill()

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(WorkerFailed, match="rank 1 of 2 .*SIGKILL"):
        make(tmp_path, lake, "rl_checkpoint")
    assert not processes(lake, base)
