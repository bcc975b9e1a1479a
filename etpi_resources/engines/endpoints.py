"""Servers that answer alike: load spread over them, dead ones out and back in, requests tried again within bounds.

Belongs here: HTTP, keys, retries, and who is asked next. Does not belong here: what is asked (`vllm`), or starting a
server (`vllm_server`).

A conversation stays with its server while that lives, for its prefix is cached there; a new one goes to the server with
the fewest requests under way. A server that does not answer is left out, and asked for its health again after a while.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
from tenacity import RetryCallState, Retrying, retry_if_exception_type, wait_random_exponential

from etpi_resources.engines import EngineUnavailable

ATTEMPTS = 6
HUNG_ATTEMPTS = 2
"""A request that timed out is tried once more: what hangs keeps its hardware busy."""

BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 0.5, 8.0
HEALTH_SECONDS = 5.0
OUT_SECONDS, LONGEST_OUT_SECONDS = 1.0, 60.0
SESSIONS = 10_000
"""Conversations whose server is remembered."""

_TRY_AGAIN = (408, 409, 425, 429)
_OUT = (502, 503, 504)
"""Statuses of a server that is not there behind its gateway, or not ready."""

_ABOUT_US = (401, 403, 404)


class Unanswered(RuntimeError):
    """No usable answer came, and another try may get one. `status` is None where the connection failed."""

    def __init__(self, message: str, status: int | None = None, after: float = 0.0, hung: bool = False) -> None:
        super().__init__(message)
        self.status, self.after, self.hung = status, after, hung


@dataclass
class _Server:
    url: str
    load: int = 0
    failures: int = 0
    out_until: float = 0.0
    why: str = ""


def api_key(name: str | None) -> str | None:
    """The key in the environment variable `name`. Raises EngineUnavailable where it is not set."""
    if name is None:
        return None
    if not (key := os.environ.get(name)):
        raise EngineUnavailable(
            f"the environment variable {name}, which api_key_env names, is not set; export {name}=…"
        )
    return key


class Endpoints:
    """One or more servers of the same model. Thread-safe.

    Args:
        urls: "http://host:port", without a path.
        key_env: name of the environment variable with the key; sent as a bearer token, and taken out of every message.
        timeout: seconds a request may take.
        exit_reason: why a server that this process started has ended, None while it runs.
        attempts, backoff: how often a request is tried, and the first wait between tries in seconds.
    Raises:
        EngineUnavailable: the key is not set, or an URL carries a user name or password.
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
    ) -> None:
        for url in urls:
            if "@" in urlsplit(url).netloc:
                raise EngineUnavailable("an URL carries a password; name a variable with api_key_env instead")
        self._servers = [_Server(url.rstrip("/")) for url in dict.fromkeys(urls)]
        self._key, self._key_env = api_key(key_env), key_env
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        self._client = httpx.Client(
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=min(timeout, 10.0)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=False,
        )
        self._timeout, self._exit_reason, self._attempts, self._backoff = timeout, exit_reason, attempts, backoff
        self._lock = threading.Lock()
        self._homes: OrderedDict[str, _Server] = OrderedDict()

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self._servers]

    def post(self, path: str, body: Mapping[str, Any], session: str = "") -> dict[str, Any]:
        """The JSON answer of a server to a POST; which one is chosen by `session`.

        Raises:
            EngineUnavailable: no server answers within the tries, none takes the key, or none knows the model.
            RuntimeError: a server that is well refuses this very request, or fails on it every time.
        """
        retrying = Retrying(
            retry=retry_if_exception_type(Unanswered), stop=self._enough, wait=self._pause, reraise=True
        )
        try:
            return retrying(self._once, path, body, session)
        except Unanswered as error:
            tried = f"{error} ({self._attempts if not error.hung else HUNG_ATTEMPTS} tries)"
            if error.status is not None and error.status >= 500 and any(map(self.well, self.urls)):
                raise RuntimeError(f"{tried}; the server is well otherwise") from None
            raise EngineUnavailable(f"{tried}. What is finished is kept; see to the server and start again") from None

    def ask(self, url: str, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON answer (text where it is none) of one named server, asked once. Raises as `post`, and Unanswered."""
        try:
            response = self._client.request(method, url + path, json=body)
        except httpx.HTTPError as error:
            raise self._lost(url, error) from None
        return self._read(url, response)

    def well(self, url: str) -> bool:
        """Whether the server says that it is."""
        with suppress(httpx.HTTPError):
            return self._client.get(f"{url}/health", timeout=HEALTH_SECONDS).status_code == 200
        return False

    def close(self) -> None:
        self._client.close()

    # --- one try ---------------------------------------------------------------------------------------------------

    def _once(self, path: str, body: Mapping[str, Any], session: str) -> dict[str, Any]:
        server = self._take(session)
        why = ""
        try:
            return self.ask(server.url, "POST", path, body)
        except Unanswered as error:
            why = str(error) if error.status in (None, *_OUT) else ""
            raise
        finally:
            with self._lock:
                server.load -= 1
            self._note(server, why)

    def _read(self, url: str, response: httpx.Response) -> Any:
        status = response.status_code
        if status < 300:
            try:
                return response.json() if "json" in response.headers.get("content-type", "") else response.text
            except ValueError:
                raise Unanswered(f"{url} answered with broken JSON", 502) from None
        said = self._clean(f"{url}{response.request.url.path}: {status} {_message(response)}")
        if status in _TRY_AGAIN or status >= 500:
            with suppress(ValueError):
                raise Unanswered(said, status, float(response.headers.get("retry-after", "0")))
            raise Unanswered(said, status)
        if status in _ABOUT_US:
            raise EngineUnavailable(f"{said}. Look at the model's name, the URL and api_key_env")
        raise RuntimeError(said)

    def _lost(self, url: str, error: httpx.HTTPError) -> RuntimeError:
        if why := self._exit_reason():
            return EngineUnavailable(why)
        hung = isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout)
        what = f"no answer in {self._timeout:g} s" if hung else type(error).__name__
        return Unanswered(self._clean(f"{url}: {what} {error}".strip()), hung=hung)

    def _clean(self, text: str) -> str:
        return text if self._key is None else text.replace(self._key, f"${self._key_env}")

    def _enough(self, state: RetryCallState) -> bool:
        error = state.outcome.exception() if state.outcome else None
        hung = isinstance(error, Unanswered) and error.hung
        return state.attempt_number >= (min(self._attempts, HUNG_ATTEMPTS) if hung else self._attempts)

    def _pause(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        asked = error.after if isinstance(error, Unanswered) else 0.0
        drawn = wait_random_exponential(multiplier=self._backoff, max=LONGEST_BACKOFF_SECONDS)(state)
        return max(min(asked, LONGEST_OUT_SECONDS), self._backoff / 2, drawn)

    # --- who is asked ----------------------------------------------------------------------------------------------

    def _take(self, session: str) -> _Server:
        for server in self._due():
            self._note(server, "" if self.well(server.url) else server.why)
        with self._lock:
            usable = [server for server in self._servers if not server.failures]
            if not usable:  # the one that has been out the longest: asking is the only way to know
                usable = [min(self._servers, key=lambda server: server.out_until)]
            home = self._homes.get(session)
            if home is None or home not in usable:
                home = min(usable, key=lambda server: server.load)
            if session:
                self._homes[session] = home
                self._homes.move_to_end(session)
                while len(self._homes) > SESSIONS:
                    self._homes.popitem(last=False)
            home.load += 1
            return home

    def _due(self) -> list[_Server]:
        """Servers left out that are to be asked again; others wait for the answer of whoever asks first."""
        now = time.monotonic()
        with self._lock:
            due = [server for server in self._servers if server.failures and server.out_until <= now]
            for server in due:
                server.out_until = now + HEALTH_SECONDS
        return due

    def _note(self, server: _Server, why: str) -> None:
        """The server did not answer, and why; or it did."""
        with self._lock:
            server.why, server.failures = why, server.failures + 1 if why else 0
            out = min(OUT_SECONDS * 2 ** (server.failures - 1), LONGEST_OUT_SECONDS) if why else 0.0
            server.out_until = time.monotonic() + out


def _message(response: httpx.Response) -> str:
    """What a server's error says, without its envelope."""
    with suppress(ValueError, AttributeError, TypeError):
        found = response.json()
        error = found.get("error", found)
        return str(error.get("message", error) if isinstance(error, Mapping) else error)[:500]
    return response.text[:500]
