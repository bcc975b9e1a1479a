"""One small Ray cluster for all tests of this folder that need one: two nodes, each for two rollouts and with a GPU of
which only Ray knows."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from etpi.rehearsal.stages import write_stand_in
from tests.support.ray_nodes import RayNodes, connected


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
