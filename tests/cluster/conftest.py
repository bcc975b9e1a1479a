"""The clusters of these tests, each started once: raylets on this machine, and three machines in containers."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from etpi.rehearsal.stages import write_stand_in
from tests.support import machines
from tests.support.cluster_services import CORES, ClusterServices
from tests.support.ray_nodes import RayNodes, connected

VARIABLE = "ETPI_TEST_CLUSTER"
"""Environment variable that asks for the tests of several machines, which take minutes."""


def pytest_collection_modifyitems(items):
    if os.environ.get(VARIABLE):
        return
    for item in items:
        if "/tests/cluster/" in str(item.path) and "services" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="several machines: make test-cluster"))


@pytest.fixture(scope="session")
def services():
    """Machines with Postgres and Ray; everything on them ends with the session."""
    if reason := machines.missing():
        pytest.skip(reason)
    started = machines.Machines(CORES)
    try:
        result = ClusterServices(started)
        result.start()
        yield result
    finally:
        started.close()


@pytest.fixture(scope="session")
def ray_nodes(tmp_path_factory) -> Iterator[RayNodes]:
    pytest.importorskip("ray", reason='Ray is not installed: pip install "etpi[cluster]"')
    folder = Path(tempfile.mkdtemp(prefix="etpi-", dir="/tmp"))  # sockets need a short path
    program = write_stand_in(tmp_path_factory.mktemp("bin") / "vllm")
    environment = {"ETPI_VLLM": str(program), "TEACHER_KEY": "the key of the node"}
    cluster = RayNodes(folder, tmp_path_factory.mktemp("lake"))
    try:
        for name in ("one", "two"):
            cluster.add(name, slots=2, gpus=1, environment=environment)
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def on_cluster(ray_nodes) -> Iterator[RayNodes]:
    """The cluster, to which this process is connected."""
    with connected(ray_nodes):
        yield ray_nodes
