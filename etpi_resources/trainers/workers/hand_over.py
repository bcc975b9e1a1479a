"""Write a policy's weights for the servers of its rollouts (`trainers.policy_servers`), with its log-probs of a fixed
prompt, by which every server is proved."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from etpi_resources.trainers.policy_link import Published
from etpi_resources.trainers.workers.checkpointing import logits_of, save_adapter


class Publisher:
    """Writes each version of a policy into a folder of its own below `folder`, and removes the one before.

    Args:
        model: the policy: a PEFT model with `adapter`; with `sharded`, this rank's part.
        base_name: in an adapter's config. dtype: of the weights that are written.
        probe: ids of the prompt; all of their logits are in memory at the same time.
    """

    def __init__(
        self,
        model: Any,
        folder: Path,
        base_name: str,
        dtype: torch.dtype,
        probe: list[int],
        *,
        adapter: bool,
        sharded: bool,
    ) -> None:
        self._model, self._folder, self._base_name, self._dtype = model, folder, base_name, dtype
        self._probe, self._adapter, self._sharded = torch.tensor([probe]), adapter, sharded

    @torch.no_grad()
    def publish(self, step: int, is_rank_0: bool) -> Published | None:
        """Write the weights after `step` optimiser steps; None on ranks other than 0. A collective if sharded."""
        weights, logits = None, None
        if self._sharded:
            weights = get_model_state_dict(
                self._model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
            )
            logits = self._sharded_logits()
        if not is_rank_0:
            return None
        folder = self._folder / f"step-{step}"
        for old in self._folder.glob("step-*"):
            shutil.rmtree(old)
        if self._adapter:
            save_adapter(self._model, folder, self._base_name)
        else:
            save_weights(self._model, folder, self._dtype, weights or self._model.state_dict())
        logits = logits_of(self._model, self._probe) if logits is None else logits
        logprobs = logits[0, :-1].log_softmax(-1).gather(1, self._probe[0, 1:, None])[:, 0]
        return Published(str(folder), self._adapter, logprobs.tolist())

    def _sharded_logits(self) -> torch.Tensor:
        """As `logits_of`, through the hooks that gather weights."""
        training = self._model.training
        self._model.eval()
        logits = self._model(input_ids=self._probe.to(self._model.device), use_cache=False).logits.float().cpu()
        self._model.train(training)
        return logits


def save_weights(model: Any, folder: Path, dtype: torch.dtype, weights: dict[str, torch.Tensor]) -> None:
    """Save copies of a model's weights in `dtype`.

    Tied weights are written under each of their names: on a CPU vLLM packs each of them separately, and would keep the
    old weights of a name that is missing.
    """
    copies = {name: tensor.to("cpu", dtype, copy=True) for name, tensor in weights.items()}
    model.save_pretrained(folder, state_dict=copies, safe_serialization=True)
