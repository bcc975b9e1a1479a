"""A loopback server whose every request one function answers, on the standard library alone."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class Handler(BaseHTTPRequestHandler):
    """One connection's requests; `content` is the body of the present one."""

    protocol_version = "HTTP/1.1"
    content = b""

    def setup(self) -> None:
        super().setup()
        self.server.connections.append(self.connection)  # pyright: ignore[reportAttributeAccessIssue]

    def do_GET(self) -> None:
        self.content = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.respond(self)  # pyright: ignore[reportAttributeAccessIssue]

    do_POST = do_PUT = do_HEAD = do_GET

    @property
    def body(self) -> Any:
        """The content, read as JSON."""
        return json.loads(self.content or b"{}")

    def reply(self, status: int, answer: Any = None, **headers: str) -> None:
        """Send bytes as they are, anything else as JSON; None: an answer without a body."""
        data, kind = (answer or b"", {}) if answer is None or isinstance(answer, bytes) else (
            json.dumps(answer).encode(), {"content-type": "application/json"}
        )  # fmt: skip
        self.send_response(status)
        for name, value in {**kind, "content-length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


class WebServer:
    """A context manager; `respond` calls `reply` of the handler that it is given."""

    def __init__(self, respond: Callable[[Handler], object], port: int = 0, host: str = "127.0.0.1") -> None:
        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.connections: list[socket.socket] = []
        self._server.respond, self._server.connections = respond, self.connections  # pyright: ignore[reportAttributeAccessIssue]
        self.port = self._server.server_address[1]
        self.url = f"http://{host}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for connection in self.connections:
            with suppress(OSError):  # clients may keep connections open
                connection.shutdown(socket.SHUT_RDWR)


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]
