"""The guard: the ASGI middleware in front of both pages, so that no website can drive or read them.

A website can make its visitor's browser send requests to any address, loopback ones included, and can resolve a name
of its own to them (DNS rebinding). Neither Dagster's page nor a server of static pages recognises such requests.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]+)?")
_READING = ("GET", "HEAD")
_OF_THIS_PAGE_ALONE = {"X-Frame-Options": "SAMEORIGIN", "Cross-Origin-Resource-Policy": "same-origin"}


def is_loopback(host: str) -> bool:
    """Return whether a host, a name or an address, is this machine's loopback."""
    if host == "localhost":
        return True
    try:
        address = ip_address(host)
        # Python 3.13 looks into an IPv4 address within an IPv6 one, 3.11 does not.
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    except ValueError:
        return False


class Guard:
    """Pass on requests that a user of the page sent, and refuse those of other websites.

    - The Host is a loopback name or address, or one of `names`.
    - With a token, a request has it as `Authorization: Bearer`, or has the cookie that an address with `?token=` sets
      once. Browsers send the cookie to every port of a host name, so it is not the token: it opens no other
      page, and ends with this server. Until then, a server that receives it could use it here.
    - A request with an Origin comes from the page itself; so does the request that opens a websocket.
    - A request that changes something is a POST of JSON, which a website cannot send to another origin without its
      consent. GraphQL by GET is refused, except for its console, which is HTML.
    """

    def __init__(self, app: ASGIApp, names: Collection[str] = (), token: str | None = None) -> None:
        self._app, self._token = app, token
        self._names = {name.lower() for name in names}
        self._session = secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
        elif refusal := self._refusal(HTTPConnection(scope)):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, _with_headers(send))

    def _refusal(self, request: HTTPConnection) -> Response | None:
        host = request.headers.get("host", "")
        if not self._is_own(host):
            return _refused(
                403, "This page does not answer to this host name. Use localhost, or start it with --name NAME"
            )
        if self._token is not None:
            if admission := self._admission(request):
                return admission
            if not self._is_admitted(request):
                return _refused(401, "This page needs a token: open it once with ?token=TOKEN; its command says where")
        origin = request.headers.get("origin")
        if origin is not None and origin.lower().removeprefix("https").removeprefix("http") != f"://{host.lower()}":
            return _refused(403, "This page does not answer to requests that another website sends")
        return None if request.scope["type"] == "websocket" else _method_refusal(request)

    def _is_own(self, host: str) -> bool:
        match = _HOST.fullmatch(host.lower())
        name = match[1].strip("[]") if match else ""
        return is_loopback(name) or name in self._names

    def _is_admitted(self, request: HTTPConnection) -> bool:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return _same(bearer, self._token or "")
        return _same(request.cookies.get(_cookie(request), ""), self._session)

    def _admission(self, request: HTTPConnection) -> Response | None:
        """Return a redirection to the address without its token that sets the cookie, if the token is right.

        An admitted request is redirected with any token, so that no address keeps one."""
        query = parse_qsl(request.scope["query_string"].decode("ascii", "replace"), keep_blank_values=True)
        tokens = [value for name, value in query if name == "token"]
        is_right = any(_same(token, self._token or "") for token in tokens)
        if not tokens or request.scope["type"] == "websocket" or not (is_right or self._is_admitted(request)):
            return None
        # One slash: an address that starts with two would lead to another host.
        path = "/" + request.scope["path"].lstrip("/")
        kept = urlencode([(name, value) for name, value in query if name != "token"])
        response = RedirectResponse(f"{path}?{kept}" if kept else path, status_code=303)
        if is_right:
            response.set_cookie(_cookie(request), self._session, httponly=True, samesite="lax")
        return response


def _cookie(request: HTTPConnection) -> str:
    """Return the cookie's name, which has the port as the browser knows it: all ports of a host name share cookies."""
    return f"etpi_{request.headers['host'].rpartition(']')[2].partition(':')[2] or 80}"


def _same(one: str, two: str) -> bool:
    return hmac.compare_digest(one.encode(), two.encode())


def _method_refusal(request: HTTPConnection) -> Response | None:
    if request.scope["method"] in _READING:
        by_get = request.scope["path"].rstrip("/").endswith("/graphql") and "text/html" not in request.headers.get(
            "accept", ""
        )
        return _refused(405, "GraphQL is answered by POST alone") if by_get else None
    if request.scope["method"] != "POST":
        return _refused(405, "Requests are GET, HEAD or POST")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return None if kind == "application/json" else _refused(415, "A POST has the content type application/json")


def _refused(status: int, reason: str) -> Response:
    return PlainTextResponse(f"{reason}\n", status_code=status)


def _with_headers(send: Send) -> Send:
    """Have each response forbid other websites to frame and to embed it."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(_OF_THIS_PAGE_ALONE)
        await send(message)

    return sending
