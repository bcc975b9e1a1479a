"""A program with the arguments and endpoints of `vllm serve` that runs a transformers model, for rollouts of a policy.

`python fake_vllm.py serve FOLDER --port N --served-model-name NAME ...`. With FAKE_VLLM = "deaf" in its environment it
says that it took new weights, and goes on with those it has.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines import Request, Sampler
from etpi_resources.engines.live import LiveEngine
from etpi_resources.trainers.workers.checkpointing import load_model, logits_of
from tests.support.loopback import Loopback


class FakeVllm(Loopback):
    """A loopback server with a real model.

    Attributes:
        deaf: whether it acknowledges new weights without loading them.
    """

    def __init__(self, folder: Path, name: str, port: int = 0, deaf: bool = False) -> None:
        super().__init__(name, load_chat_format(str(folder)), port)
        self.root, self.deaf = str(folder), deaf
        self.weights = load_model(folder, torch.float32).eval()
        self.engine = LiveEngine(self.weights, name, self.chat)

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/collective_rpc":
            if not self.deaf:
                new = load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
                self.weights.load_state_dict(new)
            return {"results": [None]}
        if path == "/reset_prefix_cache":
            with self.engine.generating(0):
                return {"success": True}
        if "prompt_logprobs" in body:
            ids = body["prompt"]
            logprobs = logits_of(self.weights, torch.tensor([ids]))[0].log_softmax(-1)
            entries = [{str(token): {"logprob": float(logprobs[at, token])}} for at, token in enumerate(ids[1:])]
            return {"choices": [{"prompt_logprobs": [None, *entries]}]}
        sampler = Sampler(body["temperature"], body["top_p"], body["max_tokens"], body["seed"])
        (turn,) = self.engine.complete([Request("r", str(body["seed"]), body["prompt"], (), sampler)])
        output = {"token_ids": turn.output_ids, "logprobs": {"token_logprobs": turn.logprobs}}
        return {"choices": [output | {"prompt_token_ids": turn.prompt_ids, "finish_reason": turn.finish_reason}]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    options, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    with FakeVllm(options.folder, options.served_model_name, options.port, os.environ.get("FAKE_VLLM") == "deaf"):
        signal.pause()
