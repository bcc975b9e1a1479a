"""An HTTP client for one or more OpenAI-compatible servers of a model: load balancing, retries, and failover.

A conversation stays with its server while that server works, because the server caches the prefix; a new conversation
goes to the server with the fewest requests under way. A server that does not answer is excluded for a while, then its
health is checked.
"""

from __future__ import annotations

import json
import math
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel

from etpi_resources.engines import EngineUnavailable, FinishReason
from etpi_resources.engines.answers import Completed, typed
from etpi_resources.engines.bounded_http import Answer, BoundedClient
from etpi_resources.outside import Unreadable, read_json
from etpi_resources.secrets import read_secret

FINISH: Mapping[str | None, FinishReason] = {
    "stop": "stop", "tool_calls": "stop", "function_call": "stop", "length": "length",
    "eos": "stop", "eos_token": "stop", "stop_sequence": "stop", "end_turn": "stop", "tool_use": "stop",
    "max_tokens": "length", "model_length": "length",
}  # fmt: skip
"""`finish_reason` of a server -> ours. Those of the last two lines are of Together, Text Generation Inference, Mistral,
and of gateways that pass on Anthropic's."""

ATTEMPTS = 6
TIMEOUT_ATTEMPTS = 2
"""A request that timed out is retried once only: a server that hangs keeps its hardware busy."""

BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.5, 8.0
RATE_BACKOFF, MAX_RATE_BACKOFF_SECONDS = 4, 60.0
"""The factor between waits after 429, and the longest one: quotas are often per minute, and not every server says when
to try again."""

MOST_TRIES = 20
"""A request that is over a quota by itself is given up after these, although others are answered."""

HEALTH_SECONDS = 5.0
EXCLUDE_SECONDS, MAX_EXCLUDE_SECONDS = 1.0, 60.0
MAX_SESSIONS = 10_000
"""The number of conversations whose server is remembered."""

_MOST_CHARACTERS = 1000
"""The most characters of a server's error in a message."""

MOST_BYTES, BYTES_PER_TOKEN, BYTES_PER_BYTE = 2 << 20, 512, 32
"""The most bytes of an answer: for any, for each token that may be generated (its log-probability as JSON), and for
each byte of the request (the prompt's ids and log-probabilities)."""

BYTES_PER_VALUE = 12
"""An answer may have one value in so many of those bytes. Most values are ids and log-probabilities."""

_LARGE = 1 << 18
_RETRYABLE = (408, 409, 425, 429)
_SERVER_DOWN = (502, 503, 504)
"""Statuses of a gateway whose server is down or not ready."""

_UNREADABLE = 500
"""The status that an answer that cannot be read gets: its request is tried again."""

_REMEDY = (
    "if every answer is like this one, no server of OpenAI's interface is at this URL, or a gateway changes answers"
)
_PARSING = threading.Lock()
"""Large answers are parsed one at a time: that takes many times their bytes."""

_CONFIGURATION_ERRORS = (401, 402, 403, 404, 405)


