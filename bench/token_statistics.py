"""Measure what the statistics of tokens cost a GRPO step: `python bench/token_statistics.py [LAKE]`.

`LAKE` names a lake with a tiny base (that of `make demo`; default: $ETPI_DATA or `data`). Rollouts of 40 to 80
tokens, in the groups and passes of `terminal_grpo_tiny`; the rollouts are fixed, so a step is the update alone, and
the policy link and the file are part of it. Steps with and without statistics alternate in one process, in random
order, on one thread; the medians of their CPU times count.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine

from etpi_assets.specs.load import load_specs
from etpi_assets.training.grpo import settings
from etpi_assets.training.rounds import SUFFIX
from etpi_resources.lake.files import write_atomically
from etpi_resources.trainers.policy_link import PolicyServer, Sample, connect
from etpi_resources.trainers.workers.checkpointing import load_model
from etpi_resources.trainers.workers.device import Compute
from etpi_resources.trainers.workers.grpo_worker import trainer_arguments
from etpi_resources.trainers.workers.policy_trainer import PolicyTrainer

STEPS = 60
PROMPT = 300


def samples_of(vocabulary: int, size: int, tasks: int) -> list[Sample]:
    """Return `size` random rollouts of each of `tasks` prompts."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(tasks):
        prompt = rng.integers(3, vocabulary, PROMPT).tolist()
        for place in range(size):
            ids = rng.integers(3, vocabulary, int(rng.integers(40, 80))).tolist()
            made.append(Sample(prompt, ids, [1] * len(ids), [-7.0] * len(ids), 0.0, (-1.0) ** place))
    return made


def main() -> None:
    import datasets
    from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

    torch.set_num_threads(1)
    print(machine(), flush=True)
    lake = Path(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("ETPI_DATA", "data"))
    base = next(path.parent for path in sorted(lake.glob("checkpoints/*/model.safetensors")))
    rl = load_specs().experiments["terminal_grpo_tiny"].rl.model_copy(update={"steps": STEPS, "beta": 0.0})
    model = load_model(str(base), torch.float32)
    rollouts = samples_of(model.config.vocab_size, rl.group_size, rl.device_batch * rl.accumulate // rl.group_size)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    order = random.Random(0)

    with tempfile.TemporaryDirectory() as folder:
        rounds = Path(folder)

        def record(step: int, kept: bytes) -> None:
            write_atomically(rounds / f"round-{step:06d}{SUFFIX}", kept)

        trainer: Any = PolicyTrainer(
            lambda step, rows: rollouts,
            settings(rl),
            model=model,
            args=trainer_arguments(settings(rl), rounds / "trl", 0, Compute(gpu=False, dtype="fp32")),
            train_dataset=datasets.Dataset.from_dict({"prompt": ["0"] * len(rollouts)}),
            processing_class=AutoTokenizer.from_pretrained(base, local_files_only=True),
        )
        added = type(trainer.statistics).add

        class Timed(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
                self.measured = order.random() < 0.5
                type(trainer.statistics).add = added if self.measured else lambda *a: None
                self.began = time.process_time()

            def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
                if (kept := trainer.statistics.take()) is not None:
                    client.record(trainer.round_step, kept.tobytes())
                seconds[self.measured].append(time.process_time() - self.began)

        trainer.add_callback(Timed())
        trainer.remove_callback(PrinterCallback)
        with (
            PolicyServer(lambda step, rows, engine: [], "bench", record) as server,
            connect(str(server.path)) as client,
        ):
            trainer.train()
        written = sum(path.stat().st_size for path in rounds.glob(f"round-*{SUFFIX}"))
    kept, without = (statistics.median(seconds[way][5:]) for way in (True, False))
    tokens = sum(len(sample.completion_ids) for sample in rollouts)
    print(f"{len(rollouts)} rollouts, {tokens} tokens of the policy a step; median of CPU seconds a step:")
    print(f"without statistics {without:.4f} ({len(seconds[False])} steps)")
    print(f"with them {kept:.4f} ({len(seconds[True])} steps): {kept / without - 1:+.2%}")
    print(f"{written / len(seconds[True]) / len(rollouts):.0f} bytes a rollout")


if __name__ == "__main__":
    main()
