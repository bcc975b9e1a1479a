"""vLLM servers that generate the rollouts of a policy in training, started and asked by the process that rolls out.

Before each round the trainer writes its weights to a folder in memory, and the servers load them: all weights in place,
or an adapter under the name of its version. No server's success answer is trusted: its log-probs of a fixed prompt must
be those of the current policy, up to rounding, and must not be those of the previous round's.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from etpi_resources.checkpoints import text_settings
from etpi_resources.engines import Completion, EngineUnavailable, Request
from etpi_resources.engines.adapter_keys import served_adapter
from etpi_resources.engines.endpoints import Endpoints
from etpi_resources.engines.vllm import RELOAD_ENVIRONMENT, VllmEngine, loaded_adapter, reload_weights
from etpi_resources.engines.vllm_server import VllmServer
from etpi_resources.outside import read_object
from etpi_resources.trainers.policy_link import Published

if TYPE_CHECKING:
    from etpi_resources.chat.format import ChatFormat

MEMORY = Path("/dev/shm")
ROOM = 1.7
"""Free memory that a hand-over needs, as a multiple of the base's files: tied weights are written under each name, and
the embedding of a small model is up to 0.6 of it."""
NEARER = 3.0
"""A server whose log-probs are this many times nearer to the previous policy's still has the old weights."""


class HandOverFailed(RuntimeError):
    """A server does not generate from the policy's weights; the message names the step and what to do."""


@dataclass(frozen=True)
class ServerPlan:
    """The servers of one policy.

    Attributes:
        base: the checkpoint that training starts from; the servers start with its weights and tokenizer.
        name: the policy's, in completions. options: of `vllm serve`.
        environments: further environment variables of each server, such as its devices.
        log: file of the first server's output, beside those of the others. locks: one file for each server.
        sleeping: whether the servers free their memory between rounds, for a trainer on the same devices.
        probe: ids of the prompt that proves each hand-over. bound: the largest mean difference of log-probs that
            rounding explains (nats a token).
    """

    base: Path
    name: str
    options: Mapping[str, Any]
    environments: Sequence[Mapping[str, str]]
    log: Path
    locks: Sequence[Path]
    sleeping: bool
    probe: Sequence[int]
    bound: float


