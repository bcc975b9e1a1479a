"""Images for containers: looked up, pulled or built, each once, at most two at a time."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etpi_resources.lake.files import write_atomically
from etpi_resources.sandboxes import Environment, EnvironmentUnavailable, SandboxUnavailable

if TYPE_CHECKING:
    from docker import APIClient

DEFAULT_IMAGE = "docker.io/library/python:3.11-slim-bookworm"
"""The image for tasks without one; the environment variable ETPI_DOCKER_IMAGE overrides it. It needs bash and Python
3.9 or newer."""

MAX_CONCURRENT = 2
"""The most pulls and builds at once: each uses the engine's disk and a core."""

BUILD_SECONDS = 3600
BUDGET = "ETPI_IMAGES_GIB"
"""Environment variable with the most GiB of images that etpi pulled or built; the least recently used go first."""
RECENT_SECONDS = 60.0
"""An image that was used so recently stays: its container may not be created yet."""
USES = Path("~/.cache/etpi/images")
"""Folder with a file for each image that etpi pulled or built: its name; the file's time is that of its last use."""
LABEL = "etpi.image"


@dataclass(frozen=True)
class Image:
    """An image on the engine: its name, its `NAME=value` variables, and Docker's name of its architecture (amd64)."""

    name: str
    environment: tuple[str, ...]
    machine: str


class Images:
    """The images of one engine. Thread-safe: an image that two threads need is pulled or built once."""

    def __init__(self, client: APIClient) -> None:
        self._client = client
        self._semaphore = threading.BoundedSemaphore(MAX_CONCURRENT)
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._images: dict[str, Image] = {}
        self._fetched: set[str] = set()

    def get(self, environment: Environment) -> Image:
        """Return the environment's image; pull or build it if the engine does not have it.

        Raises:
            EnvironmentUnavailable: the task's image cannot be pulled or built.
            SandboxUnavailable: the default image, which most rollouts need, cannot be pulled.
        """
        if environment.build is not None:
            name = f"etpi-task:{_fingerprint(environment.build)}"
        else:
            name = environment.image or os.environ.get("ETPI_DOCKER_IMAGE") or DEFAULT_IMAGE
        with self._locks[name]:
            use = _use_of(name)
            if name not in self._images or (name in self._fetched and not use.exists()):  # another process removed it
                self._images[name] = self._inspect(name) or self._fetch(name, environment)
            if use.exists():
                use.touch()
        return self._images[name]

    def _inspect(self, name: str) -> Image | None:
        from docker.errors import ImageNotFound

        try:
            answer = self._client.inspect_image(name)
        except ImageNotFound:
            return None
        return Image(name, tuple((answer.get("Config") or {}).get("Env") or ()), answer["Architecture"])

    def _fetch(self, name: str, environment: Environment) -> Image:
        with self._semaphore:
            problem = self._build(name, environment.build) if environment.build else self._pull(name)
        image = None if problem else self._inspect(name)
        if image is not None:
            if environment.build or environment.image:
                self._fetched.add(name)
                write_atomically(_use_of(name), name)
                self._trim()
            return image
        problem = problem or "the engine says it is done, and has no such image"
        if environment.build:
            raise EnvironmentUnavailable(f"the image of {environment.build} could not be built: {problem}")
        remedy = f"Pull it where there is a network (docker pull {name}), or load it (docker load)."
        if environment.image:
            raise EnvironmentUnavailable(
                f"the image {name} is not on this engine and cannot be pulled: {problem}. {remedy}"
            )
        raise SandboxUnavailable(
            f"the default image {name} is not on this engine and cannot be pulled: {problem}. {remedy} "
            "Or name one that is there: export ETPI_DOCKER_IMAGE=<image with bash and Python>."
        )

    def _trim(self) -> None:
        """Remove the least recently used images until the rest is within the budget; those in use stay."""
        from docker.errors import APIError, ImageNotFound

        uses = sorted(_use_of("").parent.glob("*"), key=lambda file: file.stat().st_mtime)
        sizes: dict[Path, int] = {}
        for use in uses:
            try:
                sizes[use] = self._client.inspect_image(use.read_text())["Size"]
            except ImageNotFound:
                use.unlink()
        for use in sizes.copy():
            if sum(sizes.values()) <= budget():
                return
            if time.time() - use.stat().st_mtime > RECENT_SECONDS:
                name = use.read_text()
                with suppress(APIError):  # a container has it
                    self._client.remove_image(name)
                    self._images.pop(name, None)
                    use.unlink()
                    del sizes[use]

    def _pull(self, name: str) -> str:
        from docker.errors import APIError

        try:
            return _problem(self._client.pull(name, stream=True, decode=True))
        except APIError as error:
            return str(error.explanation or error)

    def _build(self, name: str, folder: Path) -> str:
        from docker.errors import APIError

        try:
            lines = self._client.build(
                path=str(folder),
                tag=name,
                rm=True,
                forcerm=True,
                decode=True,
                labels={LABEL: "1"},
                timeout=BUILD_SECONDS,
            )
            return _problem(lines)
        except (APIError, TypeError) as error:  # TypeError: no Dockerfile, no folder
            return str(getattr(error, "explanation", None) or error)


def budget() -> int:
    """Return the most bytes of images. Raises ValueError if the variable holds no number."""
    return int(float(os.environ.get(BUDGET) or 100) * (1 << 30))


def _use_of(name: str) -> Path:
    return USES.expanduser() / hashlib.sha256(name.encode()).hexdigest()[:32]


def _problem(lines: Any) -> str:
    """Return the error in a stream of progress, with the lines before it; "" if there is none."""
    output: list[str] = []
    for line in lines:
        if error := line.get("error"):
            return f"{error} (before it: {' '.join(output[-8:]).strip()[-600:]})"
        if text := line.get("stream"):
            output.append(text)
    return ""


def _fingerprint(folder: Path) -> str:
    """Return a hash, 16 hex digits, of the paths and contents of a build's folder."""
    if not (folder / "Dockerfile").is_file():
        raise EnvironmentUnavailable(f"{folder} has no Dockerfile to build the task's image from")
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]
