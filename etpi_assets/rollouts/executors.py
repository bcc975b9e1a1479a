"""Executors of rollouts: threads of this process, or the nodes of a cluster. Their records are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from urllib.parse import urlsplit

from etpi_assets.agent.loop import RolloutRuntime
from etpi_resources.backend import backend
from etpi_resources.engines import Engine, EngineUnavailable

HOST_SANDBOXES = ("bubblewrap", "docker")
"""Sandboxes with processes. The others are dictionaries in this process and gain nothing from a cluster."""

Log = Callable[[str], None]


@contextmanager
def rollout_executor(runtime: RolloutRuntime, threads: int, log: Log) -> Iterator[Executor]:
    """Open the executor of a collection: the nodes of the cluster if there is one and the engine can be used there,
    otherwise this many threads.

    An engine in this process (transformers) keeps its rollouts, sandboxes included, on this machine: its batches join
    the requests of all rollouts, and a request for every turn over the network would be one more thing to fail.

    Raises:
        BackendError: no node offers sandboxes, or there is no connection.
        EngineUnavailable: the caller's, with the reason why the engine's servers ended, if they did.
    """
    elsewhere = backend() if runtime.sandboxes.name in HOST_SANDBOXES else None
    if elsewhere is not None and (reason := _stays(runtime.engine, elsewhere.addresses())):
        log(f"rollouts run on this node alone: {reason}")
        elsewhere = None
    if elsewhere is None:
        with ThreadPoolExecutor(max(1, threads), thread_name_prefix="rollout") as pool:
            yield pool
        return
    with elsewhere.calls(log) as executor:
        try:
            yield executor
        except EngineUnavailable as error:  # a node sees that no server answers, and not why
            if reason := getattr(runtime.engine, "exit_reason", lambda: None)():
                raise EngineUnavailable(f"{reason}\nFinished rollouts are kept; run it again") from error
            raise


def _stays(engine: Engine, addresses: list[str]) -> str:
    """Return why an engine cannot be used from nodes of these addresses; "" if it can."""
    if not getattr(engine, "portable", False):
        return f"the engine {engine.name} computes in this process"
    local = [url for url in getattr(engine, "urls", ()) if _is_loopback(urlsplit(url).hostname or "")]
    if local and not all(map(_is_loopback, addresses)):
        return f"{local[0]} is an address of this node alone; write the host's name in engine.urls to use every node"
    return ""


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
