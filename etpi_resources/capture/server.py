"""The HTTP server in front of an engine: attempts with keys and budgets, answers whole or as server-sent events.

An attempt is one path (`/a/NAME/v1`) and one key. If the harness hangs up, the call is still recorded. A request
with an equal body then joins it, so that a retry samples nothing twice; while the first client waits, it is new.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import socket as sockets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from etpi_resources.capture.conversation import Conversation, Prompt, output_message
from etpi_resources.capture.dialects import (
    DIALECTS,
    HELPER_HEADERS,
    Asked,
    Dialect,
    Event,
    Refused,
    Turn,
    require_readable,
)
from etpi_resources.capture.store import HIDDEN, CallLog, read_log
from etpi_resources.engines import Completion, Engine, EngineUnavailable, Request, Sampler
from etpi_resources.engines.scripted import ScriptedEngine
from etpi_resources.outside import Unreadable, most_values_in, read_json

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat

MODEL = "policy"
"""The name under which every harness asks for the model."""

KEEPALIVE_SECONDS = 10.0
"""Time after which a streamed answer gets a comment, so that no client gives up waiting."""

SMALLEST_OUTPUT = 16
"""A request is refused as too long if its prompt leaves fewer ids than this."""

MOST_BODY_BYTES = 32 * 2**20
"""The most bytes of an attempt's requests that are read or answered at the same time. A request beyond them is refused
before it is read whole."""

VALUE_BYTES = 64
"""Each value of JSON counts as so many, besides its text: it takes more memory than `{}` does."""

MOST_TEXT_BYTES, TOKEN_BYTES = 2**20, 32
"""The most bytes of one request, and so many more per token of the context: a longer prompt does not fit, and encoding
it would take hundreds of times its bytes."""

MOST_AUX_ROWS = 1000
"""The most requests of an attempt that are recorded without being calls."""

_MOST_CHARACTERS = 2000
"""The most characters of a value of a request in the log, except for messages and tools."""

_MOST_SETTINGS = 64
_AT_ONCE = 64
_TOO_LONG = "the prompt exceeds this model's maximum context length"
_KEPT_HEADERS = ("user-agent", "x-stainless-retry-count", "anthropic-beta", *HELPER_HEADERS)
"""Headers that say which part of a harness sends a request. No header with a key is among them."""


@dataclass(frozen=True)
class Budget:
    """The limits of an attempt, None for none.

    Attributes:
        max_calls: calls, refused ones included.
        max_output_tokens: output ids of all calls together; only calls at the same time can exceed it.
        max_model_len: ids of prompt and output of one call.
    """

    max_model_len: int
    max_calls: int | None = None
    max_output_tokens: int | None = None


@dataclass(eq=False)
class _Call:
    """A call, the request that waits for its answer, and whether that got it."""

    number: int
    result: asyncio.Future[Turn | Refused]
    request: HttpRequest
    delivered: bool = False

    async def lost(self) -> bool:
        """Return whether nobody waits for the answer, and nobody got it."""
        waited = self.request
        gone = await waited.is_disconnected()  # meanwhile another request can join
        return gone and not self.delivered and self.request is waited


class Weights:
    """The version of the engine's weights. New calls wait while they change, and a change waits for calls under way."""

    def __init__(self, version: str = "") -> None:
        self.version, self._calls, self._changes, self._idle = version, 0, False, threading.Condition()

    @contextmanager
    def used(self) -> Iterator[str]:
        """Keep the version during a call."""
        with self._idle:
            self._idle.wait_for(lambda: not self._changes)
            self._calls += 1
        try:
            yield self.version
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()

    @contextmanager
    def change(self, version: str) -> Iterator[None]:
        """Hold calls back; those after it have the new version, unless it failed."""
        with self._idle:
            self._idle.wait_for(lambda: not self._changes)
            self._changes = True
            self._idle.wait_for(lambda: not self._calls)
        try:
            yield
            self.version = version
        finally:
            with self._idle:
                self._changes = False
                self._idle.notify_all()


