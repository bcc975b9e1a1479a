"""A program with the command line, endpoints and answers of `vllm serve`, over the in-process engine.

    python fake_vllm.py serve FOLDER --port N --served-model-name NAME [options of vllm serve]

It loads adapters, takes weights and reports token ids. It enforces no grammar, and its chat answers are the text alone,
as without parsers. With FAKE_VLLM = "deaf" in its environment it says that it took new weights, and goes on with those
it has; with "deaf N" if it is one that sees GPU N.

Sleep mode is that of vLLM 0.26 and 0.32 (`serve/dev/sleep/api_router.py`, `v1/executor/abstract.py`): level 1
keeps the weights, level 2 loses them, and no request is answered before weights and KV cache are awake. The real server
lets a request wait, and touching weights that are asleep ends it; this one refuses both. FAKE_VLLM = "0.26" has that
version's answers, which have no body.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import torch
from safetensors.torch import load_file

from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines import Request, Sampler
from etpi_resources.engines.live import LiveEngine
from etpi_resources.engines.transformers import TransformersEngine
from etpi_resources.trainers.workers.checkpointing import attach_adapter, load_model, logits_of
from tests.support.loopback import Loopback, Refusal

VARIABLES = {
    **dict.fromkeys(("/sleep", "/wake_up", "/collective_rpc", "/reset_prefix_cache"), "VLLM_SERVER_DEV_MODE"),
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
}
"""Route -> the environment variable that opens it."""


class _Raw(LiveEngine):
    """Reports log-probabilities without the temperature, as `--logprobs-mode raw_logprobs` does."""

    _logprobs = TransformersEngine._logprobs


class FakeVllm(Loopback):
    """A loopback server with a real model.

    Args:
        processed: report log-probabilities with the temperature, as `--logprobs-mode processed_logprobs` does.

    Attributes:
        deaf: whether it acknowledges new weights without loading them.
        sleeps: whether it was started with sleep mode.
        asleep: the memory that is not there now: "weights", "kv_cache".
    """

    def __init__(
        self, folder: Path, name: str, port: int = 0, host: str = "127.0.0.1", *,
        deaf: bool = False, sleeps: bool = False, processed: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(name, load_chat_format(str(folder)), port, host)
        self.root, self.deaf, self.sleeps = str(folder), deaf, sleeps
        self.key = os.environ.get("VLLM_API_KEY", "")
        self.asleep: set[str] = set()
        self._kind = LiveEngine if processed else _Raw
        self.engines = {name: self.engine_of(load_model(folder, torch.float32).eval())}

    def engine_of(self, weights: Any) -> tuple[Any, LiveEngine]:
        return weights, self._kind(weights, self.model, self.chat)

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        print(f"{path} {os.environ.get('CUDA_VISIBLE_DEVICES')}", flush=True)
        route, _, query = path.partition("?")
        if (variable := VARIABLES.get(route)) and os.environ.get(variable) != "1":
            raise Refusal(404, "Not Found")
        if "weights" in self.asleep and route in ("/collective_rpc", "/v1/load_lora_adapter"):
            raise Refusal(500, "CUDA error: an illegal memory access was encountered")
        weights, engine = self.engines[self.model]
        match route:
            case "/sleep" | "/wake_up":
                return self.sleep_or_wake(route, parse_qs(query))
            case "/collective_rpc":
                assert body["method"] == "reload_weights"
                if not self.deaf:
                    new = load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
                    assert not weights.load_state_dict(new, strict=False).unexpected_keys  # tied ones are not stored
                return {"results": [None]}
            case "/reset_prefix_cache":
                with engine.generating(0):
                    return {"success": True}
            case "/v1/load_lora_adapter":
                return self.load_adapter(body["lora_name"], Path(body["lora_path"]))
            case "/v1/unload_lora_adapter":
                return {} if self.adapters.pop(body["lora_name"]) and self.engines.pop(body["lora_name"]) else {}
            case "/v1/completions" | "/v1/chat/completions":
                if self.asleep:
                    raise Refusal(500, f"asleep: {self.asleep}")
                if body["model"] not in self.engines:
                    raise Refusal(404, f"there is no model {body['model']!r}, only {', '.join(self.engines)}")
                return {**(super().answer(path, body) or {}), "model": body["model"]}
        raise Refusal(404, f"there is no {path}")

    def load_adapter(self, name: str, adapter: Path) -> dict[str, Any]:
        if name in self.engines:
            raise Refusal(400, f"the name {name} is taken")
        merged = None if self.deaf else attach_adapter(self.root, adapter).merge_and_unload()
        self.engines[name] = self.engines[self.model] if self.deaf else self.engine_of(merged)
        self.adapters[name] = str(adapter)
        return {}

    def scores(self, body: dict[str, Any]) -> list[float]:
        ids = self.prompt_of(body)
        logprobs = logits_of(self.engines[body["model"]][0], torch.tensor([ids]))[0].log_softmax(-1)
        return [float(logprobs[at, token]) for at, token in enumerate(ids[1:])]

    def turn(self, body: dict[str, Any]) -> dict[str, Any]:
        if "structured_outputs" in body:
            raise Refusal(400, "this stand-in enforces no grammar; install vLLM (make vllm)")
        sampler = Sampler(body["temperature"], body["top_p"], body["max_tokens"], body["seed"])
        prompt = self.prompt_of(body)
        try:
            (turn,) = self.engines[body["model"]][1].complete([Request("r", str(body["seed"]), prompt, (), sampler)])
        except ValueError as error:
            raise Refusal(400, str(error)) from None
        ids = {"token_ids": turn.output_ids, "logprobs": turn.logprobs, "finish_reason": turn.finish_reason}
        return {"text": turn.text, **ids}

    def sleep_or_wake(self, route: str, query: dict[str, list[str]]) -> dict[str, Any] | None:
        if not self.sleeps:
            raise Refusal(500, "no sleep mode")
        if route == "/wake_up":
            self.asleep -= set(query["tags"])
        elif not self.asleep:
            self.asleep = {"weights", "kv_cache"}
            for tensor in self.engines[self.model][0].state_dict().values() if query["level"] == ["2"] else ():
                tensor.fill_(float("nan"))
        return None if os.environ.get("FAKE_VLLM") == "0.26" else {"status": "asleep" if self.asleep else "awake"}


def write_fake_vllm(program: Path) -> Path:
    """Write the program, with this process's interpreter; return its path."""
    program.parent.mkdir(parents=True, exist_ok=True)
    root, words = Path(__file__).parents[2], shlex.join([sys.executable, __file__])
    program.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(root))} exec {words} "$@"\n')
    program.chmod(0o755)
    return program


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    parser.add_argument("--enable-sleep-mode", action="store_true")
    parser.add_argument("--logprobs-mode", default="raw_logprobs")
    options, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    faults = {"deaf", f"deaf {os.environ.get('CUDA_VISIBLE_DEVICES')}"}
    with FakeVllm(
        options.folder, options.served_model_name, options.port, options.host, sleeps=options.enable_sleep_mode,
        deaf=os.environ.get("FAKE_VLLM") in faults, processed=options.logprobs_mode == "processed_logprobs",
    ):  # fmt: skip
        print(f"serving {options.folder} as {options.served_model_name} on port {options.port}", flush=True)
        signal.pause()
