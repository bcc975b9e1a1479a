"""The proxy between sandboxes without network and package indexes: mitmproxy with `addon`, a process for a recording.

mitmproxy has an environment of its own, because it pins libraries that etpi needs in other versions.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import shlex
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from etpi_resources.process.supervise import supervised

MITMDUMP_VARIABLE = "ETPI_MITMDUMP"
PROGRAM = Path(__file__).resolve().parents[3] / ".venv-mitmproxy" / "bin" / "mitmdump"

INDEX_HOSTS: Sequence[str] = (
    "pypi.org",
    "files.pythonhosted.org",
    "registry.npmjs.org",
    "proxy.golang.org",
    "sum.golang.org",
    "index.crates.io",
    "static.crates.io",
    "deb.debian.org",
    "security.debian.org",
    "archive.ubuntu.com",
    "security.ubuntu.com",
)
"""Hosts of the public package indexes of Python, npm, Go, Rust, Debian and Ubuntu."""

MOST_BYTES = 20 << 30
"""The largest recording, unless the suite says otherwise."""

SHOWN_AT = "/run/downloads"
"""The proxy's folder as sandboxes see it."""

PORT = 3128
"""The port of a sandbox's own loopback that is forwarded to the proxy."""

_ANSWER_SECONDS = 10.0
_HERE = Path(__file__).parent
_LOCK = threading.Lock()


class ProxyUnavailable(RuntimeError):
    """mitmproxy is missing or does not start; the message says what to do."""


class DownloadProxy:
    """One proxy process, ready when the constructor returns.

    Args:
        recording: the folder of the recording; it is created.
        record: whether responses that are not recorded are fetched; else they are 404.
        hosts: the hosts that may be asked; None: all.
        most_bytes: the largest sum of all recorded bodies; requests beyond it fail.

    Attributes:
        folder: what a sandbox has to see at SHOWN_AT: the socket, the certificate and the forwarder.

    Raises:
        ProxyUnavailable: mitmproxy is missing, or does not start.
    """

    def __init__(
        self, recording: Path, *, record: bool, hosts: Sequence[str] | None, most_bytes: int = MOST_BYTES
    ) -> None:
        program = mitmdump_program()
        self._private = Path(tempfile.mkdtemp(prefix="etpi-downloads-"))
        self.folder = self._private / "shown"
        self._private.chmod(0o711)  # sandboxes run as users of their own
        self.folder.mkdir(mode=0o755)
        shutil.copy(_HERE / "forward.py", self.folder / "forward.py")
        self._log = self._private / "log"
        self._log.touch()
        self._lines: list[str] | None = None
        settings = {
            "socket": str(self.folder / "socket"),
            "recording": str(recording.resolve()),
            "record": record,
            "hosts": None if hosts is None else list(hosts),
            "most_bytes": most_bytes,
            "log": str(self._log),
        }
        options = {
            "confdir": str(self._private / "authority"),
            "connection_strategy": "lazy",
            "upstream_cert": "false",
            "onboarding": "false",
            "rawtcp": "false",
            "websocket": "false",
            "ssl_verify_upstream_trusted_ca": _authorities(),
        }
        line = [str(program), "--quiet", "--listen-host", "127.0.0.1", "--listen-port", "0"]
        line += ["--scripts", str(_HERE / "addon.py")]
        line += [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
        self._process = subprocess.Popen(
            supervised(line, grace=1.0),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                "PATH": os.defpath,
                "HOME": str(self._private),
                "PYTHONPATH": str(_HERE.parents[2]),
                "PYTHONDONTWRITEBYTECODE": "1",
                "ETPI_DOWNLOADS": json.dumps(settings),
            },
        )
        assert self._process.stdout
        printed_lines = []
        while (printed := self._process.stdout.readline()).strip() != "ready":
            if not printed:
                self.close()
                raise ProxyUnavailable(f"{program} did not start: {''.join(printed_lines)[-2000:]}")
            printed_lines.append(printed)
        shutil.copy(self._private / "authority" / "mitmproxy-ca-cert.pem", self.folder / "authority.pem")

    def log(self) -> list[str]:
        """Return a line for each request that was refused, failed or was not recorded, in order."""
        return self._log.read_text(encoding="utf-8").splitlines() if self._lines is None else self._lines

    @property
    def ended(self) -> bool:
        """Return whether the process has ended or is ending: its supervisor lives a moment longer."""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(_ANSWER_SECONDS)
            return client.connect_ex(str(self.folder / "socket")) != 0

    def close(self) -> None:
        """End the process and remove its folder; its log stays."""
        if self._lines is not None:
            return
        self._lines = self.log()
        self._process.terminate()
        self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        shutil.rmtree(self._private, ignore_errors=True)


