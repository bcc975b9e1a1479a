"""The proxy: what it lets through, what it records, and what it answers from a recording."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest

from etpi_assets.tasks import downloads
from etpi_resources.sandboxes import Environment, Limits
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory
from etpi_resources.sandboxes.downloads.proxy import (
    INDEX_HOSTS,
    DownloadProxy,
    ProxyUnavailable,
    mitmdump_program,
    shared_log,
    shared_proxy,
    through_proxy,
)
from etpi_resources.sandboxes.downloads.recording import Recording
from tests.support.web_server import Handler, WebServer

pytestmark = pytest.mark.usefixtures("mitmproxy")
ROOT = Path(__file__).resolve().parents[2]
WHEEL = bytes(range(256)) * 400


class Index(WebServer):
    """A package index on the loopback; it counts requests by path."""

    def __init__(self) -> None:
        super().__init__(self.answer)
        self.requests: list[str] = []
        self.personal: list[str] = []

    def answer(self, handler: Handler) -> None:
        self.requests.append(f"{handler.command} {handler.path}")
        self.personal += [name for name in ("cookie", "authorization") if name in handler.headers]
        status, body = (200, WHEEL) if handler.path.endswith(".whl") else (200, f"page {len(self.requests)}".encode())
        if span := handler.headers.get("range"):
            first, last = map(int, span.removeprefix("bytes=").split("-"))
            status, body = 206, body[first : last + 1]
        if "broken" in handler.path:
            status, body = 503, b"later"
        if "gone" in handler.path:
            status, body = 404, b""
        length = len(body)
        if "cut" in handler.path:
            length += 10
            handler.close_connection = True
        handler.reply(status, body, **{"content-length": str(length), "set-cookie": "who=you"})


@pytest.fixture
def index() -> Iterator[Index]:
    with Index() as server:
        yield server


def ask(proxy: DownloadProxy, url: str, method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    """Ask through the proxy's socket, as a sandbox does."""
    connection = http.client.HTTPConnection("proxy")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(proxy.folder / "socket"))
    connection.sock.settimeout(20)
    try:
        connection.request(method, url, headers={"Host": url.split("/")[2], **headers})
        answer = connection.getresponse()
        return answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()}
    finally:
        connection.close()


def test_what_was_fetched_once_is_answered_without_the_index(index, tmp_path):
    base = index.url
    hosts = [f"127.0.0.1:{index.port}"]
    with_network = DownloadProxy(tmp_path / "recording", record=True, hosts=hosts)
    try:
        page = ask(with_network, f"{base}/simple/boat/")
        assert page[:2] == (200, b"page 1") and "set-cookie" not in ask(with_network, f"{base}/simple/boat/")[2]
        wheel = ask(with_network, f"{base}/boat-1.whl", Accept="*/*")
        part = ask(with_network, f"{base}/boat-1.whl", Range="bytes=5-9")
        head = ask(with_network, f"{base}/boat-1.whl", "HEAD")
        gone = ask(with_network, f"{base}/gone/")
        assert (part[0], part[1], gone[0]) == (206, WHEEL[5:10], 404) and wheel[1] == WHEEL
        assert head[2]["content-length"] == str(len(WHEEL))
        broken, cut = ask(with_network, f"{base}/broken.whl"), _cut(with_network, f"{base}/cut.whl")
        assert broken[0] == 503 and cut
        assert ask(with_network, f"{base}/simple/boat/")[:2] == (200, b"page 1")  # a recording does not change
        assert any(line.startswith("failed") and "cut.whl" in line for line in with_network.log())
    finally:
        with_network.close()
    requests = list(index.requests)
    offline = DownloadProxy(tmp_path / "recording", record=False, hosts=hosts)
    try:
        for url, method, headers, before in [
            ("simple/boat/", "GET", {}, page),
            ("boat-1.whl", "GET", {"Accept": "*/*"}, wheel),
            ("boat-1.whl", "GET", {"Range": "bytes=5-9"}, part),
            ("boat-1.whl", "HEAD", {}, head),
            ("gone/", "GET", {}, gone),
        ]:
            after = ask(offline, f"{base}/{url}", method, **headers)
            assert after[:2] == before[:2] and after[2]["content-length"] == before[2]["content-length"]
        for url in ("broken.whl", "cut.whl", "other/"):
            assert ask(offline, f"{base}/{url}")[0] == 404
        assert f"not recorded: {base}/other/" in offline.log()
    finally:
        offline.close()
    assert index.requests == requests
    entries = [json.loads(path.read_text()) for path in (tmp_path / "recording" / "requests").iterdir()]
    assert sorted(entry["bytes"] for entry in entries) == [0, 0, 5, 6, len(WHEEL)]
    assert not list((tmp_path / "recording").glob(".body-*"))


