"""A program that takes the place of `vllm`: the same command line, protocol and answers, over the in-process engine.

    python vllm_stand_in.py serve FOLDER --served-model-name NAME --port N [options of vllm serve]

It loads adapters, takes weights and reports token ids. It enforces no grammar, and its chat answers are the text alone,
as without parsers.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines import Completion, Request, Sampler
from etpi_resources.engines.live import LiveEngine
from etpi_resources.engines.transformers import TransformersEngine
from etpi_resources.trainers.workers.checkpointing import attach_adapter, load_model, logits_of


class Refused(Exception):
    """A request that the stand-in cannot serve; the message is the answer's."""


class _Model:
    """A checkpoint as it generates, and as it scores a given text.

    Args:
        processed: report log-probabilities with the temperature, as `--logprobs-mode processed_logprobs` does.
    """

    def __init__(self, folder: Path, name: str, root: str, parent: str | None, *, processed: bool) -> None:
        self.card = {"id": name, "root": root, "parent": parent, "owned_by": "vllm", "max_model_len": 65536}
        self._name, self._processed, self._loads = name, processed, 0
        self._stack = ExitStack()
        self.load(folder)

    def load(self, folder: Path) -> None:
        """Take the weights in `folder`."""
        self._stack.close()
        if (folder / "tokenizer.json").exists():  # weights that are handed over come without
            self.chat = load_chat_format(str(folder))
        self.scorer = load_model(folder, torch.float32).eval()
        if self._processed:
            engine: TransformersEngine = LiveEngine(load_model(folder, torch.float32), self._name, self.chat)
            self._stack.callback(engine.close)
            self._stack.enter_context(engine.generating(self._loads))  # type: ignore[attr-defined]
        else:
            engine = TransformersEngine(folder, self._name, self.chat)
            self._stack.callback(engine.close)
        self.engine, self._loads = engine, self._loads + 1

    def close(self) -> None:
        self._stack.close()


class StandIn:
    """The models of one server: the base, and adapters that are loaded while it runs."""

    def __init__(self, folder: Path, name: str, *, processed: bool) -> None:
        self._folder, self._name, self._lock = folder, name, threading.Lock()
        self.models = {name: _Model(folder, name, str(folder), None, processed=processed)}

    def answer(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the answer to a POST request.

        Raises:
            Refused: the request names a model or path that is not there, or needs a grammar.
        """
        with self._lock if path not in ("/v1/completions", "/v1/chat/completions") else ExitStack():
            match path:
                case "/tokenize":
                    return {"tokens": self._model(body).chat.encode(body["prompt"])}
                case "/v1/load_lora_adapter":
                    return self._load_adapter(body["lora_name"], Path(body["lora_path"]))
                case "/v1/unload_lora_adapter":
                    self._model({"model": body["lora_name"]})
                    self.models.pop(body["lora_name"]).close()
                    return "unloaded"
                case "/collective_rpc":
                    self.models[self._name].load(Path(body["kwargs"]["weights_path"]))
                    return {"results": []}
                case "/reset_prefix_cache":
                    return {"success": True}
                case "/v1/completions":
                    return self._complete(body)
                case "/v1/chat/completions":
                    return self._chat(body)
        raise Refused(f"there is no {path}")

    def _model(self, body: Mapping[str, Any]) -> _Model:
        if (model := self.models.get(body["model"])) is None:
            raise Refused(f"there is no model {body['model']!r}, only {', '.join(self.models)}")
        return model

    def _load_adapter(self, name: str, adapter: Path) -> str:
        if name in self.models:
            raise Refused(f"the name {name} is taken")
        base = self.models[self._name]
        with tempfile.TemporaryDirectory() as merged:
            shutil.copytree(self._folder, merged, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors*"))
            attach_adapter(self._folder, adapter).merge_and_unload().save_pretrained(merged)
            self.models[name] = _Model(Path(merged), name, str(adapter), str(base.card["id"]), processed=False)
        return "loaded"

    def _complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        model, prompt = self._model(body), list(body["prompt"])
        if "prompt_logprobs" in body:
            scores = logits_of(model.scorer, torch.tensor([prompt]))[0, :-1].log_softmax(-1)
            entries = [
                {str(token): {"logprob": float(row[token])}} for token, row in zip(prompt[1:], scores, strict=True)
            ]
            return {"model": body["model"], "choices": [{"prompt_logprobs": [None, *entries]}]}
        done = self._generate(model, body, prompt)
        choice = {
            "index": 0, "text": model.chat.decode(done.output_ids or ()), "prompt_token_ids": prompt,
            "token_ids": done.output_ids, "finish_reason": done.finish_reason,
            "logprobs": {"token_logprobs": done.logprobs},
        }  # fmt: skip
        return {"model": body["model"], "choices": [choice]}

    def _chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        model = self._model(body)
        arguments = body.get("chat_template_kwargs") or {}
        prompt = model.chat.prompt_ids(body["messages"], tools=body.get("tools"), **arguments)
        done = self._generate(model, body, prompt)
        content = [{"token": "", "logprob": value, "bytes": None, "top_logprobs": []} for value in done.logprobs or ()]
        choice = {
            "index": 0, "message": {"role": "assistant", "content": done.text}, "token_ids": done.output_ids,
            "finish_reason": done.finish_reason, "logprobs": {"content": content},
        }  # fmt: skip
        reply = {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"]}
        return {**reply, "prompt_token_ids": prompt, "choices": [choice]}

    def _generate(self, model: _Model, body: Mapping[str, Any], prompt: list[int]) -> Completion:
        if "structured_outputs" in body:
            raise Refused("this stand-in enforces no grammar; install vLLM (make vllm)")
        sampler = Sampler(body["temperature"], body["top_p"], body["max_tokens"], body["seed"])
        try:
            (done,) = model.engine.complete([Request(str(body["seed"]), "", prompt, (), sampler)])
        except ValueError as error:
            raise Refused(str(error)) from None
        return done


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def stand_in(self) -> StandIn:
        return self.server.stand_in  # pyright: ignore[reportAttributeAccessIssue]

    def do_GET(self) -> None:
        cards = [model.card for model in list(self.stand_in.models.values())]
        self.send(200, {"data": cards} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "{}")
        try:
            self.send(200, self.stand_in.answer(self.path, body))
        except Refused as error:
            self.send(400, {"error": {"message": str(error), "type": "stand-in", "code": 400}})

    def send(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing."""


def write_stand_in(program: Path) -> Path:
    """Write the program, with this process's interpreter; return its path."""
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(__file__)} "$@"\n')
    program.chmod(0o755)
    return program


def main(arguments: list[str] | None = None) -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--logprobs-mode", default="raw_logprobs")
    options, _ = parser.parse_known_args(arguments)
    processed = options.logprobs_mode == "processed_logprobs"
    server = ThreadingHTTPServer((options.host, options.port), _Handler)
    server.daemon_threads = True
    server.stand_in = StandIn(options.folder, options.served_model_name, processed=processed)  # pyright: ignore[reportAttributeAccessIssue]
    print(f"serving {options.folder} as {options.served_model_name} on port {options.port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
