"""Measure the gain of half a batch in each of two threads over whole batches with two threads per operation.

It pretrains and fine-tunes the tiny base.

    python bench/training_threads.py [--rounds 3]

Both ways train the same small corpus from the same start. Runs alternate, and the median of the tokens per second (wall
time) over the steps after the first ten counts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import machine

from etpi_assets.specs.rollout_set import TinySection
from etpi_assets.specs.training import TrainSection
from etpi_assets.training.sft import settings
from etpi_lab.tiny_bases import worker as base_worker
from etpi_lab.tiny_bases.recipe import prepare
from etpi_resources.chat.format import load_chat_format
from etpi_resources.trainers.contracts import SftWorkerConfig, WorkerModel
from etpi_resources.trainers.workers import replicas, sft_worker
from etpi_resources.trainers.workers.reporting import CONFIG_FILE, Worker

CORPUS = TinySection(conversations=400, exercises=400)
TUNING = TrainSection(method="full", epochs=1, batch_tokens=4096, learning_rate=1e-3)
FIRST = 10
"""First step that counts; earlier ones include one-time costs of new shapes."""


def tokens_a_second(run: Callable[[Any], Any], folder: Path, config: WorkerModel, parts: int, threads: int) -> float:
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(config.model_dump_json())
    replicas.REPLICAS = parts  # pyright: ignore[reportAttributeAccessIssue]
    torch.set_num_threads(threads)
    log = run(Worker(folder, type(config))).log
    counted = [line for line in log if line.step >= FIRST]
    return (counted[-1].tokens - counted[0].tokens) / (counted[-1].seconds - counted[0].seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    threads = max(2, torch.get_num_threads())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pretraining = prepare(CORPUS, load_chat_format("tiny"), folder / "corpus")
        tuning = SftWorkerConfig(
            label="fine-tuning", base=str(folder / "pretraining-0-1" / "model"), base_name="base",
            files=pretraining.files, seed=0, chat_template=None, device="auto",
            micro_tokens=TUNING.batch_tokens, train=settings(TUNING),
        )  # fmt: skip
        for what, run, config in (
            ("pretraining", base_worker.run, pretraining),
            ("fine-tuning", sft_worker.run, tuning),
        ):
            rates: dict[int, list[float]] = {1: [], 2: []}
            for turn in range(rounds):
                for parts, seen in rates.items():
                    seen.append(tokens_a_second(run, folder / f"{what}-{turn}-{parts}", config, parts, threads))
            whole, halves = (statistics.median(seen) for seen in rates.values())
            print(f"{what}, whole batches, {threads} threads an operation: {whole:.0f} tokens/s")
            print(f"{what}, half a batch a thread: {halves:.0f} tokens/s, {halves / whole:.2f} times as many")


if __name__ == "__main__":
    print(machine(), flush=True)
    main()
