"""One rank of policy updates on prepared samples: `python -m tests.support.rl_rank FOLDER`, one worker a folder in it.

Rank 0 writes the trained parameters to `after.safetensors`, and the steps' statistics and log lines to `after.json`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from etpi_resources.trainers.contracts import GrpoWorkerConfig
from etpi_resources.trainers.policy_link import Fork
from etpi_resources.trainers.workers import grpo_worker, sharding
from etpi_resources.trainers.workers.device import Compute
from etpi_resources.trainers.workers.reporting import CONFIG_FILE, Worker
from tests.support.policy_updates import FixedLink, made_samples


class Link(FixedLink):
    def __init__(self, rollouts: int) -> None:
        super().__init__(made_samples(rollouts))
        self.statistics: list[tuple[int, str]] = []

    def record(self, step, statistics) -> None:
        self.statistics.append((step, statistics.hex()))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    worker = Worker(folder, GrpoWorkerConfig)
    compute = Compute(False, "fp32")
    link = Link(worker.config.rl.round_size)
    if (folder / "forks").exists():
        edges = [len(sample.prompt_ids) for sample in link.samples]
        pairs = zip(link.samples, edges, strict=True)
        link.samples = [replace(s, forks=[Fork(at + 5, at + 1)] if at % 2 else ()) for s, at in pairs]
    rl = worker.config.rl
    model = sharding.load_start(worker.config.base, rl.processes if rl.sharded else 1, compute, lora=False)
    sharding.mean_gradients(model)
    trainer, _ = grpo_worker.build_trainer(worker, model, link, compute=compute)
    if (folder / "rows").exists():
        trainer.no_trees = "the test wants rows"
    log = grpo_worker.add_log(worker, trainer, link)
    trainer.train(resume_from_checkpoint=grpo_worker.resume_folder(worker))
    if whole := sharding.gathered(trainer, worker.config.base):
        model = whole.accelerator.unwrap_model(whole.model)
        tensors = {name: tensor.detach().clone().contiguous() for name, tensor in model.named_parameters()}
        save_file(tensors, folder / "after.safetensors")
        lines = [line.model_dump() for line in log.lines]
        (folder / "after.json").write_text(json.dumps({"statistics": link.statistics, "log": lines}))


if __name__ == "__main__":
    for config in sorted(Path(sys.argv[1]).glob(f"*/{CONFIG_FILE}")):
        main(config.parent)
