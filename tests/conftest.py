"""What every test shares: nothing of the user's own environment or data, and the marks that say what a test costs."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import entry_points
from pathlib import Path

import hypothesis
import pytest
import torch

from etpi_assets import asset
from etpi_assets.graph import GRAPH
from etpi_assets.planning import planner, versions
from etpi_resources.sandboxes import SandboxFactory
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory
from etpi_resources.sandboxes.docker import DockerFactory
from etpi_resources.sandboxes.downloads.proxy import ProxyUnavailable, mitmdump_program
from tests.support import container_engine, postgres
from tests.support.graph import World
from tests.support.students import CONSUMERS, OF_CONSUMERS

hypothesis.settings.register_profile("quick", max_examples=20, deadline=None)
hypothesis.settings.register_profile("full", deadline=None)
hypothesis.settings.load_profile("full")

COSTLY = {"slow", "attack", "browser", "cluster", "consumers", "docker", "lab", "mitmproxy", "long"}
"""Marks of tests that `make test` leaves out; all others are marked `quick`."""
MARK_OF_FIXTURE = {
    "_engine_process": "docker",
    "chromium": "browser",
    "browser": "browser",
    "consumers": "consumers",
    "mitmproxy": "mitmproxy",
    "postgres_server": "cluster",
    "services": "long",
}
MARK_OF_PARAMETER = {("factory", "docker"): "docker", ("locks", "postgres"): "cluster"}
MARK_OF_FOLDER = {"cluster": "cluster", "lab": "lab"}
LAB = "lab" in entry_points(group="etpi.specs").names
CLUSTER = "cluster" in entry_points(group="etpi.backends").names
collect_ignore = [*([] if LAB else ["lab"]), *([] if CLUSTER else ["cluster"])]
FIRST = ("cluster", "docker")
"""Marks whose tests share a server of the session; they are the largest groups, so processes start with them."""


def pytest_report_header() -> str:
    missing = [name for name, installed in (("lab", LAB), ("cluster", CLUSTER)) if not installed]
    return f"not installed, so its tests are left out (make setup): {', '.join(missing)}" if missing else ""


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes name no test: compressed ones hold the time, and two processes of one run would collect different tests."""
    return argname if isinstance(val, bytes) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with what it needs; put the largest groups first, and attacks, which share nothing, last."""
    for item in items:
        for name in _needs(item):
            item.add_marker(name)
        marks = {mark.name for mark in item.iter_markers()}
        if not marks & COSTLY:
            item.add_marker("quick")
    items.sort(key=_turn)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Run tests that share a fixture in one process: those of a file, of the cluster, and of Docker.

    pytest-xdist's own `loadgroup` does nothing under pytest 9.2, which ignores the names that it gives to tests.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            if path.startswith("tests/attacks/"):
                return nodeid
            if path.startswith("tests/cluster/"):
                return "cluster"
            return "docker" if "[docker" in nodeid or "docker" in path or "container" in path else path

    return Groups(config, log)


def _needs(item: pytest.Item) -> set[str]:
    """Return the marks that follow from a test's folder, fixtures and parameters."""
    call = getattr(item, "callspec", None)
    given = {name: value for name, value in call.params.items() if isinstance(value, str)} if call else {}
    names = {MARK_OF_FOLDER.get(item.path.parent.name)}
    names |= {MARK_OF_FIXTURE.get(name) for name in getattr(item, "fixturenames", ())}
    names |= {MARK_OF_PARAMETER.get(pair) for pair in given.items()}
    if OF_CONSUMERS.intersection(given.values()):
        names.add("consumers")
    if item.get_closest_marker("vllm"):
        names.add("long")
    return {name for name in names if name}


def _turn(item: pytest.Item) -> int:
    """Return where a test stands in the order."""
    marks = {mark.name for mark in item.iter_markers()}
    first = [mark in marks for mark in FIRST]
    return first.index(True) if any(first) else len(first) + ("attack" in marks)


@pytest.fixture(autouse=True)
def _nothing_of_the_users(tmp_path_factory, monkeypatch):
    for name in ("ETPI_SPECS", "DAGSTER_HOME", "ETPI_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ETPI_DATA", str(tmp_path_factory.mktemp("lake")))


@pytest.fixture
def code(monkeypatch):
    """The number of each asset's code, by name, for tests of the glue to raise; "NAME kept" is the part whose results
    are kept."""
    numbers = dict.fromkeys([*GRAPH, *(f"{name} kept" for name, node in GRAPH.items() if node.kept)], 1)

    def versions_of(node, key, specs):
        kept = {f"{node.name} kept": numbers[f"{node.name} kept"]} if node.kept else None
        return versions.PartitionVersions({node.name: numbers[node.name], **(kept or {})}, kept)

    for module in (planner, asset):
        monkeypatch.setattr(module, "versions_of", versions_of)
    components = {name: {1: "as it was", 2: "better", 3: "best"} for name in numbers}
    monkeypatch.setattr(versions, "COMPONENTS", components)
    return numbers


@pytest.fixture
def world(tmp_path, code):
    """A lake, specs and definitions for tests of the glue."""
    return World(tmp_path, code)


@pytest.fixture
def flushed(monkeypatch) -> list[Path]:
    """The files and folders that are flushed to disk, in order."""
    paths, fsync = [], os.fsync

    def record(descriptor: int) -> None:
        fsync(descriptor)
        paths.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "fsync", record)
    return paths


@pytest.fixture
def own_threads():
    """For a test of what gives threads to others: torch has those of before again afterwards."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def _engine_process():
    if reason := container_engine.missing():
        pytest.skip(reason)
    engine = container_engine.PodmanService()
    try:
        engine.make_image()
        engine.start()
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def engine(_engine_process):
    """A real Docker API (podman's), named in the environment as a user would, with an image to run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", _engine_process.address)
        patch.setenv("ETPI_DOCKER_IMAGE", container_engine.IMAGE)
        yield _engine_process


@pytest.fixture(scope="module", params=["bubblewrap", "docker"])
def factory(request) -> SandboxFactory:
    """Each kind of sandbox in turn."""
    if request.param == "docker":
        request.getfixturevalue("engine")
        return DockerFactory()
    return BubblewrapFactory()


@pytest.fixture(scope="session")
def chromium() -> str:
    """The browser's program."""
    if not (program := shutil.which("chromium")):
        pytest.skip("needs chromium (.ci/run installs it)")
    return program


@pytest.fixture(scope="session")
def consumers() -> Path:
    """The folder of programs that read what etpi writes, which `make consumers` installs."""
    if not (CONSUMERS / "ready").exists():
        pytest.skip("`make consumers` installs the packages that read exports")
    return CONSUMERS


@pytest.fixture(scope="session")
def mitmproxy() -> Path:
    """mitmproxy's program, which `make mitmproxy` installs."""
    try:
        return mitmdump_program()
    except ProxyUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def postgres_server():
    """A real Postgres; tests that restart it leave it running."""
    if reason := postgres.missing():
        pytest.skip(reason)
    server = postgres.PostgresServer()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def cluster_settings(postgres_server, tmp_path, monkeypatch):
    """Name in the environment a cluster with a database of its own and the lake `<tmp_path>/lake`."""
    path = postgres.write_settings(tmp_path / "cluster", postgres_server.new_database(), tmp_path / "lake")
    for name, value in {"ETPI_CLUSTER": str(path), **postgres_server.environment}.items():
        monkeypatch.setenv(name, value)
    return path
