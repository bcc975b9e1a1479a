"""Dagster's private names are in two modules: the cluster's executor, and the page, which wraps Dagster's own app."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_private_dagster_names_are_in_two_modules() -> None:
    private = re.compile(r"^\s*(?:from|import) dagster(?:_\w+)?\._", re.MULTILINE)
    packages = ("etpi", "etpi_assets", "cluster", "etpi_resources")
    modules = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    names = {path.relative_to(ROOT).as_posix() for path in modules if private.search(path.read_text())}
    assert names == {"cluster/etpi_cluster/placement/dagster_private.py", "etpi/web/ui.py"}
