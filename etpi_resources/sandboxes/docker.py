"""The container sandbox: one container per rollout through the Docker API, with the same guest as bubblewrap.

The host is isolated from commands by: a container without network, capabilities, new privileges or host folders;
control groups for memory, processes and cores; the engine's and our own system call filter; and inside, the guest's
limits on output, files and time. A task without an image runs as an unprivileged user on a read-only root, in a
workspace of bounded size. A task's own image is writable, because its workspace is in it, and runs as the user that the
image names; its disk use is checked twice a second, and a command that exceeds the limit is ended.

The guest exits when the connection with its stdin closes, and the engine then removes the container. So a process that
dies leaves no running containers. One that the engine was still creating, or keeps, is removed by the next process that
connects (`docker_owner`).
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import select
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from etpi_resources.sandboxes import CommandResult, Environment, EnvironmentUnavailable, Limits, SandboxUnavailable
from etpi_resources.sandboxes.docker_images import Image, Images
from etpi_resources.sandboxes.docker_owner import OWNER, owner, reap
from etpi_resources.sandboxes.downloads.proxy import SHOWN_AT
from etpi_resources.sandboxes.guest_connection import (
    END_SECONDS,
    GUEST,
    OPEN_FILES,
    GuestConnection,
    GuestUnreachable,
    frame,
    guest_arguments,
    wait_until_ready,
)
from etpi_resources.sandboxes.memory_group import MemoryGroup
from etpi_resources.sandboxes.seccomp import filter_program

if TYPE_CHECKING:
    from docker import APIClient

RUNTIME = "ETPI_DOCKER_RUNTIME"
"""Environment variable that names the engine's runtime, such as gVisor's runsc; default: the engine's own."""

_USERS = (1 << 30, 1 << 31)
_USERS_ROOTLESS = (20_000, 60_000)
"""Users and groups of containers of the default image: every container has one of its own, since limits of the kernel
that count by user (inotify, pipes, keys) would otherwise be shared. An engine without root has fewer ids."""

_MASKED = (
    "/proc/acpi", "/proc/asound", "/proc/bootconfig", "/proc/cmdline", "/proc/config.gz", "/proc/interrupts",
    "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/sched_debug", "/proc/scsi", "/proc/timer_list",
    "/proc/timer_stats", "/sys/devices/virtual/powercap", "/sys/firmware",
)  # fmt: skip
"""Paths that a container cannot read: the engines' own list, and the kernel's command line and configuration."""

_INSTALLING = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID")
"""Capabilities that apt and dpkg need, of the 14 that engines give by default."""

API_SECONDS = 120
_OLDEST_API = "1.41"
DISK_CHECK_SECONDS = 0.5
"""Seconds between checks of a container's disk use."""
MOST_UNMEASURED = 40
"""Checks in a row that may fail because files come and go; after them a command counts as over its disk limit."""

OVERHEAD = 64 * 1024**2
"""Bytes of memory for the guest and the kernel, in addition to the limits of commands and files."""

_ULIMITS = {"nofile": OPEN_FILES, "core": 0, "nproc": 32_768}
"""nproc counts a user's processes on the whole engine, so the control group limits processes instead. It is set because
podman's default exceeds what an engine that runs in a container may set."""

_PODMAN_TMPFS = ("/run", "/var/tmp")
"""podman makes these writable in a container with a read-only root, as large as memory; so they are mounted small."""

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
    """Creates containers on the engine that DOCKER_HOST names. Thread-safe; it connects when the first sandbox starts,
    and then also removes containers of dead processes."""

    name = "docker"

    def __init__(self) -> None:
        self._engine: _Engine | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[DockerFactory], tuple[()]]:
        """Pickle without the connection of this machine."""
        return DockerFactory, ()

    def create(
        self,
        files: Mapping[str, str],
        limits: Limits = Limits(),  # noqa: B008
        environment: Environment | None = None,
    ) -> DockerSandbox:
        """Create a sandbox with `files` (relative path -> text) written over the image's workspace.

        Raises ValueError if a path is absolute or contains `..`; entering raises as `SandboxFactory.create` says.
        """
        return DockerSandbox(self._get_engine, files, limits, environment)

    def check(self) -> None:
        """Raise SandboxUnavailable if the engine does not answer. No image is checked: tasks may have their own."""
        self._get_engine()

    def _get_engine(self) -> _Engine:
        with self._lock:
            self._engine = self._engine or _Engine.connect()
            return self._engine


