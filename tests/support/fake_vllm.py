"""A program with the arguments and endpoints of `vllm serve` that runs a transformers model, for rollouts of a policy.

`python fake_vllm.py serve FOLDER --port N --served-model-name NAME ...`. With FAKE_VLLM = "deaf" in its environment it
says that it took new weights, and goes on with those it has; with "deaf N" if it is one that sees GPU N.

Sleep mode is that of vLLM 0.26 and 0.32 (`serve/dev/sleep/api_router.py`, `v1/executor/abstract.py`): level 1
keeps the weights, level 2 loses them, and no request is answered before weights and KV cache are awake. The real server
lets a request wait, and touching weights that are asleep ends it; this one refuses both. FAKE_VLLM = "0.26" has that
version's answers, which have no body.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import torch
from safetensors.torch import load_file

from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines import Request, Sampler
from etpi_resources.engines.live import LiveEngine
from etpi_resources.trainers.workers.checkpointing import attach_adapter, load_model, logits_of
from tests.support.loopback import Loopback, Refusal

VARIABLES = {
    "/sleep": "VLLM_SERVER_DEV_MODE",
    "/wake_up": "VLLM_SERVER_DEV_MODE",
    "/collective_rpc": "VLLM_SERVER_DEV_MODE",
    "/reset_prefix_cache": "VLLM_SERVER_DEV_MODE",
    "/v1/load_lora_adapter": "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    "/v1/unload_lora_adapter": "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
}
"""Route -> the environment variable that opens it."""


class FakeVllm(Loopback):
    """A loopback server with a real model.

    Attributes:
        deaf: whether it acknowledges new weights without loading them.
        sleeps: whether it was started with sleep mode.
        asleep: the memory that is not there now: "weights", "kv_cache".
    """

    def __init__(self, folder: Path, name: str, port: int = 0, deaf: bool = False, sleeps: bool = False) -> None:
        super().__init__(name, load_chat_format(str(folder)), port)
        self.root, self.deaf, self.sleeps = str(folder), deaf, sleeps
        self.key = os.environ.get("VLLM_API_KEY", "")
        self.asleep: set[str] = set()
        self.adapters = {}
        self.own = self.engine_of(load_model(folder, torch.float32).eval())

    def engine_of(self, weights: Any) -> tuple[Any, LiveEngine]:
        return weights, LiveEngine(weights, self.model, self.chat)

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        print(f"{path} {os.environ.get('CUDA_VISIBLE_DEVICES')}", flush=True)
        route, _, query = path.partition("?")
        if (variable := VARIABLES.get(route)) and os.environ.get(variable) != "1":
            raise Refusal(404, "Not Found")
        if route in ("/sleep", "/wake_up"):
            return self.sleep_or_wake(route, parse_qs(query))
        if "weights" in self.asleep and route in ("/collective_rpc", "/v1/load_lora_adapter"):
            raise Refusal(500, "CUDA error: an illegal memory access was encountered")
        if self.asleep and route == "/v1/completions":
            raise Refusal(500, f"asleep: {self.asleep}")
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            if not self.deaf:
                new = load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
                self.own[0].load_state_dict(new)
            return {"results": [None]}
        if path == "/reset_prefix_cache":
            with self.own[1].generating(0):
                return {"success": True}
        if path == "/v1/load_lora_adapter":
            tuned = None if self.deaf else attach_adapter(self.root, Path(body["lora_path"])).merge_and_unload()
            self.adapters[body["lora_name"]] = self.own if self.deaf else self.engine_of(tuned)
            return {}
        if path == "/v1/unload_lora_adapter":
            return {} if self.adapters.pop(body["lora_name"]) else {}
        weights, engine = self.adapters.get(body["model"], self.own)
        if "prompt_logprobs" in body:
            ids = body["prompt"]
            logprobs = logits_of(weights, torch.tensor([ids]))[0].log_softmax(-1)
            entries = [{str(token): {"logprob": float(logprobs[at, token])}} for at, token in enumerate(ids[1:])]
            return {"choices": [{"prompt_logprobs": [None, *entries]}]}
        sampler = Sampler(body["temperature"], body["top_p"], body["max_tokens"], body["seed"])
        (turn,) = engine.complete([Request("r", str(body["seed"]), body["prompt"], (), sampler)])
        output = {"token_ids": turn.output_ids, "logprobs": {"token_logprobs": turn.logprobs}}
        return {"choices": [output | {"prompt_token_ids": turn.prompt_ids, "finish_reason": turn.finish_reason}]}

    def sleep_or_wake(self, route: str, query: dict[str, list[str]]) -> dict[str, Any] | None:
        if not self.sleeps:
            raise Refusal(500, "no sleep mode")
        if route == "/wake_up":
            self.asleep -= set(query["tags"])
        elif not self.asleep:
            self.asleep = {"weights", "kv_cache"}
            for tensor in self.own[0].state_dict().values() if query["level"] == ["2"] else ():
                tensor.fill_(float("nan"))
        return None if os.environ.get("FAKE_VLLM") == "0.26" else {"status": "asleep" if self.asleep else "awake"}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    parser.add_argument("--enable-sleep-mode", action="store_true")
    options, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    faults = {"deaf", f"deaf {os.environ.get('CUDA_VISIBLE_DEVICES')}"}
    deaf = os.environ.get("FAKE_VLLM") in faults
    with FakeVllm(options.folder, options.served_model_name, options.port, deaf, options.enable_sleep_mode):
        signal.pause()
