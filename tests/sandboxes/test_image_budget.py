"""Images that etpi pulled stay within a budget of disk: the least recently used go first."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from etpi_resources.sandboxes import Environment
from etpi_resources.sandboxes import docker_images as images
from etpi_resources.sandboxes.docker_images import Images

docker = pytest.importorskip("docker")
GIB = 1 << 30


class Engine:
    """An engine with images of 1 GiB each, and names of those that a container has."""

    def __init__(self, *present: str) -> None:
        self.present, self.busy, self.most = set(present), set[str](), 0

    def inspect_image(self, name: str) -> dict[str, Any]:
        if name not in self.present:
            raise docker.errors.ImageNotFound(name)
        return {"Config": {}, "Architecture": "amd64", "Size": GIB}

    def pull(self, name: str, **options: Any) -> list[dict[str, Any]]:
        self.present.add(name)
        self.most = max(self.most, len(self.present))
        return []

    def remove_image(self, name: str) -> None:
        if name in self.busy:
            raise docker.errors.APIError("conflict: a container uses it")
        self.present.remove(name)


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Have each use of an image lie a minute and more after the one before."""
    monkeypatch.setattr(images, "USES", tmp_path / "uses")
    monkeypatch.setattr(images, "RECENT_SECONDS", -1.0)
    monkeypatch.setenv(images.BUDGET, "3")
    at = [1_000_000.0]

    def use(store: Images, name: str) -> None:
        store.get(Environment("/w", image=name))
        at[0] += 100
        if (file := images._use_of(name)).exists():
            os.utime(file, (at[0], at[0]))

    return use


def test_least_recently_used_images_are_removed_under_the_budget(clock) -> None:
    engine = Engine("own:1")
    store = Images(engine)  # pyright: ignore[reportArgumentType]
    for name in ("a:1", "b:1", "c:1", "a:1", "d:1", "own:1"):
        clock(store, name)
    assert engine.present == {"own:1", "a:1", "c:1", "d:1"}  # b was used least recently; own was not pulled by etpi
    clock(store, "b:1")
    assert engine.present == {"own:1", "a:1", "d:1", "b:1"}
    assert engine.most == 5  # the budget, the user's own, and the one that was just pulled


def test_image_of_a_running_container_stays_and_another_goes(clock) -> None:
    engine = Engine()
    store = Images(engine)  # pyright: ignore[reportArgumentType]
    for name in ("a:1", "b:1", "c:1"):
        clock(store, name)
    engine.busy.add("a:1")
    clock(store, "d:1")
    assert engine.present == {"a:1", "c:1", "d:1"}


def test_image_that_another_process_removed_is_pulled_again(clock) -> None:
    engine = Engine()
    store, other = Images(engine), Images(engine)  # pyright: ignore[reportArgumentType]
    clock(store, "a:1")
    for name in ("b:1", "c:1", "d:1"):
        clock(other, name)
    assert "a:1" not in engine.present
    clock(store, "a:1")
    assert "a:1" in engine.present


def test_recently_used_images_stay(clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "RECENT_SECONDS", 1e12)
    engine = Engine()
    store = Images(engine)  # pyright: ignore[reportArgumentType]
    for name in ("a:1", "b:1", "c:1", "d:1"):
        clock(store, name)
    assert len(engine.present) == 4