class _Engine:
    """A connection to an engine, with its images and the programs that every container runs."""

    def __init__(self, client: APIClient, is_podman: bool) -> None:
        self.client, self.images, self.is_podman = client, Images(client), is_podman
        self.guest, self.boot = GUEST.read_bytes(), _BOOT.read_text(encoding="utf-8")
        rootless = any("rootless" in option for option in client.info().get("SecurityOptions") or ())
        self._users = _USERS_ROOTLESS if rootless else _USERS

    @classmethod
    def connect(cls) -> _Engine:
        """Connect to the engine and remove containers of dead processes; raises SandboxUnavailable."""
        import docker  # here, since importing it takes long
        import requests
        from docker.errors import DockerException
        from docker.utils import kwargs_from_env

        options = kwargs_from_env()
        try:  # /_ping returns the version at once; podman's /version first queries the system's package manager
            probe = docker.APIClient(version=_OLDEST_API, timeout=API_SECONDS, **options)
            answer = probe.get(f"{probe.base_url}/_ping")
            answer.raise_for_status()
            client = docker.APIClient(
                version=answer.headers.get("Api-Version", _OLDEST_API), timeout=API_SECONDS, **options
            )
        except (DockerException, requests.RequestException) as error:
            raise SandboxUnavailable(f"no container engine answers: {error}. {_NO_ENGINE}") from error
        is_podman = "Libpod-Api-Version" in answer.headers
        if is_podman and (runtime := os.environ.get(RUNTIME)):
            raise SandboxUnavailable(
                f"podman ignores the runtime of a request: unset {RUNTIME} and start its service with "
                f"`podman --runtime {runtime} system service ...`"
            )
        with _engine_errors():
            reap(client)
        return cls(client, is_podman)

    def unused_user(self) -> str:
        """Return a random user and group, as the engine takes them."""
        first, last = self._users
        user = secrets.randbelow(last - first) + first
        return f"{user}:{user}"

    def memory_group(self, container: str) -> MemoryGroup | None:
        """Return the container's control group; None if it has ended or the engine is on another machine."""
        from docker.errors import NotFound

        with _engine_errors():
            try:
                return MemoryGroup.of_container(container, self.client.inspect_container(container)["State"]["Pid"])
            except NotFound:
                return None

    def seccomp(self, image: Image) -> bytes:
        """Return the system call filter for the image's architecture."""
        machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(image.machine, image.machine)
        try:
            return filter_program(machine)
        except KeyError as error:
            raise EnvironmentUnavailable(f"the image {image.name}: {error.args[0]}") from error

    def host_config(self, limits: Limits, environment: Environment) -> dict[str, Any]:
        from docker.types import LogConfig, Ulimit

        disk = limits.file_bytes
        places = _places(environment)
        shown: dict[str, str] = {}
        if environment.downloads is not None:  # so the engine sees this machine's folders
            # What a runner installs goes into the image's own packages.
            tools = () if environment.installs else environment.tools
            shown = {str(tool): str(tool) for tool in tools} | {str(environment.downloads): SHOWN_AT}
        memory = limits.memory_bytes + disk * (len(places) + 1) + OVERHEAD
        config = self.client.create_host_config(
            network_mode="none",
            runtime=os.environ.get(RUNTIME),
            mem_limit=memory,
            memswap_limit=memory,
            nano_cpus=int(limits.cores * 1e9),
            pids_limit=limits.processes + 1,
            shm_size=disk,
            binds=[f"{folder}:{place}:ro" for folder, place in shown.items()] or None,
            tmpfs={
                **dict.fromkeys(
                    () if _has_image(environment) else _PODMAN_TMPFS, "rw,noexec,nosuid,nodev,size=64k,mode=755"
                ),
                **dict.fromkeys(places, f"rw,exec,nosuid,nodev,size={disk},mode=1777"),
            },
            read_only=not _has_image(environment),
            cap_drop=["ALL"],
            cap_add=list(_INSTALLING) if environment.installs and _has_image(environment) else None,
            security_opt=["no-new-privileges", *([f"mask={':'.join(_MASKED)}"] if self.is_podman else [])],
            ulimits=[Ulimit(name=name, soft=most, hard=most) for name, most in _ULIMITS.items()],
            log_config=LogConfig(type="none"),
            auto_remove=True,
        )
        if not self.is_podman:  # it takes no such key, and Docker takes no `mask`; the SDK has no argument for either
            config["MaskedPaths"] = list(_MASKED)
        return config