_PROXIES: dict[tuple[object, ...], list[DownloadProxy]] = {}
"""Proxies by their settings; of each list the last one runs, and those before it ended by themselves."""


@contextmanager
def shared_proxy(
    recording: Path, *, record: bool, hosts: Sequence[str] | None, most_bytes: int = MOST_BYTES
) -> Iterator[DownloadProxy]:
    """Lend this process's proxy with these settings, which runs until the process ends.

    Raises:
        ProxyUnavailable: as DownloadProxy. OSError: the proxy ended while it was lent.
    """
    with _LOCK:
        proxies = _PROXIES.setdefault(_settings(recording, record, hosts, most_bytes), [])
        if not proxies or proxies[-1].ended:
            proxies.append(DownloadProxy(recording, record=record, hosts=hosts, most_bytes=most_bytes))
        proxy = proxies[-1]
    yield proxy
    if proxy.ended:
        raise OSError(errno.ECONNRESET, f"the proxy for the downloads of {recording} ended while grading used it")


def shared_log(
    recording: Path, *, record: bool, hosts: Sequence[str] | None, most_bytes: int = MOST_BYTES
) -> list[str]:
    """Return the log of all proxies that `shared_proxy` lent with these settings in this process."""
    with _LOCK:
        proxies = _PROXIES.get(_settings(recording, record, hosts, most_bytes), ())
        return [line for proxy in proxies for line in proxy.log()]


def _settings(recording: Path, record: bool, hosts: Sequence[str] | None, most_bytes: int) -> tuple[object, ...]:
    return recording.resolve(), record, None if hosts is None else tuple(hosts), most_bytes


@atexit.register
def _close_all() -> None:
    for proxy in (proxy for proxies in _PROXIES.values() for proxy in proxies):
        proxy.close()


def through_proxy(command: str) -> str:
    """Return the bash command with the environment in which package managers use the proxy."""
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in _VARIABLES.items())
    forward = f"-I -S {SHOWN_AT}/forward.py {SHOWN_AT}/socket {PORT}"
    return f"export {exports}; {_PYTHON} {forward} || exit 125; {command}"


def mitmdump_program() -> Path:
    """Return mitmproxy's `mitmdump`: $ETPI_MITMDUMP, or the one in .venv-mitmproxy. Raises ProxyUnavailable."""
    program = Path(os.environ.get(MITMDUMP_VARIABLE) or PROGRAM)
    if not os.access(program, os.X_OK):
        raise ProxyUnavailable(
            f"grading that downloads needs mitmproxy, and there is none at {program}; run `make mitmproxy`, or name "
            f"the program mitmdump in {MITMDUMP_VARIABLE}"
        )
    return program


_ADDRESS = f"http://127.0.0.1:{PORT}"
_AUTHORITY = f"{SHOWN_AT}/authority.pem"
_PYTHON = '"$(command -v python3 || command -v python || echo /usr/bin/python3)"'
_VARIABLES: Mapping[str, str] = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), _ADDRESS),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
    **dict.fromkeys(
        ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS"),
        _AUTHORITY,
    ),
    "PIP_NO_CACHE_DIR": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}


def _authorities() -> str:
    """Return the file of certificate authorities that this machine trusts."""
    return os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile or ""
