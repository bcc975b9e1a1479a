"""The clusters of these tests, each started once: raylets on this machine, and three machines in containers."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from etpi_resources.backend import CLUSTER_VARIABLE
from etpi_resources.process.supervise import supervised
from tests.support import light_vllm, machines
from tests.support.cluster_runs import EXPERIMENT, Runs, write_specs
from tests.support.cluster_services import CORES, ClusterServices
from tests.support.fake_vllm import write_fake_vllm
from tests.support.ray_nodes import CONNECTED, ROOT, RayNodes, connected

VLLM_KEY = "the key of the servers"
VARIABLE = "ETPI_TEST_CLUSTER"
"""Environment variable that asks for the tests of several machines, which take minutes."""


def pytest_collection_modifyitems(items):
    if os.environ.get(VARIABLE):
        return
    for item in items:
        if "/tests/cluster/" in str(item.path) and "services" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="several machines: make test-long"))


@pytest.fixture(autouse=True)
def _cluster_of_the_module(_nothing_of_the_users, monkeypatch):
    """Name the cluster again that the module is connected to: each test begins without one."""
    for cluster in CONNECTED:
        monkeypatch.setenv("ETPI_CLUSTER", str(cluster.settings))


@pytest.fixture(scope="session")
def services():
    """Machines with Postgres and Ray; everything on them ends with the session."""
    if reason := machines.missing():
        pytest.skip(reason)
    started = machines.Machines(CORES)
    try:
        result = ClusterServices(started)
        write_specs(started.shared / "specs")
        result.start()
        yield result
    finally:
        started.close()


def vllm_programs(folder: Path) -> Path:
    """Write a program that takes the place of `vllm`: for a model with a file `light` one that only lists it."""
    real, program = write_fake_vllm(folder / "stand_in"), folder / "vllm"
    light = f"PYTHONPATH={shlex.quote(str(ROOT))} exec {shlex.quote(sys.executable)} {shlex.quote(light_vllm.__file__)}"
    program.write_text(f'#!/bin/sh\n[ -e "$2/light" ] && {light} "$@"\nexec {shlex.quote(str(real))} "$@"\n')
    program.chmod(0o755)
    return program


@pytest.fixture(scope="session")
def runs(services) -> Runs:
    """Launches runs on the machines, whose web page and daemon run."""
    services.start_pages()
    result = Runs(services)
    result.await_web_page()
    return result


@pytest.fixture(scope="session")
def shared_lake(services) -> Path:
    return services.machines.shared / "lake"


@pytest.fixture(scope="session")
def alone(services, tmp_path_factory) -> Iterator[Callable[[], Path]]:
    """A function that returns the lake of the same experiment on one machine; it starts with the fixture."""
    folder = tmp_path_factory.mktemp("alone")
    write_specs(folder / "specs")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ETPI_", "DAGSTER_"))}
    environment |= {"ETPI_DATA": str(folder / "lake"), "ETPI_SPECS": str(folder / "specs")}
    environment["OMP_NUM_THREADS"] = "1"  # as a node that offers one CPU; a checkpoint's row names the threads
    with (folder / "log").open("wb") as log:
        running = subprocess.Popen(
            supervised([sys.executable, "-m", "etpi", "run", EXPERIMENT], grace=3.0), cwd=machines.ROOT,
            env={**environment, "DAGSTER_HOME": str(folder / "home")}, stdout=log, stderr=log,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def finished() -> Path:
        assert running.wait(timeout=500) == 0, (folder / "log").read_text()[-4000:]
        return folder / "lake"

    try:
        yield finished
    finally:
        running.terminate()
        running.wait()


@pytest.fixture(scope="session")
def prepared(runs) -> None:
    """The suite, by `dagster job launch`."""
    runs.succeed(runs.by_command("prepare_suite", "little"))


@pytest.fixture(scope="session")
def collected(runs, alone, prepared) -> str:
    """The rollout set of the experiment, by `dagster job launch`; the run that collected."""
    run = runs.by_command("collect_rollouts", "little_strong")
    runs.succeed(run)
    return run


@pytest.fixture(scope="session")
def ray_nodes(tmp_path_factory, postgres_server) -> Iterator[RayNodes]:
    pytest.importorskip("ray", reason="Ray is not installed: pip install etpi-cluster")
    folder = Path(tempfile.mkdtemp(prefix="etpi-", dir="/tmp"))  # sockets need a short path
    program = vllm_programs(tmp_path_factory.mktemp("bin"))
    keys = {"TEACHER_KEY": "the key of the node", "VLLM_API_KEY": VLLM_KEY}
    environment = {"ETPI_VLLM": str(program), **keys, **postgres_server.environment}
    database = postgres_server.new_database()
    cluster = RayNodes(folder, tmp_path_factory.mktemp("lake"), "127.0.0.2", postgres=database)
    try:
        for name, address in (("one", "127.0.0.3"), ("two", "127.0.0.4")):
            cluster.add(name, slots=2, gpus=1, address=address, environment=environment)
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def ray_connection(ray_nodes) -> Iterator[RayNodes]:
    with connected(ray_nodes):
        yield ray_nodes


@pytest.fixture
def on_cluster(ray_connection, postgres_server, monkeypatch) -> RayNodes:
    """The cluster, to which this process is connected, as a step is."""
    for name, value in {CLUSTER_VARIABLE: str(ray_connection.settings), **postgres_server.environment}.items():
        monkeypatch.setenv(name, value)
    return ray_connection
