"""What half a batch in each of two threads gains in pretraining the tiny base, over whole batches with two threads an
operation.

Both train the same small corpus from the same start; runs alternate, and the median of the tokens a second over the
steps after the first ten counts, in wall time.

    python -m bench.base_threads [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch

from etpi_assets.rollouts.tiny_base import prepare
from etpi_assets.specs.rollout_set import TinySection
from etpi_resources.chat_format import load_chat_format
from etpi_resources.trainers.workers import base_worker, twins
from etpi_resources.trainers.workers.reporting import CONFIG_FILE, Worker

CORPUS = TinySection(conversations=400, exercises=400)
FIRST = 10
"""Steps left out: new shapes cost time once."""


def tokens_a_second(folder: Path, config: str, parts: int, threads: int) -> float:
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(config)
    twins.PARTS = parts
    torch.set_num_threads(threads)
    log = base_worker.run(Worker(folder))["log"]
    counted = [line for line in log if line["step"] >= FIRST]
    return (counted[-1]["tokens"] - counted[0]["tokens"]) / (counted[-1]["seconds"] - counted[0]["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    threads = max(2, torch.get_num_threads())
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder)
        prepared = prepare(CORPUS, load_chat_format("tiny"), whole / "corpus")
        config = json.dumps(prepared)
        rates: dict[int, list[float]] = {1: [], 2: []}
        for turn in range(rounds):
            for parts, seen in rates.items():
                seen.append(tokens_a_second(whole / f"{turn}-{parts}", config, parts, threads))
    medians = {parts: statistics.median(seen) for parts, seen in rates.items()}
    print(f"whole batches, {threads} threads an operation: {medians[1]:.0f} tokens/s")
    print(f"half a batch a thread: {medians[2]:.0f} tokens/s, {medians[2] / medians[1]:.2f} times as many")


if __name__ == "__main__":
    main()
