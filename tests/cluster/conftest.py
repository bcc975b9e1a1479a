"""Three machines with Postgres and Ray, once for all tests of this folder. `make test-cluster` runs them."""

from __future__ import annotations

import os

import pytest

from tests.support import machines
from tests.support.cluster_services import CORES, ClusterServices

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
