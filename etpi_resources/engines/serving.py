"""Serving the checkpoints of an experiment, one after another: the server that each needs, and its name there.

A full checkpoint has its own server. An adapter is loaded into its base's server under a name that contains the
adapter's hash, and unloaded afterwards; so the base and the adapters of an experiment share one server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

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
    """Serves one checkpoint at a time."""

    def engine(self, checkpoint: Checkpoint) -> AbstractContextManager[Engine]:
        """Serve the checkpoint until the context ends. Raises EngineUnavailable if it cannot be served."""
        ...

    def expected(self, checkpoint: Checkpoint) -> tuple[str, Path]:
        """Return the name and the folder that the server's model list must show."""
        ...

    def close(self) -> None: ...


class TransformersServing:
    """Serves in this process; an adapter is served merged."""

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
    """Serves one checkpoint at a time with vLLM, and reuses the servers if the next checkpoint needs the same ones.

    On one machine there is one server, on a cluster as many as its free accelerators allow (`start_servers`).

    Args:
        checkpoints: all that will be served: a base's server is started with the LoRA rank that their adapters need.
        options: further options of `vllm serve`.
        context: most tokens of prompt and output together that requests have; without it a server reserves memory for
            the model's whole context. An option `max-model-len` replaces it.
        logs: folder of the servers' logs, and of adapters that are served under other keys.
        lock: see `VllmServer`.
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
    ) -> None:
        self._context, self._served = context, dict[Path, Path]()
        self._chat, self._options, self._template_kwargs = chat, dict(options), dict(template_kwargs)
        self._logs, self._lock = logs, lock
        self._ranks: dict[Path, int] = {}
        for checkpoint in checkpoints:
            if checkpoint.adapter and checkpoint.base:
                rank = json.loads((checkpoint.adapter / "adapter_config.json").read_text())["r"]
                self._ranks[checkpoint.base] = max(self._ranks.get(checkpoint.base, 0), rank)
        self._servers: Servers | None = None

    @contextmanager
    def engine(self, checkpoint: Checkpoint) -> Iterator[Engine]:
        from etpi_resources.engines.endpoints import Endpoints
        from etpi_resources.engines.vllm import VllmEngine, loaded_adapter

        with ExitStack() as stack:
            if checkpoint.adapter and checkpoint.base and checkpoint.base_identity:
                servers = self._serve(checkpoint.base, f"base-{checkpoint.base_identity[:12]}")
            else:
                servers = self._serve(checkpoint.folder, checkpoint.name)
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
        servers, self._servers = self._servers, None
        if servers is not None:
            servers.close()

    def _serve(self, folder: Path, name: str) -> Servers:
        from etpi_resources.engines.vllm_server import start_servers, with_context

        if self._servers is not None and (self._servers.folder, self._servers.name) == (folder, name):
            return self._servers
        self.close()
        options = with_context(self._options, self._context)
        if rank := self._ranks.get(folder):
            options = lora_options(rank) | options
        self._servers = start_servers(folder, name, log=self._logs / f"{name}.log", options=options, lock=self._lock)
        return self._servers