@dataclass(eq=False)
class Attempt:
    """One attempt at a task, or one session of a person.

    Attributes:
        key: what its requests have to present.
        session: as in `engines.Request`; the same in a later attempt, so that the same calls sample the same.
        sampler: the settings of sampling; those that a harness asks for are only recorded.
        privileged: for scripted policies, see `engines.Request`.
        weights: shared by the attempts of an engine whose weights change.
        over: set when a budget is used up or a call failed.
        limit: the budget that is used up.
        failure: the error that ended the attempt, if one did.
        revoked: whether its key is refused.

    Raises:
        Refused: its log has ids of another vocabulary.
    """

    name: str
    key: str
    engine: Engine
    chat: ChatFormat
    log: CallLog
    sampler: Sampler
    budget: Budget
    session: str
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    privileged: Mapping[str, Any] = field(default_factory=dict)
    weights: Weights = field(default_factory=Weights)
    over: threading.Event = field(default_factory=threading.Event)
    limit: str = ""
    failure: Exception | None = None
    revoked: bool = False

    def __post_init__(self) -> None:
        self.calls, self.output_tokens, self.aux_rows, self.held_bytes = 0, 0, 0, 0
        self.log.secret = self.key
        self._lock = threading.Lock()
        self.last: dict[str, _Call] = {}
        self._conversation = Conversation(self.chat, self.template_kwargs)
        rows = list(read_log(self.log.path))  # of an earlier process
        if not rows:
            about = {"tokenizer": self.chat.name, "vocabulary": self.chat.vocabulary_hash}
            self.log.append({"attempt": self.name, **about})
        elif rows[0].get("vocabulary") != self.chat.vocabulary_hash:
            raise Refused(409, f"{self.log.path.name} has ids of another vocabulary than {self.chat.name!r}'s")
        for row in rows:
            self.calls = max(self.calls, row.get("call", 0))
            if "output_ids" in row:
                prompt = Prompt(row["prompt_ids"].tolist(), None, 0)
                self._conversation.add(
                    row["call"], prompt, row["output_ids"], [*row["messages"], row["message"]], row["tools"]
                )
        self._requires_logprobs = not isinstance(self.engine, ScriptedEngine)

    def answer(self, number: int, row: Mapping[str, Any], body: Mapping[str, Any], dialect: Dialect) -> Turn | Refused:
        """Compute and record a call; runs in a thread."""
        try:
            return self._generate(number, row, _asked(body, dialect))
        except Refused as refusal:
            refused = refusal
        except Exception as error:  # whatever fails, the runner decides what it means for the rollout
            error.__cause__ = error.__context__ = None
            self.failure = self.failure or error.with_traceback(None)
            refused = Refused(500, f"{type(error).__name__}: {error}")
        self.log.append({**row, "call": number, "status": refused.status, "error": _short(str(refused))})
        if self.failure or self.limit:
            self.over.set()
        return Refused(refused.status, refused.reason)  # with no traceback, whose frames have the request

    def hold(self, count: int) -> None:
        """Count bytes of requests that are read or answered, negative for those that no longer are."""
        with self._lock:
            self.held_bytes += count

    def log_aux(self, request: str, **more: Any) -> None:
        """Record a request that is no call."""
        self.aux_rows += 1
        if self.aux_rows <= MOST_AUX_ROWS:
            self.log.append({"attempt": self.name, "aux": _short(request), **more})

    def count_tokens(self, body: Mapping[str, Any]) -> int:
        """Return the length of the prompt of a request."""
        query = _asked(body, DIALECTS["messages"])
        try:
            return len(self._conversation.prompt(query.messages, query.tools).ids)
        except ValueError as error:
            raise Refused(400, str(error)) from None

    def _generate(self, number: int, row: Mapping[str, Any], query: Asked) -> Turn:
        self._require_budget(number)
        prompt = self._conversation.prompt(query.messages, query.tools)
        room = self.budget.max_model_len - len(prompt.ids)
        if room < SMALLEST_OUTPUT:
            raise Refused(400, f"{_TOO_LONG}: {len(prompt.ids)} of {self.budget.max_model_len} tokens")
        wanted = [self.sampler.max_tokens, room, *([query.max_tokens] if query.max_tokens else [])]
        if self.budget.max_output_tokens is not None:
            wanted.append(max(1, self.budget.max_output_tokens - self.output_tokens))
        sampler = replace(self.sampler, max_tokens=min(wanted))
        request = Request(
            f"{self.session}/{number}", self.session, tuple(prompt.ids), query.messages, sampler,
            tools=query.tools, privileged=self.privileged,
        )  # fmt: skip
        with self.weights.used() as version:
            (completion,) = self.engine.complete([request])
        output, prompt = self._checked(completion, prompt, len(query.messages))
        message = self._message(completion, prompt, output, query)
        finish = "tool_calls" if message.get("tool_calls") else completion.finish_reason
        self._conversation.add(number, prompt, output, [*query.messages, message], query.tools)
        with self._lock:
            self.output_tokens += len(output)
        known = 0 if prompt.parent is None else prompt.parent.length
        call = {
            "call": number,
            "parent": None if prompt.parent is None else prompt.parent.call,
            "status": 200,
            "seconds": round(time.time() - row["at"], 4),
            "messages": query.messages[len(query.messages) - prompt.new_messages :],
            "prompt_ids": prompt.ids[known:],
            "output_ids": output,
            "kept_ids": self.chat.as_history(output),
            "logprobs": None if completion.logprobs is None else list(completion.logprobs),
            "text": completion.text,
            "message": message,
            "finish": completion.finish_reason,
            "model": completion.model,
            "weights": version,
        }
        self.log.append({**row, **call}, query.tools)
        return Turn(f"call-{self.name}-{number}", message, finish, len(prompt.ids), len(output))

    def _require_budget(self, number: int) -> None:
        most = self.budget.max_calls
        if most is not None and number > most:
            self.limit = f"{most} calls"
        elif self.budget.max_output_tokens is not None and self.output_tokens >= self.budget.max_output_tokens:
            self.limit = f"{self.budget.max_output_tokens} output tokens"
        if self.limit:
            raise Refused(400, f"the attempt's budget of {self.limit} is used up")

    def _checked(self, completion: Completion, prompt: Prompt, messages: int) -> tuple[list[int], Prompt]:
        """Return the output and the prompt that the engine read, which may be the server's own rendering.

        Raises:
            EngineUnavailable: the answer lacks ids or log-probabilities.
            RuntimeError: the engine failed.
        """
        if completion.finish_reason == "error":
            raise RuntimeError(f"{self.engine.name} failed: {completion.text}")
        logprobs = completion.logprobs
        if not completion.output_ids or completion.prompt_ids is None or (self._requires_logprobs and logprobs is None):
            raise EngineUnavailable(
                f"{self.engine.name} answered without token ids or log-probabilities, so nothing can be captured; use "
                "a vLLM server that supports `return_token_ids`, with no proxy that drops fields before it"
            )
        output, read = list(completion.output_ids), list(completion.prompt_ids)
        return output, prompt if read == prompt.ids else Prompt(read, None, messages)

    def _message(self, completion: Completion, prompt: Prompt, output: list[int], query: Asked) -> dict[str, Any]:
        if completion.message is not None:  # the server's own parsers
            return {key: value for key, value in completion.message.items() if value or key == "content"}
        opened = self.chat.tail_form(prompt.ids) == "open"
        return output_message(self.chat, output, opened, query.tools)


