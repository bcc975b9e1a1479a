"""vLLM servers of one checkpoint on the nodes of a cluster: each is a Ray actor that holds its accelerators.

The servers end with the step that started them, however it ends: Ray ends the actors, and each actor's supervisor ends
the processes of its server. A server listens on its node's address, not on all interfaces. Set VLLM_API_KEY in the
environment of every node so that it refuses requests without that key.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etpi_resources.cluster.code import code_hash
from etpi_resources.cluster.session import connect, nodes
from etpi_resources.cluster.settings import ClusterError, cluster
from etpi_resources.engines import EngineUnavailable
from etpi_resources.secrets import read_secret

if TYPE_CHECKING:
    from etpi_resources.engines.vllm_server import VllmServer

PLACE_SECONDS = 20.0
"""How long a server may take to get its accelerators, once the first has them; the others are not started."""
ANSWER_SECONDS = 10.0

_PARALLEL = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
_SHORT = {"tp": _PARALLEL[0], "pp": _PARALLEL[1], "dp": _PARALLEL[2]}

Log = Callable[[str], None]


class ClusterServers:
    """Servers of the checkpoint in `folder` under `name`; ready when the constructor returns.

    Args:
        folder: the checkpoint, at the same path on every node with accelerators.
        log: file of a server's output, on the shared lake; each server's has its own ending.
        options: of `vllm serve`; they say how many accelerators one server takes.

    Attributes:
        urls: of the servers, one for each set of accelerators that was free, at most `servers` of `cluster.toml`.

    Raises:
        ClusterError: no node has as many accelerators, or a node runs other code.
        EngineUnavailable: a server did not start, or a node does not see the checkpoint.
    """

    def __init__(
        self, folder: Path, name: str, *, log: Path, options: Mapping[str, Any], say: Log | None = None
    ) -> None:
        from etpi_resources.engines.vllm_server import KEY_VARIABLE

        self.folder, self.name, self.urls = folder, name, list[str]()
        self.key_env = KEY_VARIABLE if read_secret(KEY_VARIABLE) else None
        self._say: Log = say or logging.getLogger(__name__).info
        self._ray = connect()
        self._actors: list[Any] = []
        try:
            self._actors = self._place(accelerators_of(options))
            files = _sizes(folder)
            started = [
                actor.start.remote(
                    str(folder), name, str(log.with_suffix(f".{number}.log")), dict(options), files, code_hash()
                )
                for number, actor in enumerate(self._actors)
            ]
            self.urls = [self._url(reference) for reference in started]
        except BaseException:
            self.close()
            raise
        self._say(f"{name} is served at {', '.join(self.urls)}")

    def exit_reason(self) -> str | None:
        """Return why none of the servers runs any more; None while one does."""
        reasons = []
        for actor, url in zip(self._actors, self.urls, strict=True):
            try:
                reason = self._ray.get(actor.exit_reason.remote(), timeout=ANSWER_SECONDS)
            except self._ray.exceptions.GetTimeoutError:
                return None
            except self._ray.exceptions.RayError as error:
                reason = f"the node of the server at {url} died ({type(error).__name__})"
            if reason is None:
                return None
            reasons.append(reason)
        return "\n".join(reasons) or "the servers were ended"

    def close(self) -> None:
        """End the servers and wait until their processes are gone."""
        actors, self._actors, self.urls = self._actors, [], []
        endings = [actor.close.remote() for actor in actors]
        with suppress(self._ray.exceptions.RayError):
            self._ray.wait(endings, num_returns=len(endings), timeout=60.0) if endings else None
        for actor in actors:
            with suppress(Exception):
                self._ray.kill(actor)

    def _place(self, each: int) -> list[Any]:
        """Return the actors that got accelerators: at least one, for which it waits."""
        settings = cluster()
        assert settings is not None
        offered = {node.name: node.offers(settings.accelerator) for node in nodes()}
        fitting = sum(number // each for number in offered.values())
        if not fitting:
            most = ", ".join(f"{name} {number}" for name, number in offered.items())
            raise ClusterError(
                f"a vLLM server of {self.name} needs {each} {settings.accelerator} on one node, and the nodes offer: "
                f"{most}. Start a node with as many, or lower tensor-parallel-size in the spec's options"
            )
        wanted = min(fitting, settings.servers or fitting)
        request = {"num_gpus": each} if settings.accelerator == "GPU" else {"resources": {settings.accelerator: each}}
        remote = self._ray.remote(
            num_cpus=0, max_restarts=0, max_concurrency=4, scheduling_strategy="SPREAD", **request
        )
        actors = [remote(ServerActor).remote() for _ in range(wanted)]
        self._actors = actors
        placed = {actor.placed.remote(): actor for actor in actors}
        ready, _ = self._ray.wait(list(placed), num_returns=wanted, timeout=PLACE_SECONDS)
        if not ready:
            self._say(f"{self.name} waits for {each} {settings.accelerator}: other steps hold them")
            ready, _ = self._ray.wait(list(placed), num_returns=1)
        for reference, actor in placed.items():
            if reference not in ready:
                self._ray.kill(actor)
        return [placed[reference] for reference in ready]

    def _url(self, reference: Any) -> str:
        try:
            answer = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            text = str(error).strip().splitlines()[-1]
            raise EngineUnavailable(f"a vLLM server of {self.name} did not start on its node: {text}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


class ServerActor:
    """One server, in a process on its node; Ray makes an actor of it."""

    def __init__(self) -> None:
        self._server: VllmServer | None = None

    def placed(self) -> None:
        """Answer as soon as the actor has its accelerators."""

    def start(
        self, folder: str, name: str, log: str, options: Mapping[str, Any], files: Mapping[str, int], code: str
    ) -> str | Exception:
        """Start the server and return its URL, or the error that says why not."""
        import ray

        from etpi_resources.engines.vllm_server import VllmServer

        node = f"node {os.uname().nodename} ({ray.util.get_node_ip_address()})"
        if code != (here := code_hash()):
            return ClusterError(
                f"{node} runs other code (hash {here}) than this run ({code}). Install the same version of etpi on "
                "every node, restart Ray there, and run again"
            )
        if (seen := _sizes(Path(folder))) != files:
            differing = sorted(name for name in files.keys() | seen.keys() if files.get(name) != seen.get(name))
            return EngineUnavailable(
                f"{node} sees other files in {folder} than the step that wants them served ({differing[0]}, and "
                f"{len(differing) - 1} more). The checkpoint must lie on the shared folder: set ETPI_DATA and HF_HOME "
                "to it on every node"
            )
        try:
            self._server = VllmServer(
                Path(folder), name, log=Path(log), options=options, lock=_lock_file(ray.get_gpu_ids()),
                host=ray.util.get_node_ip_address(),
            )  # fmt: skip
        except EngineUnavailable as error:
            return EngineUnavailable(f"{node}: {error}")
        return self._server.url

    def exit_reason(self) -> str | None:
        return "the server was ended" if self._server is None else self._server.exit_reason()

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()


def accelerators_of(options: Mapping[str, Any]) -> int:
    """Return how many accelerators one server of these options of `vllm serve` takes."""
    number = 1
    for name, value in options.items():
        name = name.replace("_", "-").removeprefix("--")
        if _SHORT.get(name, name) in _PARALLEL:
            number *= int(value)
    return number


def _sizes(folder: Path) -> dict[str, int]:
    """Return {file: bytes} of a checkpoint."""
    if not folder.is_dir():
        return {}
    return {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}


def _lock_file(accelerators: Sequence[Any]) -> Path | None:
    """Return the file that a server of these GPUs locks on its node, so that the next one, which Ray may start at once,
    waits until their memory is free; None for accelerators that Ray does not number."""
    ids = "-".join(map(str, accelerators))
    return Path(tempfile.gettempdir()) / f"etpi-vllm-{os.getuid()}-{ids}.lock" if ids else None
