"""The guard of both pages: which requests reach the application behind it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from httpx import Headers
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from etpi.web.guard import Guard, is_loopback
from etpi.web.serve import TOKEN_FILE, serve
from etpi_resources.secrets import kept_secret

JSON = {"content-type": "application/json"}


async def _answer(request: Request) -> Response:
    return PlainTextResponse(f"{request.method} {request.url.query}")


async def _echo(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_text(await socket.receive_text())


def _client(address: str = "http://localhost:3000", token: str | None = None) -> TestClient:
    paths = ("/", "/graphql", "/runs/{run}")
    routes = [Route(path, _answer, methods=["GET", "POST", "DELETE"]) for path in paths]
    app = Starlette(routes=[*routes, WebSocketRoute("/graphql", _echo)])
    return TestClient(Guard(app, ["gpu-node", "10.0.0.5"], token), base_url=address, follow_redirects=False)


@pytest.mark.parametrize(
    "host",
    ["localhost:3000", "127.0.0.1", "127.0.0.2:3000", "[::1]:3000", "[::ffff:127.0.0.1]", "GPU-Node", "10.0.0.5:80"],
)
def test_loopback_and_configured_names_are_answered(host: str) -> None:
    assert _client().get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:3000", "127.0.0.1.evil.example", "localhost.evil.example", "localhost@evil.example",
     "evil.example@localhost", "0.0.0.0", "10.0.0.6", "[::2]", "gpu-node.evil.example", "", "[::1",
     "localhost.", "127.1", "2130706433", "localhost, evil.example", "[::1].evil.example",
     "localhost:3000:80", "localhost:x", "localhost/evil.example"],
)  # fmt: skip
def test_another_host_is_refused_because_its_dns_may_be_a_strangers(host: str) -> None:
    assert _client().get("/", headers=Headers({b"host": host.encode()})).status_code == 403
    assert _client().post("/graphql", json={}, headers=Headers({b"host": host.encode()})).status_code == 403


def test_only_json_posts_change_something() -> None:
    page = _client()
    assert page.post("/graphql", json={"query": "mutation { x }"}).status_code == 200
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/graphql",
                 "text/plain; charset=application/json", "text/plain;application/json"):  # fmt: skip
        assert page.post("/graphql", content="{}", headers={"content-type": kind}).status_code == 415, kind
    assert page.post("/graphql?query=mutation", content="").status_code == 415
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
        assert page.request(method, "/", headers=JSON).status_code == 405, method


def test_graphql_by_get_is_refused_and_pages_are_not() -> None:
    page = _client()
    assert page.get("/graphql?query=mutation%20{x}").status_code == 405
    assert page.get("/graphql", headers={"accept": "text/html"}).status_code == 200
    for path in ("/runs/graphql", "/graphql/", "/graphql//"):  # a prefix may be in front
        assert page.get(f"{path}?query=x").status_code == 405
    assert page.get("/runs/1?query=x").text == "GET query=x"


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "", "http://localhost:3001", "http://localhost", "http://127.0.0.1:3000",
     "http://localhost:3000.evil.example", "http://localhost:3000/", "http://evil.example@localhost:3000",
     "chrome-extension://localhost:3000", "httphttps://localhost:3000", "file://"],
)  # fmt: skip
def test_another_origin_is_refused(origin: str) -> None:
    page, headers = _client(), {"origin": origin}
    assert page.post("/graphql", json={}, headers=headers).status_code == 403
    assert page.get("/", headers=headers).status_code == 403
    with pytest.raises(WebSocketDisconnect), page.websocket_connect("ws://localhost:3000/graphql", headers=headers):
        pass


def test_the_page_itself_may_post_and_open_a_websocket() -> None:
    page, headers = _client(), {"origin": "http://localhost:3000"}
    assert page.post("/graphql", json={}, headers=headers).status_code == 200
    with page.websocket_connect("ws://localhost:3000/graphql", headers=headers) as socket:
        socket.send_text("hello")
        assert socket.receive_text() == "hello"
    foreign = {"host": "evil.example:3000", "origin": "http://evil.example:3000"}
    with pytest.raises(WebSocketDisconnect), page.websocket_connect("/graphql", headers=foreign):
        pass


def test_other_sites_cannot_frame_or_embed_a_response() -> None:
    headers = _client().get("/").headers
    assert headers["x-frame-options"] == "SAMEORIGIN" and headers["cross-origin-resource-policy"] == "same-origin"


def test_token_is_needed_and_kept_in_a_cookie() -> None:
    page = _client(token="secret")
    for path in ("/", "/?token=", "/?token=wrong", "/?token=secre"):
        assert page.get(path).status_code == 401
    assert page.post("/graphql", json={}).status_code == 401
    with pytest.raises(WebSocketDisconnect), page.websocket_connect("/graphql"):
        pass
    assert page.get("/", headers={"authorization": "Bearer secret"}).status_code == 200
    admitted = page.get("/runs/1?a=b&token=secret")
    assert admitted.status_code == 303 and admitted.headers["location"] == "/runs/1?a=b"
    assert "httponly" in admitted.headers["set-cookie"].lower()
    assert page.get("/runs/1").status_code == 200
    assert page.post("/graphql", json={}).status_code == 200
    assert page.post("/graphql", json={}, headers={"origin": "http://evil.example"}).status_code == 403


def test_cookie_is_not_the_token_and_opens_this_server_alone() -> None:
    page, other = _client(token="secret"), _client("http://localhost:3001", token="secret")
    cookie = page.get("/?token=secret").headers["set-cookie"].partition(";")[0]
    assert cookie.startswith("etpi_3000=") and "secret" not in cookie
    name, _, value = cookie.partition("=")
    assert page.get("/", headers={"cookie": cookie}).status_code == 200
    for replayed in (cookie, f"etpi_3001={value}", f"{name}=secret", "etpi_3001=secret", f"{name}="):
        assert other.get("/", headers={"cookie": replayed}).status_code == 401, replayed
        assert _client(token="secret").get("/", headers={"cookie": replayed}).status_code == 401, "a later server"


def test_no_address_keeps_a_token() -> None:
    page = _client(token="secret")
    assert page.get("/?token=wrong").status_code == 401
    for query in ("token=secret&b=&b=2", "token=secret&b=&b=2&token=x", "b=&token=old&b=2"):
        answer = page.get(f"/runs/1?{query}")
        assert (answer.status_code, answer.headers["location"]) == (303, "/runs/1?b=&b=2")
    bearer = page.get("/?token=x", headers={"authorization": "Bearer secret"})
    assert bearer.status_code == 303 and "set-cookie" not in bearer.headers


def test_token_leads_to_no_other_host() -> None:
    admitted = _client(token="secret").get("http://localhost:3000//evil.example/?token=secret")
    assert admitted.headers["location"] == "/evil.example/"


def test_token_is_created_once_for_this_user_alone(tmp_path: Path) -> None:
    token = kept_secret(tmp_path / "home" / TOKEN_FILE)
    assert len(token) >= 40 and kept_secret(tmp_path / "home" / TOKEN_FILE) == token
    assert [file.name for file in (tmp_path / "home").iterdir()] == ["page_token"]
    assert stat.S_IMODE((tmp_path / "home" / "page_token").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("host", "on_cluster", "needs"),
    [("127.0.0.1", False, False), ("localhost", False, False), ("::1", False, False), ("127.0.0.1", True, True),
     ("10.0.0.5", False, True), ("0.0.0.0", False, True), ("::", False, True), ("gpu-node", False, True)],
)  # fmt: skip
def test_page_that_others_can_reach_needs_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, on_cluster: bool, needs: bool
) -> None:
    served: list[Guard] = []
    monkeypatch.setattr("uvicorn.run", lambda app, **_: served.append(app))
    monkeypatch.setattr("etpi.web.serve.backend", lambda: on_cluster or None)
    serve(Starlette(routes=[Route("/", _answer)]), "etpi view", host, 3000, [], tmp_path)
    page = TestClient(served[0], base_url="http://localhost:3000")
    assert page.get("/").status_code == (401 if needs else 200)
    assert page.get("/", headers={"authorization": f"Bearer {kept_secret(tmp_path / TOKEN_FILE)}"}).status_code == 200
    assert page.get("/", headers={"host": "0.0.0.0:3000"}).status_code == 403
    named = {"host": f"{host}:3000", "authorization": f"Bearer {kept_secret(tmp_path / TOKEN_FILE)}"}
    if host in ("10.0.0.5", "gpu-node"):
        assert page.get("/", headers=named).status_code == 200


def test_loopback_addresses() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.0.0.2", "::1")))
    assert not any(map(is_loopback, ("", "0.0.0.0", "::", "10.0.0.5", "head", "localhost.example")))


def test_dagsters_page_opens_on_the_graph_and_keeps_its_other_pages() -> None:
    from etpi.web.ui import opening_on_graph

    dagster = Starlette(routes=[Route("/{rest:path}", lambda request: PlainTextResponse(request.url.path))])
    with TestClient(opening_on_graph(dagster)) as client:
        assert client.get("/").url.path == "/asset-groups"
        assert client.get("/jobs").text == "/jobs"
