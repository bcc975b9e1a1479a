"""The container sandbox: one container a rollout through the Docker API, with the same guest inside as bubblewrap.

Belongs here: making containers, and the attached stream to their guests. Does not belong here: images
(`docker_images`), whose containers are whose (`docker_owner`), what is asked of a guest (`guest_connection`).

What stands between a command and the host: a container without network, capabilities, new privileges or host folders;
control groups for memory, processes and cores; the engine's and our own filter of system calls; and in it the guest's
limits on output, files and time. A task without an image of its own runs as an unprivileged user on a read-only root,
in a workspace of bounded size. A task's own image stays writable, for its workspace is in it, and runs as the user the
image names; what it writes is looked at twice a second, and a command that passes the limit is ended.

The guest ends with the connection that carries its stdin, and the engine removes the container that it was. So a
process that dies leaves nothing behind; what an engine kept all the same, the reaper removes at the next start.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from etpi_resources.sandboxes import CommandResult, Environment, EnvironmentUnavailable, Limits, SandboxUnavailable
from etpi_resources.sandboxes.docker_images import Image, Images
from etpi_resources.sandboxes.docker_owner import OWNER, owner, reap
from etpi_resources.sandboxes.guest_connection import (
    GUEST,
    OPEN_FILES,
    GuestConnection,
    GuestUnreachable,
    frame,
    settings,
)
from etpi_resources.sandboxes.seccomp import filter_program

if TYPE_CHECKING:
    from docker import APIClient

USER = "64117:64117"
"""The unprivileged user and group of containers without an image of their own."""

API_SECONDS = 120
_OLDEST_API = "1.41"
LOOK_SECONDS = 0.5
"""Seconds between looks at what a container has written."""

OVERHEAD = 64 * 1024**2
"""Bytes of memory for the guest and the kernel's own, besides what commands and files may use."""

_ULIMITS = {"nofile": OPEN_FILES, "core": 0, "nproc": 32_768}
"""nproc counts a user's processes on the whole engine, so the control group bounds them; it is named because podman
would set it to more than an engine that is itself in a container may."""

_SHUT = ("/run", "/var/tmp")
"""podman makes these writable in a container whose root is read-only, as large as memory is; so they are made small."""

_BOOT = Path(__file__).with_name("docker_boot.py")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NO_PYTHON = "no Python 3.9 or newer"
_FIND_PYTHON = f"""
for python in /usr/bin/python3 /usr/local/bin/python3 "$(command -v python3)" /opt/*/bin/python3; do
  "$python" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null && exec "$python" -I -S -c "$0" "$@"
done
echo '{_NO_PYTHON}' >&2; exit 127
"""
_NO_ENGINE = (
    "Start a Docker engine, or podman's (podman system service), let this user talk to it (the docker group), and name "
    'its address in DOCKER_HOST where it is not the usual one; or use sandbox = "bubblewrap".'
)


class DockerFactory:
    """Makes containers on the engine that DOCKER_HOST names. Share it between threads; nothing is looked up before the
    first sandbox starts, which also removes what dead processes left on the engine."""

    name = "docker"

    def __init__(self) -> None:
        self._engine: _Engine | None = None
        self._lock = threading.Lock()

    def create(
        self,
        files: Mapping[str, str],
        limits: Limits = Limits(),  # noqa: B008
        environment: Environment | None = None,
    ) -> DockerSandbox:
        """A sandbox whose workspace holds `files` (relative path -> text) over what its image has there. Raises
        ValueError for a path that is absolute or climbs; when entered, SandboxUnavailable where the engine is missing,
        full or refuses, and EnvironmentUnavailable where this task's image cannot be had."""
        return DockerSandbox(self._get_engine, files, limits, environment)

    def check(self) -> None:
        """Ask the engine to answer; raises SandboxUnavailable. Looks up no image, since tasks may bring their own."""
        self._get_engine()

    def _get_engine(self) -> _Engine:
        with self._lock:
            self._engine = self._engine or _Engine.connect()
            return self._engine


