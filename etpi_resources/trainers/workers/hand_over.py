"""A vLLM server as the engine of the policy that is trained in this process.

Belongs here: handing the policy's weights over before each round of rollouts, and the proof that they arrived. Does not
belong here: the server's calls (`engines.vllm`), its process (`engines.vllm_server`), or training.

A LoRA policy is handed over merged, so that one way serves both kinds: safetensors in a folder, read in place by the
server. Its answer is not believed: the log-probabilities that it then gives a fixed prompt must be the policy's of now,
within what rounding explains, and must not be those of the round before.
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
from etpi_resources.trainers.workers.checkpointing import logits_of

PROBE_IDS = 128
"""How much of a prompt is compared; all of its logits are in memory at once."""

NEARER = 3.0
"""A server so many times nearer to the last round's policy than to this one's has not taken the new weights."""


class HandOverFailed(RuntimeError):
    """The server does not generate from the policy's weights; the message names the step and the remedy."""


class HandedPolicy:
    """An engine whose model is trained here and generates there; only within `generating`.

    Args:
        model: the policy, adapters in place; `name`: what it goes by.
        base: the checkpoint it started from; the server starts from it too, and has its tokenizer.
        folder: where weights stand while they are handed over.
        dtype: of the weights that are handed over.
        bound: the largest mean difference of log-probabilities that is rounding (nats a token).
        server: `options` of `vllm serve`, `log` and `lock` (see `VllmServer`), `probe` (ids of a prompt).
    Raises:
        EngineUnavailable: there is no vLLM, or the server did not get ready.
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
        server: Mapping[str, Any],
    ) -> None:
        self.name = self._policy = name
        self.bound = bound
        self._model, self._folder, self._dtype = model, folder, dtype
        self._probe = list(server["probe"])[:PROBE_IDS]
        self._before: torch.Tensor | None = None
        self._server = VllmServer(
            base,
            f"policy-{name[:12]}",
            log=Path(server["log"]),
            lock=Path(server["lock"]),
            # Reported of each id: its probability under the distribution it was drawn from, temperature included.
            options={**server["options"], "logprobs-mode": "processed_logprobs"},
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
        """The server with the weights of now.

        Args:
            step: optimiser steps done; completions are of the model "name+step".
        Raises:
            EngineUnavailable: the server did not take them. HandOverFailed: it says so, and generates from others.
        """
        self.name = f"{self._policy}+{step}"
        shutil.rmtree(self._folder, ignore_errors=True)
        save_whole(self._model, self._folder, self._dtype)
        reload_weights(self._endpoints, self._folder)
        self._prove(step)
        yield

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """As `VllmEngine.complete`; log-probabilities are of the distribution that was drawn from."""
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
        ids = torch.tensor([self._probe])
        logprobs = logits_of(self._model, ids)[0, :-1].log_softmax(-1)
        now = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        served = torch.tensor(self._engine.prompt_logprobs(self._probe))
        gap = float((served - now).abs().mean())
        where = f"step {step}: the weights were handed to vLLM, but on a fixed prompt its log-probabilities "
        if not gap <= self.bound:
            raise HandOverFailed(
                f"{where}differ from the policy's by {gap:.2g} nats a token (bound {self.bound:g}). Look into "
                f"{self._server.log} for weights that were not loaded, let rl.options.dtype be what is trained in, or "
                'set rl.engine = "transformers"'
            )
        if self._before is not None and gap > NEARER * (late := float((served - self._before).abs().mean())):
            raise HandOverFailed(
                f"{where}are those of the round before (off by {late:.2g} nats a token, and by {gap:.2g} from the "
                f"policy's of now): it goes on with old weights. Look into {self._server.log}, or set "
                'rl.engine = "transformers"'
            )
        self._before = now


@torch.no_grad()
def save_whole(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Save the weights of a model in `dtype`, named as in its base's files, LoRA merged in; the model is left alone.

    Tied weights are copies, written under each of their names: on a CPU vLLM packs each apart, and would go on with the
    old one of a name that it does not find.
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
