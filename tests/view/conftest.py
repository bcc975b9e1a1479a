"""One lake for all tests of the pages that change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.support import viewed_lake


@pytest.fixture(scope="session")
def viewed(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """(lake, path of its catalog)"""
    root = tmp_path_factory.mktemp("viewed")
    lake = viewed_lake.make(root / "data")
    return lake, viewed_lake.build(lake, root / "etpi.duckdb")


@pytest.fixture(scope="session")
def pages(viewed: tuple[object, Path]) -> TestClient:
    return viewed_lake.client(*viewed)