class _Engine:
    """A connection to an engine, and what is the same for all containers on it."""

    def __init__(self, client: APIClient) -> None:
        self.client, self.images = client, Images(client)
        self.guest, self.boot = GUEST.read_bytes(), _BOOT.read_text(encoding="utf-8")

    @classmethod
    def connect(cls) -> _Engine:
        try:
            import docker
            from docker.errors import DockerException
            from docker.utils import kwargs_from_env
        except ModuleNotFoundError as error:
            raise SandboxUnavailable(
                f'sandbox = "docker" needs the Docker SDK ({error}): pip install "etpi[docker]"'
            ) from error
        import requests

        options = kwargs_from_env()
        try:  # /_ping says the version at once; /version of podman asks the system's package manager first
            pinged = docker.APIClient(version=_OLDEST_API, timeout=API_SECONDS, **options)
            answer = pinged.get(f"{pinged.base_url}/_ping")
            answer.raise_for_status()
            client = docker.APIClient(
                version=answer.headers.get("Api-Version", _OLDEST_API), timeout=API_SECONDS, **options
            )
        except (DockerException, requests.RequestException) as error:
            raise SandboxUnavailable(f"no container engine answers: {error}. {_NO_ENGINE}") from error
        with _told():
            reap(client)
        return cls(client)

    def seccomp(self, image: Image) -> bytes:
        """The filter of system calls for containers of an image."""
        machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(image.machine, image.machine)
        try:
            return filter_program(machine)
        except KeyError as error:
            raise EnvironmentUnavailable(f"the image {image.name}: {error.args[0]}") from error

    def host_config(self, limits: Limits, environment: Environment) -> dict[str, Any]:
        from docker.types import LogConfig, Ulimit

        disk = limits.file_bytes
        places = _places(environment)
        memory = limits.memory_bytes + disk * (len(places) + 1) + OVERHEAD
        return self.client.create_host_config(
            network_mode="none",
            mem_limit=memory,
            memswap_limit=memory,
            nano_cpus=int(limits.cores * 1e9),
            pids_limit=limits.processes + 1,
            shm_size=disk,
            tmpfs={
                **dict.fromkeys(() if _own(environment) else _SHUT, "rw,noexec,nosuid,nodev,size=64k,mode=755"),
                **dict.fromkeys(places, f"rw,exec,nosuid,nodev,size={disk},mode=1777"),
            },
            read_only=not _own(environment),
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            ulimits=[Ulimit(name=name, soft=most, hard=most) for name, most in _ULIMITS.items()],
            log_config=LogConfig(type="none"),
            auto_remove=True,
        )