def _asked(body: Mapping[str, Any], dialect: Dialect) -> Asked:
    """Read a request. Raises Refused for one that the dialect cannot read."""
    if (body.get("n") or 1) != 1:
        raise Refused(400, "n > 1 is not captured")
    try:
        query = dialect.read(body)
        require_readable(query)
        return query
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Refused(400, f"the request cannot be read: {type(error).__name__}: {error}") from error


class CaptureServer:
    """Serves attempts on a unix socket or a loopback port, in a thread; a context manager.

    Args:
        attempt: returns the attempt of a name; None: there is none.
        socket: the path of the unix socket; None: a port of 127.0.0.1.
        port: 0 takes a free one.
    """

    def __init__(self, attempt: Callable[[str], Attempt | None], *, socket: Path | None = None, port: int = 0) -> None:
        import uvicorn

        self._attempt = attempt
        self._socket = sockets.socket(sockets.AF_INET if socket is None else sockets.AF_UNIX)
        self._socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port) if socket is None else str(socket))
        self.port = 0 if socket else self._socket.getsockname()[1]
        if socket is not None:
            socket.chmod(0o666)  # sandboxes run as users of their own; their folder and the key keep others out
        methods = ["GET", "POST", "HEAD"]
        app = Starlette(routes=[Route("/a/{name}/{path:path}", self._handle, methods=methods)])
        config = uvicorn.Config(app, log_level="error", lifespan="off", ws="none", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="capture", daemon=True)
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="capture call")
        self._parser = ThreadPoolExecutor(1, thread_name_prefix="capture parser")

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.005)
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._parser.shutdown(wait=False, cancel_futures=True)
        self._socket.close()

    def wait(self) -> None:
        """Wait until the server ends."""
        self._thread.join()

    async def _handle(self, request: HttpRequest) -> Response:
        try:
            return await self._respond(request)
        except Refused as refusal:
            return _error(refusal)

    async def _respond(self, request: HttpRequest) -> Response:
        attempt = self._attempt(request.path_params["name"])
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        key = bearer or request.headers.get("x-api-key", "")
        known = attempt is not None and attempt.key and not attempt.revoked
        if attempt is None or not known or not hmac.compare_digest(key.encode(), attempt.key.encode()):
            raise Refused(401, "no attempt has this path and key")
        path = request.path_params["path"].removeprefix("v1/").replace(attempt.key, HIDDEN)
        if path == "models":
            card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "etpi"}
            return JSONResponse({"object": "list", "data": [card]})
        with _Held(attempt) as held:
            try:
                raw = await held.read(request)
                work = asyncio.get_running_loop().run_in_executor(self._parser, held.parse, raw)
                del raw
                body, digest = await work
            except Refused as refusal:
                attempt.log_aux(f"{request.method} /{path}", status=refusal.status)
                raise
            if path == "messages/count_tokens" and isinstance(body, dict):
                attempt.log_aux(path)
                length = asyncio.get_running_loop().run_in_executor(self._pool, attempt.count_tokens, body)
                return JSONResponse({"input_tokens": await length})
            if path not in DIALECTS or request.method != "POST" or not isinstance(body, dict):
                attempt.log_aux(f"{request.method} /{path}", status=404)
                raise Refused(404, f"{request.method} /{path} is not captured")
            return await self._answer(request, held, path, body, digest)

    async def _answer(
        self, request: HttpRequest, held: _Held, path: str, body: Mapping[str, Any], digest: str
    ) -> Response:
        attempt = held.attempt
        call = attempt.last.get(digest)
        if call is not None and await call.lost():
            call.request = request
            attempt.log.append({"attempt": attempt.name, "joined": call.number, "at": time.time()})
        else:
            attempt.last = {key: other for key, other in attempt.last.items() if not other.delivered}
            attempt.calls += 1
            sent = {key: request.headers[key].replace(attempt.key, HIDDEN) for key in _KEPT_HEADERS
                    if key in request.headers}  # fmt: skip
            row = {
                "attempt": attempt.name,
                "at": time.time(),
                "dialect": path,
                "stream": bool(body.get("stream")),
                "body": digest,
                "asked": _settings(body),
                "headers": {key: _short(value) for key, value in sent.items()},
            }
            loop = asyncio.get_running_loop()
            work = loop.run_in_executor(self._pool, attempt.answer, attempt.calls, row, body, DIALECTS[path])
            work.add_done_callback(held.keep())
            call = attempt.last[digest] = _Call(attempt.calls, work, request)
        return await _deliver(request, call, body, DIALECTS[path])


