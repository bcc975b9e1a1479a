"""What every test shares: nothing of the user's own environment or data."""

from __future__ import annotations

import pytest
import torch

from etpi_assets import asset, planner
from etpi_assets.graph import GRAPH
from etpi_assets.runs import acceptance as changes
from etpi_assets.runs import explain
from etpi_assets.versioning.codebase import CodeVersion
from etpi_assets.versioning.keys import PartitionCode
from etpi_resources.sandboxes import SandboxFactory
from etpi_resources.sandboxes.bubblewrap import BubblewrapFactory
from etpi_resources.sandboxes.docker import DockerFactory
from tests.support import container_engine, postgres
from tests.support.graph import World


@pytest.fixture(autouse=True)
def _nothing_of_the_users(tmp_path_factory, monkeypatch):
    for name in ("ETPI_SPECS", "DAGSTER_HOME", "ETPI_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ETPI_DATA", str(tmp_path_factory.mktemp("lake")))


@pytest.fixture
def code(monkeypatch):
    """The code of each asset, by name, for tests of the glue to change; "NAME kept" is the part whose results are
    kept."""
    versions = dict.fromkeys([*GRAPH, *(f"{name} kept" for name, node in GRAPH.items() if node.kept)], "1")

    def code_of(node, key, specs):
        def version(name):
            return CodeVersion({f"made.{node.name}": {"function": versions[name]}})

        return PartitionCode(version(node.name), version(f"{node.name} kept") if node.kept else None)

    for module in (planner, asset, changes, explain):
        monkeypatch.setattr(module, "code_of", code_of)
    return versions


@pytest.fixture
def world(tmp_path, code):
    """A lake, specs and recipes for tests of the glue."""
    return World(tmp_path)


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