class DockerSandbox(GuestConnection):
    """One container with one guest. To be used in one thread."""

    def __init__(self, engine: Any, files: Mapping[str, str], limits: Limits, environment: Environment | None) -> None:
        super().__init__(files, limits, environment)
        self._get_engine = engine
        self._stream: _Attached | None = None
        self._id: str | None = None
        self._written = self._unlooked = 0.0

    def __enter__(self) -> Self:
        engine: _Engine = self._get_engine()
        self._engine = engine
        if self._environment.checkout is not None and not _own(self._environment):
            raise EnvironmentUnavailable(
                f"the task's environment is the checkout {self._environment.checkout}, which containers do not take: "
                'name its image, or use sandbox = "bubblewrap"'
            )
        with _told():
            image = engine.images.get(self._environment)
            seccomp = engine.seccomp(image)
            self._id = self._make(image.name)
        try:
            with _told():
                sock = engine.client.attach_socket(self._id, {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
                self._stream = self._channel = _Attached(sock)
                engine.client.start(self._id)
            variables = {**_variables(image), "LANG": "C.UTF-8", "TERM": "dumb", "PYTHONDONTWRITEBYTECODE": "1"}
            lines = b"\0".join(f"{key}={value}".encode() for key, value in variables.items())
            self._greet(frame(lines) + frame(seccomp) + frame(engine.guest))
            self._write(self._files)
            self._written = self._size()
        except GuestUnreachable:
            assert self._stream
            reason = self._stream.last_words()
            self.__exit__()
            if _own(self._environment):
                hint = (
                    " The image needs bash and Python 3.9 or newer at /usr/bin/python3." if _NO_PYTHON in reason else ""
                )
                raise EnvironmentUnavailable(
                    f"the image {image.name} could not run the guest: {reason}.{hint}"
                ) from None
            raise SandboxUnavailable(
                f"the engine could not start a container of {image.name}: {reason}. {_NO_ENGINE}"
            ) from None
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        stream, self._stream, self._channel = self._stream, None, None
        if stream is not None:
            stream.close()
        if self._id is not None:
            from docker.errors import DockerException

            with contextlib.suppress(DockerException, OSError):  # gone already, or on its way
                self._engine.client.remove_container(self._id, force=True, v=True)
            self._id = None

    def run(self, command: str, *, timeout: float | None = None) -> CommandResult:
        """As `GuestConnection.run`; a command that makes the container's own disk pass the limit is ended too."""
        result = super().run(command, timeout=timeout)
        self._unlooked += result.seconds
        if self._unlooked > LOOK_SECONDS and not self._ended:
            self._written, self._unlooked = self._size(), 0.0
        return result

    def _make(self, image: str) -> str:
        environment, engine = self._environment, self._engine
        made = engine.client.create_container(
            image,
            name=f"etpi-{uuid.uuid4().hex[:12]}",
            entrypoint=["/bin/sh", "-c", _FIND_PYTHON, engine.boot],
            command=settings(self._limits, address=0, processes=0, places=["/dev/shm", *_places(environment)]),
            user=None if _own(environment) else USER,
            working_dir=environment.workdir,
            hostname="sandbox",
            labels={OWNER: owner()},
            stdin_open=True,
            network_disabled=True,
            host_config=engine.host_config(self._limits, environment),
        )
        return made["Id"]

    def _watch(self, deadline: float) -> None:
        """While a command of a task's own image runs: end it where it makes the container pass the disk limit, or grow
        where it is past it."""
        if not _own(self._environment) or self._stream is None:
            return
        bound = max(self._limits.file_bytes, self._written)
        while not self._stream.readable(min(deadline, time.monotonic() + LOOK_SECONDS)):
            if time.monotonic() >= deadline:
                return
            if self._size() > bound:
                self._stream.put(frame(b"K"), deadline)
                return

    def _size(self) -> float:
        """Bytes that the container has written over its image; 0 where nothing is written there."""
        if not _own(self._environment):
            return 0.0
        with _told():
            found = self._engine.client.containers(all=True, size=True, filters={"id": self._id})
        return float(found[0].get("SizeRw") or 0) if found else 0.0


class _Attached:
    """A container's stdin and stdout through the engine: frames of a kind, three zeros, a length, and that many bytes.
    What the container writes to stderr is kept for its last words."""

    def __init__(self, sock: Any) -> None:
        self._holder = sock
        self._sock: socket.socket = getattr(sock, "_sock", sock)
        self._sock.setblocking(False)
        self._out = bytearray()
        self._raw = bytearray()
        self._said = b""

    def put(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            self._wait(select.POLLOUT, deadline)
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:
                continue
            except OSError:
                raise GuestUnreachable from None

    def take(self, count: int, deadline: float) -> bytes:
        while len(self._out) < count:
            self._wait(select.POLLIN, deadline)
            self._fill()
        data = bytes(self._out[:count])
        del self._out[:count]
        return data

    def readable(self, deadline: float) -> bool:
        """Whether anything comes before the deadline (or has come)."""
        if self._out:
            return True
        try:
            self._wait(select.POLLIN, deadline)
        except GuestUnreachable:
            return False
        return True

    def last_words(self) -> str:
        """What the container said on stderr before it ended."""
        with contextlib.suppress(GuestUnreachable):
            while True:
                self._wait(select.POLLIN, time.monotonic() + 2)
                self._fill()
        return self._said.decode("utf-8", "replace").strip()[-1000:] or "it said nothing"

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._holder.close()

    def _fill(self) -> None:
        try:
            part = self._sock.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            raise GuestUnreachable from None
        if not part:
            raise GuestUnreachable
        self._raw += part
        while len(self._raw) >= 8:
            length = int.from_bytes(self._raw[4:8], "big")
            if len(self._raw) < 8 + length:
                return
            if self._raw[0] == 1:
                self._out += self._raw[8 : 8 + length]
            else:
                self._said = (self._said + self._raw[8 : 8 + length])[-4000:]
            del self._raw[: 8 + length]

    def _wait(self, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._sock.fileno(), event)
        if not poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
            raise GuestUnreachable


def _own(environment: Environment) -> bool:
    """Whether the task brings its image, whose workspace it then is."""
    return environment.image is not None or environment.build is not None


def _places(environment: Environment) -> list[str]:
    """The places in memory: all that is writable, but the workspace of an image."""
    return ["/tmp", *environment.places, *([] if _own(environment) else [environment.workdir])]


def _variables(image: Image) -> dict[str, str]:
    variables = dict(pair.split("=", 1) for pair in image.environment if "=" in pair)
    return {"PATH": _PATH, "HOME": "/tmp", "USER": "agent", **variables}


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Errors of the engine as SandboxUnavailable, with what to do."""
    import requests
    from docker.errors import APIError, DockerException

    try:
        yield
    except APIError as error:
        said = str(error.explanation or error)
        if "no space left" in said.lower() or "quota exceeded" in said.lower():
            remedy = "Its disk is full: free some (docker system prune), or move its storage."
        else:
            remedy = "Look at the engine's log (docker info, journalctl -u docker)."
        raise SandboxUnavailable(f"the container engine refuses: {said}. {remedy}") from error
    except (DockerException, requests.RequestException) as error:
        raise SandboxUnavailable(f"the container engine does not answer: {error}. {_NO_ENGINE}") from error
