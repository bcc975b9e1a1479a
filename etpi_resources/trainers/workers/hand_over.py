"""Write a policy's weights for the servers of its rollouts (`trainers.policy_servers`), with its log-probs of a fixed
prompt, by which every server is proved."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from etpi_resources.trainers.policy_link import Published
from etpi_resources.trainers.workers.checkpointing import logits_of, save_adapter
from etpi_resources.trainers.workers.sharding import gather, is_sharded


@dataclass(frozen=True)
class Publisher:
    """Writes each version of a policy into a folder of its own below `folder`, and removes those that no round needs.

    Attributes:
        model: the policy; a PEFT model has its adapter written alone.
        base, base_name: the checkpoint that training starts from, and its name in an adapter's config.
        dtype: of the weights that are written.
        probe: ids of the prompt; all of their logits are in memory at the same time.
        ahead: optimiser steps by which a round may be trained on later than its weights were written.
    """

    model: Any
    folder: Path
    base: str
    base_name: str
    dtype: torch.dtype
    probe: tuple[int, ...]
    ahead: int = 0

    @torch.no_grad()
    def publish(self, step: int, is_rank_0: bool) -> Published | None:
        """Write the weights after `step` optimiser steps; None on ranks other than 0. Every rank has to call it."""
        model: Any = gather(self.model, self.base) if is_sharded(self.model) else self.model
        if not is_rank_0:
            return None
        for old in self.folder.glob("step-*"):
            if int(old.name.split("-")[1]) < step - self.ahead:
                shutil.rmtree(old)
        folder, adapter = self.folder / f"step-{step}", hasattr(model, "peft_config")
        if adapter:
            save_adapter(model, folder, self.base_name)
        else:
            save_weights(model, folder, self.dtype)
        ids = torch.tensor([self.probe])
        logprobs = logits_of(model, ids)[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return Published(str(folder), adapter, logprobs.tolist())


def save_weights(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Save copies of a model's weights in `dtype`.

    Tied weights are written under each of their names: on a CPU vLLM packs each of them separately, and would keep the
    old weights of a name that is missing.
    """
    copies = {name: tensor.to("cpu", dtype, copy=True) for name, tensor in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=copies, safe_serialization=True)
