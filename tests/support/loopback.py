"""A small loopback server that answers like vLLM and OpenAI endpoints, with faults on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from etpi_assets.agent.actions import format_action
from etpi_assets.agent.loop import SUBMIT
from etpi_resources.chat.format import ChatFormat, load_chat_format
from tests.support.web_server import Handler, WebServer

SUBMITS = str(format_action(f"echo {SUBMIT}"))
Fault = Callable[[Handler], None]


class Refusal(RuntimeError):
    """The reason of a server's answer with an HTTP status other than 200."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Loopback(WebServer):
    """A server of one model; a context manager.

    Attributes:
        say: returns a turn's text for a request's body.
        faults: one fault per generation request, taken from the front; None: answer normally.
        always: the fault of every generation request after those.
        seen: the requests for a turn, as (path, body); the last `remembered` of them.
        change: rewrites an answer before it is sent.
        adapters: further models of the list, name -> root.
        models: the whole answer of the list of models; None: one of `model` and `adapters`.
        owned_by, key: the owner in the list of models, and the key that reading the list takes; empty: none.
    """

    def __init__(
        self, model: str = "teacher", chat: ChatFormat | None = None, port: int = 0, host: str = "127.0.0.1"
    ) -> None:
        super().__init__(self.respond, port, host)
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
        self.adapters: dict[str, str] = {}
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.remembered = 100_000
        self.lock = threading.Lock()
        self.delay = 0.0

    def respond(self, handler: Handler) -> None:
        if handler.command == "GET":
            return handler.reply(*self.list_models(handler))
        body = handler.body
        if handler.path == "/tokenize":
            return handler.reply(200, {"tokens": self.vocabulary.encode(body["prompt"])})
        with self.lock:
            if "prompt_logprobs" not in body:
                self.seen.append((handler.path, body))
            del self.seen[: -self.remembered]
            fault = self.next_fault()
        if fault is not None:
            return fault(handler)
        time.sleep(self.delay)
        try:
            answer = self.answer(handler.path, body)
        except Refusal as refusal:
            return handler.reply(refusal.status, {"error": {"message": str(refusal)}})
        handler.reply(200, None if answer is None else self.change(answer))

    def list_models(self, handler: Handler) -> tuple[int, Any]:
        card = {"id": self.model, "root": self.root, "parent": None, "owned_by": self.owned_by}
        adapters = [card | {"id": name, "root": root, "parent": self.model} for name, root in self.adapters.items()]
        if self.key and handler.headers.get("Authorization") != f"Bearer {self.key}":
            return 401, {}
        if self.models is not None:
            return 200, self.models
        return 200, {"data": [card | {"max_model_len": 4096}, *adapters]} if handler.path == "/v1/models" else {}

    def next_fault(self) -> Fault | None:
        """Return the fault of the next generation request."""
        return self.faults.pop(0) if self.faults else self.always

    def prompt_of(self, body: dict[str, Any]) -> list[int]:
        if "prompt" in body:
            return body["prompt"]
        return self.chat.prompt_ids(body["messages"], tools=body.get("tools"), **body.get("chat_template_kwargs") or {})

    def scores(self, body: dict[str, Any]) -> list[float]:
        """Return the log-probability of each id of a prompt after the first."""
        return [-0.5] * (len(self.prompt_of(body)) - 1)

    def turn(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a turn's text, `token_ids`, logprobs and `finish_reason`."""
        text = self.say(body)
        output = [*self.chat.encode(text), self.chat.end_id]
        return {"text": text, "token_ids": output, "logprobs": [-0.5] * len(output), "finish_reason": "stop"}

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        if "prompt_logprobs" in body:
            scored = zip(self.prompt_of(body)[1:], self.scores(body), strict=True)
            return {"choices": [{"prompt_logprobs": [None, *({str(i): {"logprob": value}} for i, value in scored)]}]}
        turn, prompt = self.turn(body), self.prompt_of(body)
        text, logprobs = turn.pop("text"), turn.pop("logprobs")
        if path == "/v1/completions":
            logprobs = {"token_logprobs": logprobs}
            return {"choices": [{"text": text, "prompt_token_ids": prompt, "logprobs": logprobs, **turn}]}
        message = {"role": "assistant", **self.message(body, text)}
        content = [{"token": "x", "logprob": value, "bytes": None, "top_logprobs": []} for value in logprobs]
        return {
            "id": "1", "object": "chat.completion", "created": 1, "model": self.model, "prompt_token_ids": prompt,
            "choices": [{"index": 0, "message": message, "logprobs": {"content": content}, **turn}],
        }  # fmt: skip


def status(code: int, message: str = "no", **headers: str) -> Fault:
    """Answer with an error in the form of OpenAI endpoints."""
    return lambda handler: handler.reply(code, {"error": {"message": message, "type": "e", "code": code}}, **headers)


def drop(handler: Handler) -> None:
    """Close the connection without an answer."""
    handler.close_connection = True
    handler.connection.close()


def hang(handler: Handler) -> None:
    """Answer too late."""
    time.sleep(1.5)
    handler.close_connection = True


def echo_key(handler: Handler) -> None:
    """Refuse and repeat the key in the error, as some endpoints do."""
    status(401, f"Incorrect API key provided: {handler.headers['authorization']}")(handler)