class DockerSandbox(GuestConnection):
    """One container with one guest, for use in one thread."""

    def __init__(
        self,
        get_engine: Callable[[], _Engine],
        files: Mapping[str, str],
        limits: Limits,
        environment: Environment | None,
    ) -> None:
        super().__init__(files, limits, environment)
        self._get_engine = get_engine
        self._stream: _ContainerChannel | None = None
        self._id: str | None = None
        self._disk_bytes = self._unchecked_seconds = 0.0
        self._unmeasured = 0

    def __enter__(self) -> Self:
        engine = self._engine = self._get_engine()
        if self._environment.checkout is not None and not _has_image(self._environment):
            raise EnvironmentUnavailable(
                f"the task's environment is the checkout {self._environment.checkout}, which containers do not take: "
                'name its image, or use sandbox = "bubblewrap"'
            )
        with _engine_errors():
            image = engine.images.get(self._environment)
            seccomp = engine.seccomp(image)
            self._id = container = self._create(image.name)
        try:
            self._start(container, image, seccomp)
        except GuestUnreachable:
            assert self._stream
            reason, stop = self._stream.stderr(), self._stopped_by()
            self._close()
            self._require_own_end(stop)
            raise self._start_error(image, reason) from None
        except BaseException:
            self._close()
            raise
        return self

    def _start(self, container: str, image: Image, seccomp: bytes) -> None:
        """Attach to the container, start it, send the boot program's frames and write the files."""
        engine = self._engine
        with _engine_errors():
            sock = engine.client.attach_socket(container, {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
            self._stream = self._channel = _ContainerChannel(sock)
            engine.client.start(container)
        variables = {**_variables(image), "LANG": "C.UTF-8", "TERM": "dumb", "PYTHONDONTWRITEBYTECODE": "1"}
        lines = b"\0".join(f"{key}={value}".encode() for key, value in variables.items())
        self._start_guest(frame(lines) + frame(seccomp) + frame(engine.guest))
        self._group = engine.memory_group(container)
        self._write(self._files)
        self._disk_bytes = self._measure_disk()

    def _start_error(self, image: Image, reason: str) -> EnvironmentUnavailable | SandboxUnavailable:
        """Return the error for a guest that did not start: the task's image is at fault, or else the engine."""
        if _has_image(self._environment):
            hint = " The image needs bash and Python 3.9 or newer at /usr/bin/python3." if _NO_PYTHON in reason else ""
            return EnvironmentUnavailable(f"the image {image.name} could not run the guest: {reason}.{hint}")
        return SandboxUnavailable(f"the engine could not start a container of {image.name}: {reason}. {_NO_ENGINE}")

    def __exit__(self, kind: object, *exc: object) -> None:
        """Raise SandboxUnavailable if it was stopped from outside, perhaps with the command that ran last."""
        is_stopped = kind is None and not self._ended and self._stream is not None and self._stream.is_closed()
        stop = self._stopped_by() if is_stopped else ""
        self._close()
        self._require_own_end(stop)

    def _close(self) -> None:
        stream, self._stream, self._channel = self._stream, None, None
        if stream is not None:
            stream.close()
        if self._id is not None:
            from docker.errors import DockerException

            with contextlib.suppress(DockerException, OSError):  # the engine has removed it, or is about to
                self._engine.client.remove_container(self._id, force=True, v=True)
            self._id = None

    def run(self, command: str, *, timeout: float | None = None) -> CommandResult:
        """Run one bash command, as `GuestConnection.run`; also end it if the container's disk exceeds the limit."""
        result = super().run(command, timeout=timeout)
        self._unchecked_seconds += result.seconds
        if self._unchecked_seconds > DISK_CHECK_SECONDS and not self._ended:
            self._disk_bytes, self._unchecked_seconds = self._measure_disk(), 0.0
        return result

    def _stopped_by(self) -> str:
        """A guest ends with 0 when its connection does. An engine that restarts has no record of its end. A command can
        have a guest neither answer nor end."""
        own_kills = self._own_kills()  # the engine removes the control group with the container
        is_closed = self._stream is not None and self._stream.is_closed()
        deadline = time.monotonic() + self._end_seconds()
        with _engine_errors():
            while not (end := self._recorded_end()):
                if time.monotonic() > deadline:
                    return "its connection was cut" if is_closed else ""
                time.sleep(0.05)
        status = int(end["Actor"]["Attributes"].get("exitCode") or 0)
        return self._signal_in(status, own_kills) if status else "its container was ended"

    def _recorded_end(self) -> dict[str, Any] | None:
        """Return the engine's event of the container's end."""
        of_container, now = {"container": self._id}, int(time.time()) + 1
        events = self._engine.client.events(since=1, until=now, filters=of_container, decode=True)
        return next((event for event in events if event["Action"] == "die"), None)

    def _create(self, image: str) -> str:
        """Create the container; return its id."""
        environment, engine = self._environment, self._engine
        container = engine.client.create_container(
            image,
            name=f"etpi-{uuid.uuid4().hex[:12]}",
            entrypoint=["/bin/sh", "-c", _FIND_PYTHON, engine.boot],
            command=guest_arguments(self._limits, address=0, processes=0, places=["/dev/shm", *_places(environment)]),
            user=None if _has_image(environment) else engine.unused_user(),
            working_dir=environment.workdir,
            hostname="sandbox",
            labels={OWNER: owner()},
            stdin_open=True,
            network_disabled=True,
            host_config=engine.host_config(self._limits, environment),
        )
        return container["Id"]

    def _watch(self, deadline: float) -> None:
        """While a command runs in a task's own image: end it if the container exceeds the disk limit, or grows after it
        has exceeded it."""
        if not _has_image(self._environment) or self._stream is None:
            return
        bound = max(self._limits.file_bytes, self._disk_bytes)
        while not self._stream.readable(min(deadline, time.monotonic() + DISK_CHECK_SECONDS)):
            if time.monotonic() >= deadline:
                return
            if self._measure_disk() > bound:
                self._stream.put(frame(b"K"), deadline)
                return

    def _measure_disk(self) -> float:
        """Return the bytes that the container has written over its image; 0 for a read-only root.

        podman walks the container's files and fails if one is deleted meanwhile: then the last measurement counts,
        until too many fail in a row."""
        if not _has_image(self._environment):
            return 0.0
        from docker.errors import APIError

        with _engine_errors():
            try:
                containers = self._engine.client.containers(all=True, size=True, filters={"id": self._id})
            except APIError as error:
                if "no such file" not in str(error.explanation or error):
                    raise
                self._unmeasured += 1
                return self._disk_bytes if self._unmeasured < MOST_UNMEASURED else math.inf
        self._unmeasured = 0
        return float(containers[0].get("SizeRw") or 0) if containers else 0.0


class _ContainerChannel:
    """A channel over a container's stdin and stdout, through the engine.

    The engine sends frames of one byte that names the stream, three zeros, a length, and that many bytes. The end of
    stderr is kept for error messages.
    """

    def __init__(self, sock: Any) -> None:
        self._response = sock
        self._sock: socket.socket = getattr(sock, "_sock", sock)
        self._sock.setblocking(False)
        self._stdout = bytearray()
        self._raw = bytearray()
        self._stderr = b""
        self._is_closed = False

    def put(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            wait_until_ready(self._sock.fileno(), select.POLLOUT, deadline)
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:
                continue
            except OSError:
                self._is_closed = True
                raise GuestUnreachable from None

    def take(self, count: int, deadline: float) -> bytes:
        while len(self._stdout) < count:
            wait_until_ready(self._sock.fileno(), select.POLLIN, deadline)
            self._receive()
            if time.monotonic() > deadline:  # stderr may never pause
                raise GuestUnreachable
        data = bytes(self._stdout[:count])
        del self._stdout[:count]
        return data

    def is_closed(self) -> bool:
        with contextlib.suppress(GuestUnreachable):
            if not self._is_closed:
                wait_until_ready(self._sock.fileno(), select.POLLIN, time.monotonic())
                self._receive()
        return self._is_closed

    def readable(self, deadline: float) -> bool:
        """Wait until there is data to read; return False if the deadline passes first."""
        if self._stdout:
            return True
        try:
            wait_until_ready(self._sock.fileno(), select.POLLIN, deadline)
        except GuestUnreachable:
            return False
        return True

    def stderr(self) -> str:
        """Return the end of the container's stderr."""
        deadline = time.monotonic() + END_SECONDS
        with contextlib.suppress(GuestUnreachable):
            while time.monotonic() < deadline:
                wait_until_ready(self._sock.fileno(), select.POLLIN, deadline)
                self._receive()
                self._stdout.clear()
        return self._stderr.decode("utf-8", "replace").strip()[-1000:] or "it said nothing"

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._response.close()

    def _receive(self) -> None:
        try:
            part = self._sock.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            self._is_closed = True
            raise GuestUnreachable
        self._raw += part
        while len(self._raw) >= 8:
            length = int.from_bytes(self._raw[4:8], "big")
            if len(self._raw) < 8 + length:
                return
            if self._raw[0] == 1:
                self._stdout += self._raw[8 : 8 + length]
            else:
                self._stderr = (self._stderr + self._raw[8 : 8 + length])[-4000:]
            del self._raw[: 8 + length]


def _has_image(environment: Environment) -> bool:
    """Return whether the task has its own image; the workspace is then in the image."""
    return environment.image is not None or environment.build is not None


def _places(environment: Environment) -> list[str]:
    """Return the writable folders in memory: all writable ones except an image's workspace."""
    return ["/tmp", *environment.places, *([] if _has_image(environment) else [environment.workdir])]


def _variables(image: Image) -> dict[str, str]:
    variables = dict(pair.split("=", 1) for pair in image.environment if "=" in pair)
    return {"PATH": _PATH, "HOME": "/tmp", "USER": "agent", **variables}


@contextlib.contextmanager
def _engine_errors() -> Iterator[None]:
    """Raise the engine's errors as SandboxUnavailable, with a remedy."""
    import requests
    from docker.errors import APIError, DockerException

    try:
        yield
    except APIError as error:
        message = str(error.explanation or error)
        if "no space left" in message.lower() or "quota exceeded" in message.lower():
            remedy = "Its disk is full: free some space (docker system prune), or move its storage."
        else:
            remedy = "Look at the engine's log (docker info, journalctl -u docker)."
        raise SandboxUnavailable(f"the container engine refuses: {message}. {remedy}") from error
    except (DockerException, requests.RequestException) as error:
        raise SandboxUnavailable(f"the container engine does not answer: {error}. {_NO_ENGINE}") from error