class RetryableError(RuntimeError):
    """A request that got no usable answer and may get one when retried.

    Attributes:
        status: the HTTP status; None if the connection failed.
        retry_after: seconds that the server asks to wait.
        timed_out: whether the request timed out.
    """

    def __init__(
        self, message: str, status: int | None = None, retry_after: float = 0.0, timed_out: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.retry_after, self.timed_out = status, retry_after, timed_out


@dataclass
class _Server:
    """A server's state. `failures` counts consecutive failures (0: healthy), `failure` is the last one's message."""

    url: str
    answered: bool = False
    load: int = 0
    failures: int = 0
    excluded_until: float = 0.0
    failure: str = ""


def api_key(name: str | None) -> str | None:
    """Return the key in the environment variable `name`. Raises EngineUnavailable if the variable is not set."""
    if name is None:
        return None
    if not (key := read_secret(name)):
        raise EngineUnavailable(
            f"the environment variable {name}, which api_key_env names, is not set; export {name}=…"
        )
    return key


class Endpoints:
    """One or more servers of the same model. Thread-safe.

    Args:
        urls: "http://host:port", without a path.
        key_env: name of the environment variable with the key, which is sent as a bearer token and removed from every
            message.
        timeout: seconds that a request may take, from its first byte to the last of its answer.
        exit_reason: for a server that this process started: why it exited, None while it runs.
        attempts, backoff: how often a request is tried, and the first wait between tries in seconds.
        proxies: use the proxies that the environment names.
    Raises:
        EngineUnavailable: the key is not set, or a URL contains a user name or password.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        key_env: str | None = None,
        timeout: float = 600.0,
        exit_reason: Callable[[], str | None] = lambda: None,
        attempts: int = ATTEMPTS,
        backoff: float = BACKOFF_SECONDS,
        proxies: bool = False,
    ) -> None:
        for url in urls:
            if "@" in urlsplit(url).netloc:
                raise EngineUnavailable("a URL contains a password; name a variable with api_key_env instead")
        self._servers = [_Server(url.rstrip("/")) for url in dict.fromkeys(urls)]
        self._options = {"key_env": key_env, "timeout": timeout, "attempts": attempts, "backoff": backoff,
                         "proxies": proxies}  # fmt: skip
        self._key, self._key_env = api_key(key_env), key_env
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        self._new_client = partial(
            BoundedClient,
            headers=headers,
            connect_seconds=min(timeout, 10.0),
            tls=httpx.create_ssl_context(trust_env=proxies),
            proxies=proxies,
        )
        self._idle_clients: list[BoundedClient] = []
        self._timeout, self.exit_reason, self._attempts, self._backoff = timeout, exit_reason, attempts, backoff
        self._lock = threading.Lock()
        self._server_of_session: OrderedDict[str, _Server] = OrderedDict()
        self._answers = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the key, which a copy reads from its own environment, and without `exit_reason`: a copy in
        another process does not watch the servers."""
        return partial(Endpoints, self.urls, **self._options), ()

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self._servers]

    @property
    def answered_urls(self) -> list[str]:
        """The servers that have answered a request without an error."""
        return [server.url for server in self._servers if server.answered]

    def post(
        self, path: str, body: Mapping[str, Any], session: str = "", probe: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """POST to one of the servers, with retries; return its JSON answer, an object with one of `choices`.

        Args:
            session: decides which server.
            probe: the body of a small request, which shows whether a server without /health is healthy.
        Raises:
            EngineUnavailable: no server answers within the tries, none accepts the key, or none knows the model.
            RuntimeError: a healthy server refuses this request, or fails on it every time.
        """
        tries, failures, answers = 0, 0, self._answers
        while True:
            try:
                return self._try_once(path, body, session)
            except RetryableError as error:
                tries += 1
                if error.status == 429 and self._answers > answers:  # others are answered, so its turn comes
                    failures, answers = max(failures - 1, 0), self._answers
                failures += 1
                if tries == MOST_TRIES:
                    raise RuntimeError(f"{error} ({tries} tries, while others are answered)") from None
                if failures >= (min(self._attempts, TIMEOUT_ATTEMPTS) if error.timed_out else self._attempts):
                    is_healthy = self.is_healthy if probe is None else partial(self.answers, path=path, body=probe)
                    raise self._final_error(error, tries, is_healthy, probes=probe is not None) from None
                time.sleep(max(error.retry_after, self._wait(error, failures)))

    def request(
        self,
        url: str,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        model: type[BaseModel] | None = None,
    ) -> Any:
        """Send one request to the server at `url`, without retries; return its JSON, or its text if it sends no JSON.

        Args:
            model: the type that the answer must have.

        Raises as `post`, and RetryableError, also for an answer that cannot be read.
        """
        most = MOST_BYTES + BYTES_PER_TOKEN * int((body or {}).get("max_tokens") or 0)
        try:
            with self._client() as client:
                answer = client.send(
                    method, url + path, body, seconds=self._timeout, most_bytes=most, bytes_per_byte=BYTES_PER_BYTE
                )
            value = self._read(url, path, answer)
            value = value if model is None else typed(value, model)
        except httpx.HTTPError as error:
            raise self._connection_error(url, error) from None
        except ValueError as error:
            raise self._unreadable(url + path, f"cannot be read: {error}") from None
        for server in self._servers:
            server.answered |= server.url == url
        return value

    def complete(self, url: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST to the server at `url`, without retries; return its answer as `answers.Completed`, with one choice.

        Raises as `request`, also for an error that a gateway sends with status 200.
        """
        answer = self.request(url, "POST", path, body)
        choices = answer.get("choices") if isinstance(answer, dict) else None
        choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
        for part in (answer, choice):
            if isinstance(part, dict) and part.get("error"):
                error = self._error(url + path, _status_of(part["error"]), _error_message(part))
                # OpenRouter's 403 in a choice is of a prompt that it moderates, not of the key.
                raise RuntimeError(str(error)) if part is choice and isinstance(error, EngineUnavailable) else error
        if not isinstance(choice, dict):
            raise self._unreadable(url + path, f"has not exactly one choice: {answer}")
        try:
            return typed(answer, Completed)
        except ValueError as error:
            raise self._unreadable(url + path, f"has a wrong {error}") from None

    def answers(self, url: str, path: str, body: Mapping[str, Any]) -> bool:
        """Return whether the server answers a request at the first try."""
        with suppress(RuntimeError):
            return bool(self.complete(url, path, body))
        return False

    def is_healthy(self, url: str) -> bool:
        """Check the server's /health."""
        with suppress(httpx.HTTPError, Unreadable), self._client() as client:
            return client.send("GET", f"{url}/health", seconds=HEALTH_SECONDS, most_bytes=MOST_BYTES).status == 200
        return False

    def close(self) -> None:
        while self._idle_clients:
            self._idle_clients.pop().close()

    @contextmanager
    def _client(self) -> Iterator[BoundedClient]:
        """Lend a client to one request at a time: httpx searches all connections of a client at every request."""
        try:
            client = self._idle_clients.pop()
        except IndexError:
            client = self._new_client()
        try:
            yield client
        finally:
            self._idle_clients.append(client)

    def _wait(self, error: RetryableError, failures: int) -> float:
        """Return a random time in seconds, which grows with the failures."""
        if error.status == 429 and not error.retry_after:
            longest = min(self._backoff * RATE_BACKOFF ** (failures - 1), MAX_RATE_BACKOFF_SECONDS)
            return random.uniform(0.75 * longest, longest)
        return max(self._backoff / 2, random.uniform(0, min(self._backoff * 2 ** (failures - 1), MAX_BACKOFF_SECONDS)))

    # --- one try ---------------------------------------------------------------------------------------------------

    def _try_once(self, path: str, body: Mapping[str, Any], session: str) -> dict[str, Any]:
        server = self._pick(session)
        failure = ""
        try:
            answer = self.complete(server.url, path, body)
            with self._lock:
                self._answers += 1
            return answer
        except RetryableError as error:
            failure = str(error) if error.status in (None, *_SERVER_DOWN) else ""
            raise
        finally:
            with self._lock:
                server.load -= 1
            self._record(server, failure)

    def _read(self, url: str, path: str, answer: Answer) -> Any:
        """Return the value of an answer. Raises Unreadable, and the errors of a status that is no success."""
        is_json = "json" in answer.headers.get("content-type", "")
        if answer.status < 300:
            if not is_json:
                return answer.body.decode("utf-8", "replace")
            with _PARSING if len(answer.body) > _LARGE else nullcontext():
                return read_json(answer.body, max(MOST_BYTES, len(answer.body)) // BYTES_PER_VALUE)
        if answer.moved_to:
            target = self._without_key(answer.moved_to).removesuffix(path)
            raise EngineUnavailable(f"{url} moved to {target}; write that address into the URL")
        message = answer.body.decode("utf-8", "replace")
        with suppress(Unreadable):
            message = _error_message(read_json(answer.body, len(answer.body)))
        raise self._error(url + path, answer.status, message, _retry_after(answer.headers))

    def _error(self, where: str, status: int, message: str, retry_after: float = 0.0) -> RuntimeError:
        text = f"{where}: {status} {self._without_key(message)[:_MOST_CHARACTERS]}"
        if status in _RETRYABLE or status >= 500:
            return RetryableError(text, status, retry_after)
        if status in _CONFIGURATION_ERRORS:
            return EngineUnavailable(f"{text}. Check the model's name, the URL, api_key_env and the account's balance")
        return RuntimeError(text)

    def _connection_error(self, url: str, error: httpx.HTTPError) -> RuntimeError:
        if reason := self.exit_reason():
            return EngineUnavailable(reason)
        timed_out = isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout)
        what = f"no answer in {self._timeout:g} s" if timed_out else type(error).__name__
        return RetryableError(self._without_key(f"{url}: {what} {error}".strip()), timed_out=timed_out)

    def _unreadable(self, where: str, why: str) -> RetryableError:
        text = self._without_key(f"{where}: the answer {why}")[:_MOST_CHARACTERS]
        return RetryableError(f"{text}; {_REMEDY}", _UNREADABLE)

    def _without_key(self, text: str) -> str:
        return text if self._key is None else text.replace(self._key, f"${self._key_env}")

    def _final_error(
        self, error: RetryableError, tries: int, is_healthy: Callable[[str], bool], probes: bool
    ) -> RuntimeError:
        """Return the error of the last try: of the request, if a server is well that fails on it each time. Only a
        request that it answers (`probes`) shows that a server is well whose answers do not come in time."""
        failed = error.timed_out and probes or error.status is not None and error.status >= 500
        if failed and any(map(is_healthy, self.urls)):
            return RuntimeError(f"{error} ({tries} tries); the server is well otherwise")
        return EngineUnavailable(
            f"{error} ({tries} tries). Finished rollouts are kept; check the server and start again"
        )

    # --- choosing a server -----------------------------------------------------------------------------------------

    def _pick(self, session: str) -> _Server:
        for server in self._due_for_check():
            self._record(server, "" if self.is_healthy(server.url) else server.failure)
        with self._lock:
            usable = [server for server in self._servers if not server.failures]
            if not usable:  # a request is the only way to find out, so try the one that has been excluded longest
                usable = [min(self._servers, key=lambda server: server.excluded_until)]
            server = self._server_of_session.get(session)
            if server is None or server not in usable:
                server = min(usable, key=lambda server: server.load)
            if session:
                self._server_of_session[session] = server
                self._server_of_session.move_to_end(session)
                while len(self._server_of_session) > MAX_SESSIONS:
                    self._server_of_session.popitem(last=False)
            server.load += 1
            return server

    def _due_for_check(self) -> list[_Server]:
        """Return excluded servers whose time is over. They stay excluded for other threads during the check."""
        now = time.monotonic()
        with self._lock:
            due = [server for server in self._servers if server.failures and server.excluded_until <= now]
            for server in due:
                server.excluded_until = now + HEALTH_SECONDS
        return due

    def _record(self, server: _Server, failure: str) -> None:
        """Record that the server did not answer, with the message, or ("") that it did."""
        with self._lock:
            server.failure, server.failures = failure, server.failures + 1 if failure else 0
            seconds = min(EXCLUDE_SECONDS * 2 ** (server.failures - 1), MAX_EXCLUDE_SECONDS) if failure else 0.0
            server.excluded_until = time.monotonic() + seconds


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds that a server asks to wait, at most MAX_EXCLUDE_SECONDS; 0.0 if it says no number."""
    try:
        seconds = float(headers.get("retry-after", "0"))
    except ValueError:
        return 0.0
    return min(max(seconds, 0.0), MAX_EXCLUDE_SECONDS) if math.isfinite(seconds) else 0.0


def _status_of(error: Any) -> int:
    """Return the HTTP status that the error in an answer names, 500 if none."""
    code = str(error.get("code")) if isinstance(error, Mapping) else ""
    return int(code) if len(code) == 3 and code.isdecimal() and 400 <= int(code) < 600 else 500


def _error_message(answer: Any) -> str:
    """Return the message in a server's error, and its further fields: gateways put the provider's own error there."""
    answer = answer[0] if isinstance(answer, list) and answer else answer
    error = answer.get("error", answer) if isinstance(answer, Mapping) else answer
    if not (isinstance(error, Mapping) and error.get("message")):
        return str(error)
    more = {
        key: value
        for key, value in error.items()
        if key not in ("message", "type", "code") and value not in ("None", None)
    }
    return f"{error['message']} {json.dumps(more) if more else ''}".strip()