def _cut(proxy: DownloadProxy, url: str) -> bool:
    try:
        ask(proxy, url)
    except (http.client.IncompleteRead, ConnectionError):
        return True
    return False


def test_recording_has_a_largest_size(index, tmp_path):
    base = index.url
    for answers in ([200, 507], [200, 507]):  # the second proxy finds it full
        proxy = DownloadProxy(tmp_path, record=True, hosts=[f"127.0.0.1:{index.port}"], most_bytes=len(WHEEL))
        assert [ask(proxy, f"{base}/{name}")[0] for name in ("boat-1.whl", "boat-2.whl")] == answers
        assert any("most_gib" in line for line in proxy.log())
        proxy.close()


def test_any_public_host_is_none_of_this_machine_or_its_network(index, tmp_path):
    proxy = DownloadProxy(tmp_path, record=True, hosts=None)
    try:
        for host in ("127.0.0.1", "localhost", "127.1", "10.0.0.1", "192.168.0.1", "169.254.169.254", "0.0.0.0"):
            assert ask(proxy, f"http://{host}:{index.port}/boat-1.whl")[0] == 403, host
        assert index.requests == []
    finally:
        proxy.close()


_REBINDING = """
import asyncio, json, os, socket, sys
from types import SimpleNamespace
os.environ["ETPI_DOWNLOADS"] = json.dumps(
    {"recording": sys.argv[1], "record": True, "hosts": None, "most_bytes": 1, "socket": "", "log": ""}
)
from etpi_resources.sandboxes.downloads.addon import addons
answers = iter(["8.8.8.8", "127.0.0.1"])
socket.getaddrinfo = lambda *_, **__: [(2, 1, 6, "", (next(answers), 0))]
for _ in range(2):
    server = SimpleNamespace(address=("a.example", 443), sni=None, error=None)
    asyncio.run(addons[0].server_connect(SimpleNamespace(server=server)))
    print(json.dumps([server.address[0], server.sni, bool(server.error)]))
"""


