"""The mitmproxy addon that answers from a recording and, while it records, from allowed hosts.

mitmproxy's own interpreter runs it; etpi never imports it. Settings come in ETPI_DOWNLOADS as JSON: `socket` (the unix
socket that sandboxes reach), `recording` (its folder), `record` (whether missing responses may be fetched), `hosts`
(allowed names, with a port if it is another than 80 or 443; null: all), `most_bytes` (of all recorded bodies), `log` (a
file that gets a line for each refused request).
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import socket
from pathlib import Path
from typing import Any

from mitmproxy import connection, ctx, http  # pyright: ignore[reportMissingImports]

from etpi_resources.sandboxes.downloads.forward import pump
from etpi_resources.sandboxes.downloads.recording import Recording, Request

PORTS = (80, 443)
RECORDED = (200, 206, 301, 302, 303, 307, 308, 404, 410)
"""Statuses of responses that say the same tomorrow."""

_LOOPBACK = "127.0.0.1"
_DROPPED = ("if-range", "if-none-match", "if-modified-since", "accept-encoding", "cookie", "authorization")
"""Request headers that would make a response absent, encoded or personal; without them it can serve later requests."""


class Downloads:
    """Answers requests; one instance for the process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.recording = Recording(Path(settings["recording"]))
        self.record: bool = settings["record"]
        self.hosts: list[str] | None = settings["hosts"]
        self.socket, self.log = settings["socket"], settings["log"]
        self.room = settings["most_bytes"] - self.recording.size()
        self.ports: set[int] = set()
        self.server: asyncio.Server | None = None

    async def running(self) -> None:
        if self.server is None:
            ((_, port, *_),) = ctx.master.addons.get("proxyserver").listen_addrs()
            self.server = await asyncio.start_unix_server(lambda r, w: self._bridge(r, w, port), self.socket)
            os.chmod(self.socket, 0o666)  # sandboxes run as users of their own
            print("ready", flush=True)

    def client_connected(self, client: connection.Client) -> None:
        if client.peername[1] not in self.ports:
            client.error = "only through the socket"

    async def server_connect(self, data: Any) -> None:
        """Connect with an address that was judged here, so that a name cannot mean another one a moment later."""
        if self.hosts is not None:
            return
        server = data.server
        host, port = server.address
        addresses = await asyncio.to_thread(_public_addresses, host)
        if not addresses:
            server.error = f"{host} is in this machine or its network"
            return
        server.sni = server.sni or host
        server.address = (addresses[0], port)

    def http_connect(self, flow: http.HTTPFlow) -> None:
        self._check(flow, flow.request.host, flow.request.port)

    def request(self, flow: http.HTTPFlow) -> None:
        request = flow.request
        if not self._check(flow, request.host, request.port):
            return
        if request.pretty_host != request.host or flow.client_conn.sni not in (None, request.host):
            return self._refuse(flow, f"{request.host} under the name of another host")
        if request.method not in ("GET", "HEAD"):
            return self._refuse(flow, f"{request.method} {request.url}")
        for name in _DROPPED:
            request.headers.pop(name, None)
        request.content = b""
        recorded = self.recording.find(_key(request))
        if recorded is not None:
            self._answer(flow, recorded.status, recorded.body.read_bytes(), dict(recorded.headers))
        elif not self.record:
            self._log(f"not recorded: {request.url}")
            self._answer(flow, 404, f"not recorded: {request.url}\n")
        elif self.room <= 0:
            self._log("failed: the recording has reached params.grading.most_gib")
            self._answer(flow, 507, "the recording has reached params.grading.most_gib\n")

    def responseheaders(self, flow: http.HTTPFlow) -> None:
        response = flow.response
        if "answered" in flow.metadata or response.status_code not in RECORDED:
            return
        body = flow.metadata["body"] = self.recording.body()

        def keep(data: bytes) -> bytes:
            body.write(data)
            self.room -= len(data)
            return data

        response.stream = keep

    def response(self, flow: http.HTTPFlow) -> None:
        if (body := flow.metadata.pop("body", None)) is None:
            return
        request, response = flow.request, flow.response
        length = response.headers.get("content-length")
        if request.method != "HEAD" and length is not None and int(length) != body.size:
            return body.drop()
        headers = {name.lower(): value for name, value in response.headers.items()}
        self.recording.put(_key(request), response.status_code, headers, body)

    def error(self, flow: http.HTTPFlow) -> None:
        if flow.error is not None and "client disconnected" not in flow.error.msg.lower():  # it may, and does
            self._log(f"failed: {flow.request.url}: {flow.error.msg}")
        if body := flow.metadata.pop("body", None):
            body.drop()

    def _check(self, flow: http.HTTPFlow, host: str, port: int) -> bool:
        """Return whether the host may be asked; else refuse the request."""
        names = (f"{host}:{port}", *((host,) if port in PORTS else ()))
        if _public_addresses(host) if self.hosts is None else any(name in self.hosts for name in names):
            return True
        self._refuse(flow, f"{host}:{port}")
        return False

    def _refuse(self, flow: http.HTTPFlow, what: str) -> None:
        self._log(f"refused: {what}")
        self._answer(flow, 403, f"grading may not reach {what}; params.grading.hosts lists hosts\n")

    def _answer(self, flow: http.HTTPFlow, status: int, body: str | bytes, headers: dict[str, str] = {}) -> None:  # noqa: B006
        flow.metadata["answered"] = True
        flow.response = http.Response.make(status, body, headers)
        if "content-length" in headers:  # of a HEAD request: the length of the body that it does not have
            flow.response.headers["content-length"] = headers["content-length"]

    def _log(self, line: str) -> None:
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(line + "\n")

    async def _bridge(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        """Connect one client of the socket with the proxy's own port, which takes no other clients."""
        upstream = socket.socket()
        upstream.setblocking(False)
        upstream.bind((_LOOPBACK, 0))
        local_port = upstream.getsockname()[1]
        self.ports.add(local_port)
        try:
            await asyncio.get_running_loop().sock_connect(upstream, (_LOOPBACK, port))
            there, back = await asyncio.open_connection(sock=upstream)
            await asyncio.gather(pump(reader, back), pump(there, writer))
        except OSError:
            writer.close()
        finally:
            self.ports.discard(local_port)


def _public_addresses(host: str) -> list[str]:
    """Return the host's addresses; none if one of them is in this machine or its network."""
    try:
        addresses = [str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []
    return addresses if all(ipaddress.ip_address(address).is_global for address in addresses) else []


def _key(request: http.Request) -> Request:
    return request.method, request.url, request.headers.get("accept", ""), request.headers.get("range", "")


addons = [Downloads(json.loads(os.environ["ETPI_DOWNLOADS"]))]
