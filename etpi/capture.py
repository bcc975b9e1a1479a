"""The command `etpi capture`: the proxy alone in front of a vLLM server, for harnesses that etpi does not start."""

from __future__ import annotations

import re
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import click

from etpi.web.ports import free_port
from etpi_resources.capture.server import MODEL, Attempt, Budget, CaptureServer
from etpi_resources.capture.store import CallLog
from etpi_resources.chat.format import load_chat_format
from etpi_resources.engines import Sampler
from etpi_resources.engines.endpoints import Endpoints
from etpi_resources.engines.vllm import VllmEngine
from etpi_resources.process.locks import FileLocks
from etpi_resources.secrets import kept_secret

_NAME = re.compile(r"[\w.-]{1,100}")
_KEY_FILE = "key"


@dataclass(frozen=True)
class CaptureOptions:
    """Options of `etpi capture`; `to` is the folder of the logs."""

    url: str
    model: str
    tokenizer: str
    to: Path
    port: int
    temperature: float
    max_tokens: int
    max_model_len: int
    key_env: str | None = None


@dataclass
class Sessions:
    """The attempts of a folder, opened when a path is first used; one key for all."""

    engine: VllmEngine
    options: CaptureOptions
    key: str
    opened: dict[str, Attempt] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def attempt(self, name: str) -> Attempt | None:
        """Return the attempt of a path's name; None for a name that is no file name."""
        if not _NAME.fullmatch(name) or name.startswith("."):
            return None
        with self.lock:
            if name not in self.opened:
                options = self.options
                self.opened[name] = Attempt(
                    name,
                    self.key,
                    self.engine,
                    load_chat_format(options.tokenizer),
                    CallLog(options.to / f"{name}.jsonl"),
                    Sampler(options.temperature, 1.0, options.max_tokens),
                    Budget(options.max_model_len),
                    session=name,
                )
            return self.opened[name]


def capture(options: CaptureOptions) -> int:
    """Serve until it is stopped.

    Raises:
        EngineUnavailable: the server does not answer, or has another tokenizer.
        PortTaken: another program listens on the port.
    """
    try:
        chat = load_chat_format(options.tokenizer)
    except (OSError, ValueError) as error:
        raise click.ClickException(f"--tokenizer {options.tokenizer}: {error}") from error
    options.to.mkdir(parents=True, exist_ok=True)
    key = kept_secret(options.to / _KEY_FILE)
    if FileLocks().try_lock(options.to / _KEY_FILE, "captured calls", shared=False) is None:  # until this process ends
        raise click.ClickException(f"another `etpi capture` writes to {options.to}; stop it, or name another --to")
    port = free_port("127.0.0.1", options.port, named=True)
    endpoints = Endpoints([options.url], key_env=options.key_env)
    engine = VllmEngine(endpoints, options.model, chat, release=endpoints.close)
    sessions = Sessions(engine, options, key)
    try:
        with CaptureServer(sessions.attempt, port=port) as server:
            base = f"http://127.0.0.1:{server.port}/a/NAME"
            print(
                f"etpi capture: base URL {base}/v1 (messages: {base}), one NAME for each task; model {MODEL}, key in "
                f"{options.to / _KEY_FILE}; logs in {options.to}. Stop it with Ctrl-C",
                file=sys.stderr,
            )
            server.wait()
    except KeyboardInterrupt:
        click.echo(f"etpi init runs {options.to} --format capture    # writes specs for the recorded runs")
    finally:
        engine.close()
    return 0
