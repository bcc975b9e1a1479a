"""vLLM servers of one checkpoint on the nodes of a cluster: each is a Ray actor that holds its accelerators.

The servers end with the step that started them, however it ends: Ray ends the actors, and each actor's supervisor ends
the processes of its server. A server that dies is not started again: the others take its requests, and when none is
left, `exit_reason` says on which node each ended and why. A server listens on its node's address, not on all
interfaces. Set VLLM_API_KEY in the environment of every node so that it refuses requests without that key.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etpi_cluster.code import code_hash
from etpi_cluster.session import connect, nodes
from etpi_cluster.settings import Cluster, cluster, local_folder
from etpi_resources.backend import BackendError
from etpi_resources.engines import EngineUnavailable
from etpi_resources.engines.vllm_options import accelerators_of
from etpi_resources.secrets import read_secret

if TYPE_CHECKING:
    from etpi_resources.engines.vllm_server import VllmServer

PLACE_SECONDS = 20.0
"""Time for a server to get its accelerators, once the first has them; the others are not started."""
ANSWER_SECONDS, CLOSE_SECONDS = 10.0, 60.0

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
        BackendError: no node has as many accelerators, or a node runs other code.
        EngineUnavailable: a server did not start, or a node does not see the checkpoint.
    """

    def __init__(
        self, folder: Path, name: str, *, log: Path, options: Mapping[str, Any], say: Log | None = None
    ) -> None:
        from etpi_resources.engines.vllm_server import KEY_VARIABLE

        self.folder, self.name, self.urls = folder, name, list[str]()
        self.key_env = KEY_VARIABLE if read_secret(KEY_VARIABLE) else None
        self._say: Log = say or logging.getLogger(__name__).info
        settings = cluster()
        self._ray = connect()
        self._actors: list[Any] = []
        self._ended: dict[str, str] = {}  # URL -> why the server there ended
        try:
            self._actors = self._place(settings, accelerators_of(options))
            wanted = ServedFiles(str(folder), name, _sizes(folder), code_hash(), self.key_env is not None)
            logs = [str(log.with_suffix(f".{number}.log")) for number in range(len(self._actors))]
            started = [
                actor.start.remote(wanted, settings, file, dict(options))
                for actor, file in zip(self._actors, logs, strict=True)
            ]
            self.urls = [self._url(reference) for reference in started]
        except BaseException:
            self.close()
            raise
        open_to_all = "" if self.key_env else f", to everyone who reaches it: {KEY_VARIABLE} is not set"
        self._say(f"{name} is served at {', '.join(self.urls)}{open_to_all}")

    def exit_reason(self) -> str | None:
        """Return why none of the servers runs any more; None while one does, and then a line is logged for each that
        has ended."""
        answers = {url: actor.exit_reason.remote() for actor, url in zip(self._actors, self.urls, strict=True)}
        runs = False
        for url, answer in answers.items():
            reason = self._ended.get(url) or self._reason(url, answer)
            if reason is None:
                runs = True
            elif url not in self._ended:
                self._ended[url] = reason
                self._say(reason)
        return None if runs else "\n".join(self._ended.values()) or "the servers were ended"

    def _reason(self, url: str, answer: Any) -> str | None:
        try:
            return self._ray.get(answer, timeout=ANSWER_SECONDS)
        except self._ray.exceptions.GetTimeoutError:
            return None
        except self._ray.exceptions.RayError as error:
            return f"the vLLM server of {self.name} at {url} ended with its node or its actor ({type(error).__name__})"

    def close(self) -> None:
        """End the servers and wait until their processes are gone."""
        actors, self._actors, self.urls = self._actors, [], []
        with suppress(Exception):  # the cluster may be gone, and they with it
            endings = [actor.close.remote() for actor in actors]
            self._ray.wait(endings, num_returns=len(endings), timeout=CLOSE_SECONDS) if endings else None
        for actor in actors:
            with suppress(Exception):
                self._ray.kill(actor)

    def _place(self, settings: Cluster, each: int) -> list[Any]:
        """Return the actors that got accelerators: at least one, for which it waits."""
        offered = {node.name: node.offers(settings.accelerator) for node in nodes()}
        fitting = sum(number // each for number in offered.values())
        if not fitting:
            most = ", ".join(f"{name} {number}" for name, number in offered.items())
            raise BackendError(
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


@dataclass(frozen=True)
class ServedFiles:
    """Files and code that a node must share before it serves.

    Attributes:
        sizes: {file: bytes} of the checkpoint in `folder`.
        code: the hash of the step's code.
        has_key: whether the step sends VLLM_API_KEY.
    """

    folder: str
    name: str
    sizes: Mapping[str, int]
    code: str
    has_key: bool

    def differs(self) -> BackendError | EngineUnavailable | None:
        """Return the error if this process differs; its message continues "node X "."""
        from etpi_resources.engines.vllm_server import KEY_VARIABLE

        if self.code != (here := code_hash()):
            return BackendError(
                f"runs other code (hash {here}) than this run ({self.code}). Install the same version of etpi on "
                "every node, restart Ray there, and run again"
            )
        if self.sizes != (seen := _sizes(Path(self.folder))):
            files = sorted(file for file in self.sizes.keys() | seen.keys() if self.sizes.get(file) != seen.get(file))
            return EngineUnavailable(
                f"sees other files in {self.folder} than the step that wants them served ({files[0]}, and "
                f"{len(files) - 1} more). The checkpoint must be in the shared folder: set HF_HOME to one there too"
            )
        if self.has_key != (read_secret(KEY_VARIABLE) is not None):
            where = "the step's node alone" if self.has_key else "this node, and not on the step's"
            return EngineUnavailable(
                f"cannot serve: {KEY_VARIABLE} is set on {where}. Start Ray with the same key on every node, or without"
            )
        return None


class ServerActor:
    """One server, in a process on its node; Ray makes an actor of it."""

    def __init__(self) -> None:
        self._server: VllmServer | None = None
        self._node = ""

    def placed(self) -> None:
        """Answer as soon as the actor has its accelerators."""

    def start(self, wanted: ServedFiles, settings: Cluster, log: str, options: Mapping[str, Any]) -> str | Exception:
        """Start the server and return its URL, or the error that says why not."""
        import ray

        from etpi_resources.engines.vllm_server import VllmServer

        address = ray.util.get_node_ip_address()
        self._node = f"node {os.uname().nodename} ({address})"
        if error := wanted.differs():
            return type(error)(f"{self._node} {error}")
        try:
            self._server = VllmServer(
                Path(wanted.folder), wanted.name, log=Path(log), options=options, host=address,
                lock=_lock_file(settings, address, ray.get_gpu_ids()),
            )  # fmt: skip
        except EngineUnavailable as error:
            return EngineUnavailable(f"{self._node}: {error}")
        return self._server.url

    def exit_reason(self) -> str | None:
        if self._server is None:
            return "the server was ended"
        reason = self._server.exit_reason()
        return reason and f"{self._node}: {reason}"

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()


def _sizes(folder: Path) -> dict[str, int]:
    """Return {file: bytes} of a checkpoint."""
    if not folder.is_dir():
        return {}
    return {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}


def _lock_file(settings: Cluster, address: str, accelerators: Sequence[Any]) -> Path | None:
    """Return the file that a server of these GPUs locks on its node, so that the next one, which Ray may start at once,
    waits until their memory is free; None for accelerators that Ray does not number."""
    ids = "-".join(map(str, accelerators))
    return local_folder(settings, settings.lake) / f"vllm-{address}-{ids}.lock" if ids else None
