"""Updates of a policy on prepared samples: a worker's folder, its link, and the samples."""

from __future__ import annotations

from pathlib import Path

import torch

from etpi_assets.specs.training import RLSection
from etpi_assets.training import grpo
from etpi_resources.chat.format import load_chat_format
from etpi_resources.trainers.contracts import GrpoWorkerConfig
from etpi_resources.trainers.policy_link import Sample
from etpi_resources.trainers.workers.reporting import CONFIG_FILE, Worker


def worker_in(
    folder: Path, base: Path, resume: int | None = None, teacher: Path | None = None, **rl
) -> Worker[GrpoWorkerConfig]:
    section = RLSection.model_validate(
        {
            "method": "grpo", "suite": "s", "rewards": [{"function": "format"}], "steps": 1, "device_batch": 4,
            "accumulate": 2, "beta": 0.0, "dtype": "fp32", "optimizer": "sgd", "learning_rate": 1.0,
            "schedule": "constant", "max_grad_norm": 1e9, "agent": {"temperature": 0.7},
            **({"method": "opd", "teacher": "checkpoint:t"} if teacher else {}), **rl,
        }
    )  # fmt: skip
    config = GrpoWorkerConfig(
        label="grpo", base=str(base), base_name="b", link="", tasks=8, seed=0,
        chat_template=load_chat_format("tiny").template, device="auto", resume=resume, resume_every=1, publish=None,
        teacher=str(teacher) if teacher else None, rl=grpo.settings(section),
    )  # fmt: skip
    (folder / CONFIG_FILE).write_text(config.model_dump_json())
    return Worker(folder, GrpoWorkerConfig)


class FixedLink:
    """A link that returns prepared samples; their log-probs are invented."""

    def __init__(self, samples: list[Sample]) -> None:
        self.samples = samples

    def roll_out(self, step, rows, engine, later=None) -> list[Sample]:
        return self.samples

    def record(self, step, statistics) -> None:
        """Keep nothing."""


def made_samples(n: int = 8) -> list[Sample]:
    """Rollouts of different lengths, three of a prompt, some with ids in the middle that the policy read."""
    draw = torch.Generator().manual_seed(3)
    samples, prompt = [], []
    for index in range(n):
        if index % 3 == 0:
            prompt = torch.randint(0, 1000, (5 + index,), generator=draw).tolist()
        completion = torch.randint(0, 1000, (9 + 3 * index,), generator=draw).tolist()
        mask = [0 if index % 2 and 3 <= at < 7 else 1 for at in range(len(completion))]
        advantage = (-1.0) ** index * (0.5 + 0.2 * index)
        samples.append(Sample(prompt, completion, mask, [-7.0] * len(mask), float(index), advantage))
    return samples
