"""A vLLM server that generates the rollouts of the policy that this process trains.

Before each round the policy's weights are handed over as safetensors in a folder that the server reads; a LoRA policy
is merged first. The server's success answer is not trusted: its log-probs of a fixed prompt must be those of the
current policy, up to rounding, and must not be those of the previous round's.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer

from etpi_resources.chat.format import ChatFormat
from etpi_resources.engines import Completion, Request
from etpi_resources.engines.endpoints import Endpoints
from etpi_resources.engines.vllm import RELOAD_ENVIRONMENT, VllmEngine, reload_weights
from etpi_resources.engines.vllm_server import VllmServer
from etpi_resources.trainers.contracts import PolicyServerConfig
from etpi_resources.trainers.workers.checkpointing import logits_of

PROBE_IDS = 128
"""Number of the prompt's ids that are compared; all of their logits are in memory at the same time."""

NEARER = 3.0
"""A server whose log-probs are this many times nearer to the previous policy's still has the old weights."""


class HandOverFailed(RuntimeError):
    """The server does not generate from the policy's weights; the message names the step and what to do."""


class HandedPolicy:
    """An engine over the policy in a vLLM server; to be used within `generating`.

    Args:
        model: the policy, with its adapters. name: its name in completions.
        base: the checkpoint that training starts from; the server starts with its weights and tokenizer.
        folder: for the weights while they are handed over.
        dtype: of the weights that are handed over.
        bound: the largest mean difference of log-probs that rounding explains (nats a token).

    Raises:
        EngineUnavailable: vLLM is not installed, or the server did not become ready.
    """

    def __init__(
        self,
        model: Any,
        name: str,
        chat: ChatFormat,
        *,
        base: Path,
        folder: Path,
        dtype: torch.dtype,
        bound: float,
        server: PolicyServerConfig,
    ) -> None:
        self.name = self._policy = name
        self.bound = bound
        self._model, self._folder, self._dtype = model, folder, dtype
        self._probe = list(server.probe)[:PROBE_IDS]
        self._before: torch.Tensor | None = None
        self._server = VllmServer(
            base,
            f"policy-{name[:12]}",
            log=Path(server.log),
            lock=Path(server.lock),
            # Reported log-probs are those of the distribution that was sampled from, temperature included.
            options={**server.options, "logprobs-mode": "processed_logprobs"},
            environment=RELOAD_ENVIRONMENT,
        )
        try:
            self._endpoints = Endpoints([self._server.url], exit_reason=self._server.exit_reason)
            self._engine = VllmEngine(self._endpoints, self._server.name, chat, release=self._release)
        except BaseException:
            self._server.close()
            raise

    @contextmanager
    def generating(self, step: int) -> Iterator[None]:
        """Hand the current weights over; yield while the server generates from them.

        Args:
            step: optimiser steps done; completions name the model "name+step".

        Raises:
            EngineUnavailable: the server did not load the weights.
            HandOverFailed: it reported success, and generates from other weights.
        """
        self.name = f"{self._policy}+{step}"
        shutil.rmtree(self._folder, ignore_errors=True)
        save_merged(self._model, self._folder, self._dtype)
        reload_weights(self._endpoints, self._folder)
        self._prove(step)
        yield

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """As `VllmEngine.complete`; log-probs are those of the distribution that was sampled from."""
        return [replace(completion, model=self.name) for completion in self._engine.complete(requests)]

    def fingerprint(self) -> Mapping[str, Any]:
        return {**self._engine.fingerprint(), "model": self.name}

    def close(self) -> None:
        self._engine.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _release(self) -> None:
        self._endpoints.close()
        self._server.close()

    def _prove(self, step: int) -> None:
        """Compare the server's log-probs of the probe with the policy's, now and before."""
        ids = torch.tensor([self._probe])
        logprobs = logits_of(self._model, ids)[0, :-1].log_softmax(-1)
        current = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        served = torch.tensor(self._engine.prompt_logprobs(self._probe))
        gap = float((served - current).abs().mean())
        where = f"step {step}: the weights were handed to vLLM, but on a fixed prompt its log-probs "
        if not gap <= self.bound:
            raise HandOverFailed(
                f"{where}differ from the policy's by {gap:.2g} nats a token (bound {self.bound:g}). Look in "
                f"{self._server.log} for weights that were not loaded, set rl.options.dtype to the dtype of training, "
                'or set rl.engine = "transformers"'
            )
        if self._before is not None and gap > NEARER * (late := float((served - self._before).abs().mean())):
            raise HandOverFailed(
                f"{where}are those of the previous round (they differ by {late:.2g} nats a token, and by {gap:.2g} "
                f"from the current policy's): it still has the old weights. Look in {self._server.log}, or set "
                'rl.engine = "transformers"'
            )
        self._before = current


@torch.no_grad()
def save_merged(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Save copies of a model's weights in `dtype`, with LoRA merged, under the names of its base's files.

    Tied weights are written under each of their names: on a CPU vLLM packs each of them separately, and would keep the
    old weights of a name that is missing.
    """
    weights = {
        name.replace(".base_layer.", "."): tensor for name, tensor in model.state_dict().items() if ".lora_" not in name
    }
    layers: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for name, layer in layers.items():
        for adapter in layer.active_adapters:
            weights[f"{name}.weight"] = weights[f"{name}.weight"] + layer.get_delta_weight(adapter)
    copies = {name: tensor.to("cpu", dtype, copy=True) for name, tensor in weights.items()}
    model.save_pretrained(folder, state_dict=copies, safe_serialization=True)
