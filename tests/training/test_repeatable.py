"""With `rl.repeatable` two runs of one seed are equal to the digit, whatever else the machine does meanwhile."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from etpi_assets.specs.training import RLSection
from etpi_assets.training.lock_step import map_in_step
from etpi_assets.training.rounds import Rounds
from etpi_resources.cuda import cumulative_sums
from etpi_resources.engines import Completion, Request, Sampler
from etpi_resources.trainers.workers.device import Compute, compute_alike
from tests.support.reinforcement import make, prepared, rows
from tests.support.tiny_training import make_speaking_base

# --- batches ---------------------------------------------------------------------------------------------------------


@dataclass
class Recorder:
    """An engine that answers with the request's id, and keeps its batches."""

    fails_at: int | None = None
    name: str = "recorder"
    batches: list[list[str]] = field(default_factory=list)
    _busy: threading.Lock = field(default_factory=threading.Lock)

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        assert self._busy.acquire(blocking=False), "one batch at a time"
        try:
            self.batches.append([request.request_id for request in requests])
            if len(self.batches) == self.fails_at:
                raise RuntimeError("the model failed")
            return [Completion([1], [2], [0.0], request.request_id, "stop", self.name) for request in requests]
        finally:
            self._busy.release()

    def fingerprint(self):
        return {"engine": self.name}

    def close(self) -> None: ...


def rollout_of(jitter: random.Random | None = None, breaks: frozenset[int] = frozenset()):
    """A rollout of place n takes n % 3 turns, of n % 2 + 1 requests each."""

    def roll_out(place: int, engine) -> list[str]:
        answers = []
        for turn in range(place % 3):
            if jitter is not None:
                time.sleep(jitter.random() / 100)
            requests = [
                Request(f"{place}/{turn}/{agent}", str(place), [1], (), Sampler()) for agent in range(place % 2 + 1)
            ]
            answers += [completion.text for completion in engine.complete(requests)]
            if place in breaks:
                raise ValueError(f"rollout {place} broke")
        return answers

    return roll_out


def test_batches_are_those_of_the_rollouts_whatever_the_timing():
    seen = []
    for seed in range(3):
        engine = Recorder()
        results = map_in_step(rollout_of(random.Random(seed)), range(10), engine, 4)
        assert results == [
            [f"{place}/{turn}/{agent}" for turn in range(place % 3) for agent in range(place % 2 + 1)]
            for place in range(10)
        ]
        seen.append(engine.batches)
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][0] == ["1/0/0", "1/0/1", "2/0/0"], "every rollout beside it that asks, in order"
    assert seen[0][1] == ["2/1/0"], "those that have ended are not waited for"


def test_rollout_that_breaks_does_not_stop_the_others():
    engine = Recorder()
    with pytest.raises(ValueError, match="rollout 2 broke"):
        map_in_step(rollout_of(breaks=frozenset({2})), range(6), engine, 6)
    assert engine.batches[-1] == ["5/1/0", "5/1/1"]


def test_failure_of_the_engine_reaches_every_rollout_of_the_batch():
    with pytest.raises(RuntimeError, match="the model failed"):
        map_in_step(rollout_of(), range(6), Recorder(fails_at=1), 6)


def test_server_that_decides_its_batches_is_refused():
    section = {"method": "grpo", "suite": "s", "rewards": [{"function": "outcome"}], "repeatable": True}
    assert RLSection.model_validate(section).repeatable
    assert "repeatable" not in RLSection.model_validate({**section, "repeatable": False}).model_dump()
    with pytest.raises(ValidationError, match=r'rl\.repeatable .*rl\.engine = "transformers"'):
        RLSection.model_validate({**section, "engine": "vllm"})


def test_on_a_gpu_only_operations_that_repeat_are_computed(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is as before afterwards
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    threads = torch.get_num_threads()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        compute_alike(Compute(gpu=True, dtype="bf16"))
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU, whose cumulative sums do not repeat."""

    @property
    def is_cuda(self) -> bool:
        return True

    def cpu(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def cumsum(self, dim: int) -> torch.Tensor:
        assert not torch.are_deterministic_algorithms_enabled(), "cumsum_cuda_kernel has no deterministic form"
        return super().cumsum(dim)


def test_cumulative_sums_that_must_repeat_are_a_cpu_s():
    values = torch.rand(2, 9)
    for strict in (False, True):
        torch.use_deterministic_algorithms(strict)
        try:
            assert torch.equal(cumulative_sums(values.as_subclass(OnGpu)), values.cumsum(-1))
        finally:
            torch.use_deterministic_algorithms(False)


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_speaking_base(tmp_path_factory.mktemp("base"))


@contextmanager
def busy():
    loops = [multiprocessing.get_context("spawn").Process(target=_spin, daemon=True) for _ in range(2)]
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.join()


def _spin() -> None:
    while True:
        pass


def stored(folder: Path, base: Path, **rl: str) -> dict[str, list]:
    """Run a reinforcement; return everything of it that a difference between two runs is read from."""
    lake = prepared(folder, base, **rl)
    make(folder, lake, "rl_checkpoint")
    log = [{key: value for key, value in line.items() if "seconds" not in key} for line in rows(lake, "training_log")]
    return {
        "samples": rows(lake, "rl_samples"),
        "rewards": rows(lake, "rewards"),
        "ids": [(turn["output_ids"], turn["logprobs"]) for turn in rows(lake, "turns")],
        "log": log,
        "checkpoints": [row["checkpoint_id"] for row in rows(lake, "checkpoints")],
    }


@pytest.fixture
def uneven(monkeypatch):
    """Rollouts that begin at random times, other ones in every run, as sandboxes make them."""
    jitter = random.Random(time.time_ns())
    begin = Rounds._roll_out

    def late(self, *arguments):
        time.sleep(jitter.random() / 5)
        return begin(self, *arguments)

    monkeypatch.setattr(Rounds, "_roll_out", late)


@pytest.mark.slow
@pytest.mark.usefixtures("uneven")
def test_two_short_runs_are_equal_to_the_digit(tmp_path, base, monkeypatch):
    short = {"repeatable": "true", "steps": "2"}
    first = stored(tmp_path / "first", base, **short)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    second = stored(tmp_path / "second", base, **short)
    assert len(first["log"]) == 2 and len(first["samples"]) == 16
    for name in first:
        assert first[name] == second[name], name


@pytest.mark.long
@pytest.mark.usefixtures("uneven")
def test_two_runs_are_equal_to_the_digit_under_load_too(tmp_path, base, monkeypatch):
    first = stored(tmp_path / "first", base, repeatable="true")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with busy():
        second = stored(tmp_path / "second", base, repeatable="true")
    for name in first:
        assert first[name] == second[name], name
