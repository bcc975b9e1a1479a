"""A small loopback server that answers like vLLM and OpenAI endpoints, with faults on demand."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from etpi_assets.agent.actions import format_action
from etpi_assets.agent.loop import SUBMIT
from etpi_resources.chat.format import ChatFormat, load_chat_format

SUBMITS = str(format_action(f"echo {SUBMIT}"))
Fault = Callable[["_Handler"], None]


class Refusal(RuntimeError):
    """The reason of a server's answer with an HTTP status other than 200."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Loopback:
    """A server of one model; a context manager.

    Attributes:
        say: returns a turn's text for a request's body.
        faults: one fault per generation request, taken from the front; None: answer normally.
        always: the fault of every generation request after those.
        seen: the requests for a turn, as (path, body); the last `remembered` of them.
        change: rewrites an answer before it is sent.
        adapters: further models of the list, by name.
        models: the whole answer of the list of models; None: one of `model` and `adapters`.
        owned_by, key: the owner in the list of models, and the key that reading the list takes; empty: none.
    """

    def __init__(self, model: str = "teacher", chat: ChatFormat | None = None, port: int = 0) -> None:
        self.model, self.chat, self.root = model, chat or load_chat_format("tiny"), "/models/teacher"
        self.say: Callable[[dict[str, Any]], str] = lambda body: SUBMITS
        self.message: Callable[[dict[str, Any], str], dict[str, Any]] = lambda body, text: {"content": text}
        self.faults: list[Fault | None] = []
        self.always: Fault | None = None
        self.change: Callable[[dict[str, Any]], dict[str, Any]] = lambda answer: answer
        self.vocabulary: Any = self.chat
        self.owned_by = "vllm"
        self.key = ""
        self.models: Any = None
        self.adapters: dict[str, Any] = {}
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.remembered = 100_000
        self.lock = threading.Lock()
        self.delay = 0.0
        self.connections: list[socket.socket] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _Handler)
        self._server.daemon_threads = True
        self._server.owner = self  # pyright: ignore[reportAttributeAccessIssue]
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Loopback:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for connection in self.connections:  # clients may keep connections open
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def next_fault(self) -> Fault | None:
        """Return the fault of the next generation request."""
        return self.faults.pop(0) if self.faults else self.always

    def prompt_of(self, body: dict[str, Any]) -> list[int]:
        if "prompt" in body:
            return body["prompt"]
        return self.chat.prompt_ids(body["messages"], tools=body.get("tools"), **body.get("chat_template_kwargs", {}))

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        prompt = self.prompt_of(body)
        if "prompt_logprobs" in body:
            return {
                "choices": [{"prompt_logprobs": [None, *({str(token): {"logprob": -0.5}} for token in prompt[1:])]}]
            }
        text = self.say(body)
        output = [*self.chat.encode(text), self.chat.end_id]
        ids = {"token_ids": output, "finish_reason": "stop"}
        if path == "/v1/completions":
            logprobs = {"token_logprobs": [-0.5] * len(output)}
            return {"choices": [{"text": text, "prompt_token_ids": prompt, "logprobs": logprobs, **ids}]}
        message = {"role": "assistant", **self.message(body, text)}
        logprobs = {"content": [{"token": "x", "logprob": -0.5, "bytes": None, "top_logprobs": []}] * len(output)}
        return {
            "id": "1", "object": "chat.completion", "created": 1, "model": self.model, "prompt_token_ids": prompt,
            "choices": [{"index": 0, "message": message, "logprobs": logprobs, **ids}],
        }  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def owner(self) -> Loopback:
        return self.server.owner  # pyright: ignore[reportAttributeAccessIssue]

    def setup(self) -> None:
        super().setup()
        self.owner.connections.append(self.connection)

    def do_GET(self) -> None:
        card = {"id": self.owner.model, "root": self.owner.root, "parent": None, "owned_by": self.owner.owned_by}
        adapters = [card | {"id": name, "root": name, "parent": self.owner.model} for name in self.owner.adapters]
        if self.owner.key and self.headers.get("Authorization") != f"Bearer {self.owner.key}":
            return self.reply(401, {})
        if self.owner.models is not None:
            return self.reply(200, self.owner.models)
        self.reply(200, {"data": [card | {"max_model_len": 4096}, *adapters]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        self.body = body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "{}")
        if self.path == "/tokenize":
            return self.reply(200, {"tokens": self.owner.vocabulary.encode(body["prompt"])})
        with self.owner.lock:
            if "prompt_logprobs" not in body:
                self.owner.seen.append((self.path, body))
            del self.owner.seen[: -self.owner.remembered]
            fault = self.owner.next_fault()
        if fault is not None:
            return fault(self)
        time.sleep(self.owner.delay)
        try:
            answer = self.owner.answer(self.path, body)
        except Refusal as refusal:
            return self.reply(refusal.status, {"error": {"message": str(refusal)}})
        self.reply(200, None if answer is None else self.owner.change(answer))

    def reply(self, status: int, answer: Any, **headers: str) -> None:
        """Send an answer as JSON; None: an answer without a body."""
        data, kind = (
            (b"", {}) if answer is None else (json.dumps(answer).encode(), {"content-type": "application/json"})
        )
        self.send_response(status)
        for name, value in {**kind, "content-length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def status(code: int, message: str = "no", **headers: str) -> Fault:
    """Answer with an error in the form of OpenAI endpoints."""
    return lambda handler: handler.reply(code, {"error": {"message": message, "type": "e", "code": code}}, **headers)


def drop(handler: _Handler) -> None:
    """Close the connection without an answer."""
    handler.close_connection = True
    handler.connection.close()


def hang(handler: _Handler) -> None:
    """Answer too late."""
    time.sleep(1.5)
    handler.close_connection = True


def echo_key(handler: _Handler) -> None:
    """Refuse and repeat the key in the error, as some endpoints do."""
    status(401, f"Incorrect API key provided: {handler.headers['authorization']}")(handler)