class PolicyServers:
    """The running servers, as an engine over the weights that were published last. A context manager.

    Raises:
        EngineUnavailable: vLLM is not installed, or a server did not become ready.
    """

    def __init__(self, plan: ServerPlan, chat: ChatFormat) -> None:
        self.name, self._plan, self._chat = plan.name, plan, chat
        self._before: Sequence[float] | None = None
        self._adapter = ExitStack()
        with ExitStack() as started:
            with ThreadPoolExecutor(len(plan.environments)) as pool:
                starting = [pool.submit(self._start, number) for number in range(len(plan.environments))]
            for server in starting:
                if not server.exception():
                    started.callback(server.result().close)
            servers = [server.result() for server in starting]
            self._servers = servers
            self._endpoints = self._clients([server.url for server in servers])
            started.callback(self._endpoints.close)
            self._engine = VllmEngine(self._endpoints, servers[0].name, chat)
            started.callback(lambda: self._engine.close())
            started.callback(self._adapter.close)
            self._ask("/sleep", level="1")
            self._close = started.pop_all().close

    def __enter__(self) -> PolicyServers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the servers; a second call does nothing."""
        self._close()

    def _exit_reason(self) -> str | None:
        """Return why a server exited, the first that did; None while all run."""
        return next((reason for server in self._servers if (reason := server.exit_reason())), None)

    def _clients(self, urls: Sequence[str]) -> Endpoints:
        return Endpoints(urls, key_env=self._servers[0].key_env, exit_reason=self._exit_reason)

    def _start(self, number: int) -> VllmServer:
        plan = self._plan
        return VllmServer(
            plan.base,
            f"policy-{plan.name[:12]}",
            log=plan.log.with_stem(f"{plan.log.stem}-{number}") if number else plan.log,
            lock=plan.locks[number],
            # Reported log-probs are those of the distribution that was sampled from, temperature included.
            options={**plan.options, "logprobs-mode": "processed_logprobs"},
            environment={**RELOAD_ENVIRONMENT, **plan.environments[number]},
        )

    @contextmanager
    def generating(self, step: int, published: Published) -> Iterator[PolicyServers]:
        """Load the published weights into every server and prove them; yield while the servers generate from them.

        Args:
            step: optimiser steps done; completions name the model "name+step".

        Raises:
            EngineUnavailable: a server exited, or did not load the weights.
            HandOverFailed: it reported success, and generates from other weights.
        """
        if reason := self._exit_reason():
            raise EngineUnavailable(reason)
        self.name = f"{self._plan.name}+{step}"
        self._ask("/wake_up", tags="weights")
        if published.adapter:
            self._load_adapter(Path(published.folder))
        else:
            reload_weights(self._endpoints, Path(published.folder))
        self._ask("/wake_up", tags="kv_cache")
        self._prove(step, published.logprobs)
        try:
            yield self
        finally:
            # Level 2 drops the weights, which come again; the base of an adapter stays in the host's memory.
            self._ask("/sleep", level="1" if published.adapter else "2")

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """As `VllmEngine.complete`; log-probs are those of the distribution that was sampled from."""
        return [replace(completion, model=self.name) for completion in self._engine.complete(requests)]

    def fingerprint(self) -> Mapping[str, Any]:
        return {**self._engine.fingerprint(), "model": self.name}

    def _load_adapter(self, folder: Path) -> None:
        """Serve the adapter under the version's name, and no more the one before."""
        self._adapter.close()
        served = served_adapter(folder, self._plan.base, None, folder.with_name(f"{folder.name}-keys"))
        self._adapter.enter_context(loaded_adapter(self._endpoints, self.name, served))
        self._engine.close()
        self._engine = VllmEngine(self._endpoints, self.name, self._chat)

    def _ask(self, path: str, **query: str) -> None:
        """Have every server sleep or wake, if they do so between rounds."""
        for url in self._endpoints.urls if self._plan.sleeping else ():
            try:
                self._endpoints.request(url, "POST", f"{path}?{urlencode(query)}")
            except RuntimeError as error:
                raise EngineUnavailable(
                    f"{error}. If the GPU had too little memory beside the trainer, lower rl.options.gpu-memory-"
                    f"utilization (vLLM takes 0.92 by default); the log is {self._plan.log}"
                ) from None

    def _prove(self, step: int, wanted: Sequence[float]) -> None:
        """Compare every server's log-probs of the probe with the policy's, now and before."""
        for url in self._endpoints.urls:
            alone = self._clients([url])
            with closing(VllmEngine(alone, self._engine.name, self._chat, release=alone.close)) as server:
                logprobs = server.prompt_logprobs(self._plan.probe)
            gap = _mean_gap(logprobs, wanted)
            where = f"step {step}: the weights were handed to vLLM at {url}, but on a fixed prompt its log-probs "
            if not gap <= self._plan.bound:
                raise HandOverFailed(
                    f"{where}differ from the policy's by {gap:.2g} nats a token (bound {self._plan.bound:g}). Look in "
                    f"{self._plan.log} for weights that were not loaded, set rl.options.dtype to the dtype of "
                    'training, or set rl.engine = "transformers"'
                )
            if self._before is not None and gap > NEARER * (late := _mean_gap(logprobs, self._before)):
                raise HandOverFailed(
                    f"{where}are those of the previous round (they differ by {late:.2g} nats a token, and by {gap:.2g} "
                    f"from the current policy's): it still has the old weights. Look in {self._plan.log}, or set "
                    'rl.engine = "transformers"'
                )
        self._before = wanted


def _mean_gap(logprobs: Sequence[float], wanted: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(logprobs, wanted, strict=True)) / len(wanted)


def stored_dtype_name(base: Path) -> str:
    """Return the dtype in a model folder's config, by vLLM's name."""
    config = read_object(base / "config.json")
    text = text_settings(config)
    return text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or "float32"


@contextmanager
def weights_folder(name: str, otherwise: Path, base: Path, versions: int = 1) -> Iterator[Path]:
    """Create a folder that only this user can open, and remove it in the end.

    It is in memory if so many times the weights of `base` fit there (a container often has 64 MB), else below
    `otherwise`.
    """
    folder_name = f"etpi-policy-{name}"
    shutil.rmtree(MEMORY / folder_name, ignore_errors=True)  # of a run that was killed
    size = sum(path.stat().st_size for path in base.glob("*.safetensors"))
    fits = MEMORY.is_dir() and ROOM * size * versions <= shutil.disk_usage(MEMORY).free
    folder = (MEMORY if fits else otherwise) / folder_name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
