"""Serving the checkpoints of an experiment: the server that each needs, and its name there.

A full checkpoint has its own server. An adapter is loaded into its base's server under a name that contains the
adapter's hash, and unloaded afterwards; so the base and the adapters of an experiment share one server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from etpi_resources.backend import backend
from etpi_resources.engines import Engine
from etpi_resources.engines.vllm_options import lora_options

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat
    from etpi_resources.engines.vllm_server import Servers


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint to serve.

    Attributes:
        folder, identity: its files (merged, if an adapter was trained) and their content hash.
        role: base, sft or rl; the first part of the served name.
        path: its folder in the lake, or its name on the hub.
        seed: of training; None for the base. step: of the optimiser, when it was saved. final: whether that was the
            last step.
        adapter, adapter_hash: the adapter's files and their hash, if there is one.
        base, base_identity: the files of the adapter's base and their content hash.
    """

    folder: Path
    identity: str
    role: str
    path: str = ""
    seed: int | None = None
    step: int | None = None
    final: bool = True
    adapter: Path | None = None
    adapter_hash: str | None = None
    base: Path | None = None
    base_identity: str | None = None

    @property
    def name(self) -> str:
        """The name of the full model. It contains the content hash, so no other model can have it."""
        return f"{self.role}-{self.identity[:12]}"

    @property
    def adapter_name(self) -> str:
        """The name of the adapter on its base."""
        return f"{self.role}-{self.adapter_hash}"


class Serving(Protocol):
    """Serves checkpoints, `at_once` at a time."""

    at_once: int

    def engine(self, checkpoint: Checkpoint) -> AbstractContextManager[Engine]:
        """Serve the checkpoint until the context ends. Raises EngineUnavailable if it cannot be served."""
        ...

    def expected(self, checkpoint: Checkpoint) -> tuple[str, Path]:
        """Return the name and the folder that the server's model list must show."""
        ...

    def close(self) -> None: ...


class TransformersServing:
    """Serves in this process; an adapter is served merged."""

    at_once = 1

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat

    @contextmanager
    def engine(self, checkpoint: Checkpoint) -> Iterator[Engine]:
        from etpi_resources.engines.transformers import TransformersEngine

        engine = TransformersEngine(checkpoint.folder, checkpoint.name, self._chat)
        try:
            yield engine
        finally:
            engine.close()

    def expected(self, checkpoint: Checkpoint) -> tuple[str, Path]:
        return checkpoint.name, checkpoint.folder

    def close(self) -> None:
        """Do nothing: every engine is closed with its context."""


class VllmServing:
    """Serves checkpoints with vLLM, and reuses the servers if the next checkpoint needs the same ones.

    On one machine there is one server, on a cluster as many as its free accelerators allow (`start_servers`).

    Args:
        checkpoints: all that will be served: a base's server is started with the LoRA rank that their adapters need.
        options: further options of `vllm serve`.
        context: most tokens of prompt and output together that requests have; without it a server reserves memory for
            the model's whole context. An option `max-model-len` replaces it.
        logs: folder of the servers' logs, and of adapters that are served under other keys.
        lock: see `VllmServer`.
        at_once: checkpoints whose servers this machine has room for. They start at the same time.
    """

    def __init__(
        self,
        chat: ChatFormat,
        checkpoints: Sequence[Checkpoint],
        *,
        options: Mapping[str, Any],
        template_kwargs: Mapping[str, Any],
        logs: Path,
        lock: Path,
        context: int | None = None,
        at_once: int = 1,
    ) -> None:
        self.at_once = 1 if backend() else at_once
        self._context, self._served = context, dict[Path, Path]()
        self._chat, self._options, self._template_kwargs = chat, dict(options), dict(template_kwargs)
        self._logs, self._locks = logs, [lock, *(lock.with_stem(f"{lock.stem}-{n}") for n in range(1, at_once))]
        self._ranks: dict[Path, int] = {}
        for checkpoint in checkpoints:
            if checkpoint.adapter and checkpoint.base:
                rank = json.loads((checkpoint.adapter / "adapter_config.json").read_text())["r"]
                self._ranks[checkpoint.base] = max(self._ranks.get(checkpoint.base, 0), rank)
        self._wanted = list(dict.fromkeys(map(_server_of, checkpoints)))
        self._servers: dict[tuple[Path, str], tuple[Path, Servers]] = {}  # with their lock
        self._in_use: list[tuple[Path, str]] = []

    @contextmanager
    def engine(self, checkpoint: Checkpoint) -> Iterator[Engine]:
        from etpi_resources.engines.endpoints import Endpoints
        from etpi_resources.engines.vllm import VllmEngine, loaded_adapter

        with ExitStack() as stack:
            servers = self._serve(*_server_of(checkpoint))
            self._in_use.append(_server_of(checkpoint))
            stack.callback(self._in_use.remove, _server_of(checkpoint))
            name, folder = self.expected(checkpoint)
            endpoints = Endpoints(servers.urls, key_env=servers.key_env, exit_reason=servers.exit_reason)
            stack.callback(endpoints.close)
            if name == checkpoint.adapter_name:
                stack.enter_context(loaded_adapter(endpoints, name, folder))
            engine = VllmEngine(
                endpoints,
                name,
                self._chat,
                template_kwargs=self._template_kwargs,
                settings={"options": self._options},
            )
            stack.callback(engine.close)
            yield engine

    def expected(self, checkpoint: Checkpoint) -> tuple[str, Path]:
        if not (checkpoint.adapter and checkpoint.base):
            return checkpoint.name, checkpoint.folder
        if checkpoint.adapter not in self._served:
            from etpi_resources.engines.adapter_keys import served_adapter

            place = self._logs / f"{checkpoint.adapter_name}-keys"
            self._served[checkpoint.adapter] = served_adapter(
                checkpoint.adapter, checkpoint.base, checkpoint.adapter_hash, place
            )
        return checkpoint.adapter_name, self._served[checkpoint.adapter]

    def close(self) -> None:
        self._close(self._servers.keys())

    def _close(self, keys: AbstractSet[tuple[Path, str]]) -> None:
        servers = [self._servers.pop(key)[1] for key in list(keys)]
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda each: each.close(), servers))

    def _serve(self, folder: Path, name: str) -> Servers:
        """Return the servers of a checkpoint, started together with those of the next ones that there is room for."""
        from etpi_resources.engines.vllm_server import VllmServer, start_servers, with_context

        if (folder, name) not in self._servers:
            self._close(self._servers.keys() - {*self._in_use})
            first, room = self._wanted.index((folder, name)), self.at_once - len(self._servers)
            for each, named in self._wanted[first : first + room]:
                options, rank = with_context(self._options, self._context), self._ranks.get(each)
                lock = next(lock for lock in self._locks if lock not in [held for held, _ in self._servers.values()])
                options, log = lora_options(rank) | options if rank else options, self._logs / f"{named}.log"
                started = start_servers(each, named, log=log, options=options, lock=lock, wait=False)
                self._servers[each, named] = lock, started
        _, servers = self._servers[folder, name]
        if isinstance(servers, VllmServer):
            servers.wait_until_ready()
        return servers


def _server_of(checkpoint: Checkpoint) -> tuple[Path, str]:
    """Return the folder and the name of the full model that serves a checkpoint."""
    if checkpoint.adapter and checkpoint.base and checkpoint.base_identity:
        return checkpoint.base, f"base-{checkpoint.base_identity[:12]}"
    return checkpoint.folder, checkpoint.name
