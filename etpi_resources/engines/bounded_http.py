"""An HTTP client that has a deadline for each whole answer, and a limit of its decoded bytes."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ssl import SSLContext
from typing import Any

import httpcore
import httpx

from etpi_resources.outside import Unreadable

_ERROR_BYTES = 1 << 16
"""The most bytes that are read of the page of an error or a redirect."""
_PIECE = 1 << 16


@dataclass(frozen=True)
class Answer:
    """A whole answer.

    Attributes:
        body: decoded; the beginning of it if the status is of no success.
        moved_to: the address to which a redirect points, else "".
    """

    status: int
    headers: Mapping[str, str]
    body: bytearray
    moved_to: str


class BoundedClient:
    """A client for one request at a time. It follows no redirects.

    Args:
        connect_seconds: the longest wait for a connection.
        proxies: use the proxies that the environment names.
    """

    def __init__(
        self,
        *,
        headers: Mapping[str, str],
        connect_seconds: float,
        tls: SSLContext | bool = True,
        proxies: bool = False,
    ) -> None:
        self._clock = _Clock()
        timeout = httpx.Timeout(None, connect=connect_seconds)
        self._client = httpx.Client(headers={"Accept-Encoding": "identity", **headers}, timeout=timeout, verify=tls,
                                    trust_env=proxies)  # fmt: skip
        # httpx has no deadline for a whole answer: each of its time-outs is for one read.
        for transport in (self._client._transport, *self._client._mounts.values()):
            if isinstance(transport, httpx.HTTPTransport):
                transport._pool._network_backend = self._clock

    def send(
        self, method: str, url: str, body: Any = None, *, seconds: float, bytes_per_byte: int = 0, most_bytes: int
    ) -> Answer:
        """Send a request and read its whole answer.

        Args:
            seconds: from now to the end of the answer.
            most_bytes, bytes_per_byte: the most decoded bytes of the answer, and so many more per byte of the request.

        Raises:
            httpx.HTTPError: there is no connection, or no whole answer in time.
            Unreadable: the answer has more bytes, or an encoding that was not asked for; or the URL, or that of a
                redirect, is no address.
        """
        self._clock.deadline = time.monotonic() + seconds
        try:
            request = self._client.build_request(method, url, json=body)
            response = self._client.send(request, stream=True)
        except (httpx.InvalidURL, UnicodeError) as error:  # of the request, of its host, or of a redirect
            raise Unreadable(f"no address: {error}") from None
        most = most_bytes + bytes_per_byte * len(request.content)
        try:
            good = response.is_success
            content = _decoded(response, most if good else _ERROR_BYTES, refuse=good)
            moved_to = str(response.next_request.url) if response.next_request else ""
        finally:
            response.close()
            self._client.cookies.clear()
        return Answer(response.status_code, response.headers, content, moved_to)

    def close(self) -> None:
        self._client.close()


def _decoded(response: httpx.Response, most: int, refuse: bool) -> bytearray:
    """Return the body, decoded in steps: a few bytes of gzip can stand for gigabytes."""
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    inflate = zlib.decompressobj(wbits=47) if encoding in ("gzip", "deflate") else None
    if inflate is None and encoding != "identity":
        raise Unreadable(f"it has the encoding {encoding[:40]!r}, which was not asked for")
    body = bytearray()
    try:
        for piece in response.iter_raw(_PIECE):
            body += piece if inflate is None else inflate.decompress(piece, most + 1 - len(body))
            if len(body) > most and refuse:
                raise Unreadable(f"it has more than {most:,} bytes, which is more than an answer to the request needs")
            if len(body) > most:
                return body[:most]
    except zlib.error as error:
        raise Unreadable(f"its {encoding} cannot be decoded: {error}") from None
    if inflate is not None and not inflate.eof:
        raise Unreadable(f"its {encoding} ends early")
    return body


class _Clock(httpcore.SyncBackend):
    """The network, with the deadline of the request under way in every read and write."""

    deadline = float("inf")

    def left(self, timeout: float | None, error: type[Exception]) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise error("the whole answer took too long")
        return left if timeout is None else min(left, timeout)

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        timeout = self.left(timeout, httpcore.ConnectTimeout)
        return _Stream(super().connect_tcp(host, port, timeout, local_address, socket_options), self)


class _Stream(httpcore.NetworkStream):
    def __init__(self, inner: httpcore.NetworkStream, clock: _Clock) -> None:
        self._inner, self._clock = inner, clock

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, self._clock.left(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for start in range(0, len(buffer), _PIECE):
            self._inner.write(buffer[start : start + _PIECE], self._clock.left(timeout, httpcore.WriteTimeout))

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        timeout = self._clock.left(timeout, httpcore.ConnectTimeout)
        return _Stream(self._inner.start_tls(ssl_context, server_hostname, timeout), self._clock)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)