def test_name_that_moves_into_this_network_is_not_connected(tmp_path):
    """The address that was judged is the one that is connected; certificates are still those of the name."""
    script = [str(mitmdump_program().with_name("python")), "-c", _REBINDING, str(tmp_path)]
    run = subprocess.run(script, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    first, second = map(json.loads, run.stdout.splitlines())
    assert first == ["8.8.8.8", "a.example", False]
    assert second[2]


def test_index_gets_no_cookie_and_no_password(index, tmp_path):
    proxy = DownloadProxy(tmp_path, record=True, hosts=[f"127.0.0.1:{index.port}"])
    try:
        url = f"{index.url}/boat-1.whl"
        assert ask(proxy, url, Cookie="who=me", Authorization="Basic eDp5")[0] == 200
        assert index.requests and index.personal == []
    finally:
        proxy.close()


_TRIES = """
import json, socket, ssl, sys
PORT, VICTIM = 3128, int(sys.argv[1])

def say(data, tls=None, then=b""):
    link = socket.create_connection(("127.0.0.1", PORT), 10)
    link.sendall(data)
    if tls is not None:
        head = link.recv(4096)
        if b" 200 " not in head.splitlines()[0]:
            return head
        context = ssl.create_default_context(cafile="/run/downloads/authority.pem")
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if tls:
            link = context.wrap_socket(link, server_hostname=tls)
        link.sendall(then)
    return link.recv(4096)

def get(url, host=None, method="GET"):
    host = host or url.split("/")[2]
    return say(f"{method} {url} HTTP/1.1\\r\\nHost: {host}\\r\\nContent-Length: 0\\r\\n\\r\\n".encode())

def connect(target, tls=None, then=b""):
    return say(f"CONNECT {target} HTTP/1.1\\r\\nHost: {target}\\r\\n\\r\\n".encode(), tls, then)

inner = b"GET /simple/ HTTP/1.1\\r\\nHost: %s\\r\\n\\r\\n"
TRIES = {
    "an address": lambda: socket.create_connection(("1.1.1.1", 443), 3),
    "the host's loopback": lambda: socket.create_connection(("127.0.0.1", VICTIM), 3),
    "a name": lambda: socket.getaddrinfo("pypi.org", 443),
    "another host": lambda: get("http://example.com/"),
    "another host's address": lambda: get("http://1.1.1.1/"),
    "the host's loopback through the proxy": lambda: get(f"http://127.0.0.1:{VICTIM}/"),
    "the host's loopback by another name": lambda: get(f"http://localhost:{VICTIM}/"),
    "an index under another name": lambda: get("http://pypi.org/simple/", host="example.com"),
    "a name that ends like an index": lambda: get("http://evil-pypi.org/"),
    "a name that begins like an index": lambda: get("http://pypi.org.example.com/"),
    "a user before the host": lambda: get("http://pypi.org@example.com/", host="example.com"),
    "a tunnel to another host": lambda: connect("example.com:443"),
    "a tunnel to an address": lambda: connect("1.1.1.1:443"),
    "a tunnel to the host's loopback": lambda: connect(f"127.0.0.1:{VICTIM}"),
    "a tunnel to another port": lambda: connect("pypi.org:22"),
    "a tunnel under another name": lambda: connect("pypi.org:443", "example.com", inner % b"pypi.org"),
    "a tunnel with another host inside": lambda: connect("pypi.org:443", "pypi.org", inner % b"example.com"),
    "a tunnel with both": lambda: connect("pypi.org:443", "example.com", inner % b"example.com"),
    "a tunnel without TLS": lambda: connect("pypi.org:443", "", b"SSH-2.0-x\\r\\n\\r\\n"),
    "an upload": lambda: get("http://pypi.org/legacy/", method="POST"),
    "another method": lambda: get("http://pypi.org/", method="PUT"),
    "mitmproxy's own pages": lambda: get("http://mitm.it/"),
    "an origin request": lambda: say(b"GET /simple/ HTTP/1.1\\r\\nHost: example.com\\r\\n\\r\\n"),
    "the certificate's key": lambda: open("/run/downloads/authority/mitmproxy-ca.pem").read().encode(),
    "the recording": lambda: open("/run/downloads/socket/../recording").read().encode(),
    "a file of its own beside the socket": lambda: open("/run/downloads/x", "w"),
}
for name, attempt in TRIES.items():
    try:
        reply = attempt()
        reply = reply if isinstance(reply, bytes) else repr(reply).encode()
    except Exception as error:
        reply = b"no: " + repr(error).encode()
    print(json.dumps([name, reply.decode("latin-1")[:200]]))
"""


@pytest.mark.parametrize("record", [True, False])
def test_a_sandbox_gets_nothing_but_indexes(tmp_path, record):
    victim = socket.create_server(("127.0.0.1", 0))
    victim.setblocking(False)
    proxy = DownloadProxy(tmp_path, record=record, hosts=INDEX_HOSTS)
    try:
        environment = Environment(downloads=proxy.folder)
        with BubblewrapFactory().create({"tries.py": _TRIES}, Limits(command_seconds=120), environment) as sandbox:
            command = f"python3 tries.py {victim.getsockname()[1]}"
            done = sandbox.run(through_proxy(command))
            assert done.exit_code == 0, done.output
            replies = dict(json.loads(line) for line in done.output.splitlines())
            assert len(replies) >= 25
            allowed = {name: reply for name, reply in replies.items() if not reply or not _refused(reply)}
            assert allowed == {}
            assert "No such file" in sandbox.run("cat /etc/resolv.conf").output
        assert not Recording(tmp_path).size()
        with pytest.raises(BlockingIOError):
            victim.accept()
    finally:
        proxy.close()
        victim.close()


def _refused(reply: str) -> bool:
    status = reply.partition("\r\n")[0].split(" ")
    return reply.startswith("no: ") or (len(status) > 1 and status[0].startswith("HTTP/1.") and status[1][0] == "4")


def test_other_programs_of_the_machine_cannot_use_the_proxy(tmp_path):
    proxy = DownloadProxy(tmp_path, record=True, hosts=INDEX_HOSTS)
    try:
        ports = {
            int(line.split()[1].rpartition(":")[2], 16)
            for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
            if line.split()[3] == "0A"
        }
        answered = []
        for port in ports:
            with socket.socket() as link:
                link.settimeout(3)
                try:
                    link.connect(("127.0.0.1", port))
                    link.sendall(b"GET http://example.com/ HTTP/1.1\r\nHost: example.com\r\n\r\n")
                    if b"grading may not reach" in link.recv(4096):
                        answered.append(port)
                except OSError:
                    continue
        assert answered == []
    finally:
        proxy.close()


def shared(recording: Path, *, record: bool = False) -> AbstractContextManager[DownloadProxy]:
    return shared_proxy(recording, record=record, hosts=["pypi.org"])


def test_one_process_serves_all_with_the_same_settings(tmp_path):
    with shared(tmp_path) as first, shared(tmp_path) as second, shared(tmp_path, record=True) as recording:
        assert first is second is not recording
    with shared(tmp_path) as third:
        assert third is first


def test_proxy_that_ends_is_said_and_replaced(tmp_path):
    with pytest.raises(OSError, match="ended while grading used it"), shared(tmp_path) as first, shared(tmp_path):
        assert ask(first, "http://example.com/")[0] == 403
        first.close()
    with shared(tmp_path) as second:
        assert second is not first and ask(second, "http://pypi.org/simple/absent/")[0] == 404
    lines = shared_log(tmp_path, record=False, hosts=["pypi.org"])
    assert lines == ["refused: example.com:80", "not recorded: http://pypi.org/simple/absent/"]


def test_proxy_that_is_gone_has_ended_before_its_supervisor(tmp_path):
    """Else the code of a suite fails without downloads, and its recording counts as complete."""
    with pytest.raises(OSError, match="ended while grading used it"), shared(tmp_path) as proxy:
        outer = psutil.Process(proxy._process.pid)
        *supervisors, program = [outer, *outer.children(recursive=True)]
        for supervisor in supervisors:
            supervisor.suspend()
        program.kill()
        while program.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
    for supervisor in supervisors:
        supervisor.resume()


def test_recording_of_code_that_did_not_end_is_not_complete(tmp_path):
    place = {"grading": downloads.policy("suite", {"network": "index", "recording": str(tmp_path)})}
    runs: list[bool] = []
    for ends in (False, True, True):
        downloads.recorded(place, "task", lambda ends=ends: not runs.append(ends) and ends)
    assert runs == [False, True]


def test_missing_mitmproxy_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("ETPI_MITMDUMP", str(tmp_path / "absent"))
    with pytest.raises(ProxyUnavailable, match="make mitmproxy"):
        DownloadProxy(tmp_path, record=True, hosts=[])