_CONTENT = ("messages", "input", "instructions", "system", "tools")
"""Keys of a request that are recorded as messages and tools; the others are the harness's settings."""


def _settings(body: Mapping[str, Any]) -> dict[str, Any]:
    keys = [key for key in body if key not in _CONTENT]
    return {_short(key): _short(body[key]) for key in keys[:_MOST_SETTINGS]}


def _short(value: Any) -> Any:
    """Return a value of a request; the beginning of its text if it is too long for the log."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return value if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS]


class _Held:
    """The share of a request in its attempt's MOST_BODY_BYTES; a context manager, whose end gives it back."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt, self._bytes = attempt, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.keep()()

    def keep(self) -> Callable[..., None]:
        """Keep the share after the context; return the function that gives it back."""
        share, self._bytes = self._bytes, 0

        return lambda *_: self.attempt.hold(-share)

    def _add(self, piece: bytes, length: int) -> None:
        count = len(piece) + VALUE_BYTES * most_values_in(piece)
        self._bytes += count
        self.attempt.hold(count)
        if length > MOST_TEXT_BYTES + TOKEN_BYTES * self.attempt.budget.max_model_len:
            raise Refused(413, f"{_TOO_LONG}: the request has more than {length - len(piece):,} bytes")
        if self._bytes > MOST_BODY_BYTES:
            raise Refused(413, f"{_TOO_LONG}: the request is larger than {MOST_BODY_BYTES >> 20} MiB in memory")
        if self.attempt.held_bytes > MOST_BODY_BYTES:
            raise Refused(429, f"the requests under way have more than {MOST_BODY_BYTES >> 20} MiB; try again")

    async def read(self, request: HttpRequest) -> bytearray:
        """Return the body. Raises Refused while it comes if it is too large."""
        raw = bytearray()
        async for piece in request.stream():
            self._add(piece, len(raw) + len(piece))
            raw += piece
        return raw

    def parse(self, raw: bytearray) -> tuple[Any, str]:
        """Return the value of a body, None if it is no JSON, and its hash; runs in a thread. The value has HIDDEN in
        place of the key, however it was escaped."""
        digest = hashlib.sha256(raw).hexdigest()[:32]
        try:
            return read_json(raw or b"{}", MOST_BODY_BYTES // VALUE_BYTES, self.attempt.key, HIDDEN), digest
        except Unreadable:
            return None, digest


async def _deliver(request: HttpRequest, call: _Call, body: Mapping[str, Any], dialect: Dialect) -> Response:
    """Send the answer of a call once there is one; a streamed one is kept alive until then."""
    stream = bool(body.get("stream"))
    done, _ = await asyncio.wait([call.result], timeout=KEEPALIVE_SECONDS if stream else None)
    if done and isinstance(refusal := call.result.result(), Refused):
        call.delivered = True
        return _error(refusal)

    async def lines() -> AsyncIterator[str]:
        while not (await asyncio.wait([call.result], timeout=KEEPALIVE_SECONDS))[0]:
            yield ": the model is still writing\n\n"
        result = call.result.result()
        if isinstance(result, Refused):
            yield _line(("error", _error_body(result)))
        else:
            events = dialect.write(body, result)
            _, whole = next(events)
            for line in map(_line, events) if stream else [json.dumps(whole)]:
                yield line
        if not await request.is_disconnected():
            call.delivered = True

    return StreamingResponse(lines(), media_type="text/event-stream" if stream else "application/json")


def _line(event: Event) -> str:
    name, data = event
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {data if isinstance(data, str) else json.dumps(data)}\n\n"


def _error_body(refusal: Refused) -> dict[str, Any]:
    """Return an error that clients of all dialects read."""
    code = "context_length_exceeded" if _TOO_LONG in str(refusal) else None
    return {"type": "error", "error": {"type": "invalid_request_error", "message": str(refusal), "code": code}}


def _error(refusal: Refused) -> Response:
    return JSONResponse(_error_body(refusal), refusal.status)


def new_key() -> str:
    """Return a random key."""
    return secrets.token_urlsafe(24)
